"""Any scorer behind a URL as a reward: one JSON POST per few images.

Request: `{"prompts": [{"id", "text", "theme", "grid": [rows, cols], "panels", "criteria"}, …], "images": [PNG in
base64, …]}`, `"sources": [[PNG, …], …]` if the prompts edit images, and `"references": [[PNG, …], …]` if they have
images of characters. Answer: `{"scores": [number or null, …]}`, one per image. Network failures and invalid JSON are
retried; scores that still fail are missing, not 0. In training an unreachable service is retried for `outage` seconds,
like a judge over HTTP.
"""

from __future__ import annotations

import base64
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from pacorl.io.documents import parse_json
from pacorl.io.images import png_bytes
from pacorl.io.net import (
    MALFORMED,
    PASSING,
    TransientError,
    client_options,
    exchange,
    key_from,
    service_url,
    status_fault,
)
from pacorl.io.outage import OUTAGE_SECONDS, Outage, backoff
from pacorl.rewards.reward import RewardError, named
from pacorl.types import Prompt

if TYPE_CHECKING:
    import httpx2

logger = logging.getLogger(__name__)

MOST_BYTES = 2**20
"""Largest answer of a service."""


class HttpScorer:
    """Scores by a service of one's own. `key_env` names the environment variable that holds a bearer key."""

    def __init__(
        self,
        url: str,
        *,
        batch: int = 8,
        timeout: float = 60.0,
        tries: int = 5,
        key_env: str = "",
        outage: float = OUTAGE_SECONDS,
    ) -> None:
        # Settings, each checked by its name in the config.
        self.url = service_url(url, name="rewards.http.args.url:")
        for name, value in (("batch", batch), ("timeout", timeout), ("tries", tries)):
            if not value > 0:
                raise ValueError(f"rewards.http.args.{name} must be above 0, got {value}")
        if not outage >= 0:
            raise ValueError(f"rewards.http.args.outage must be 0 or above, got {outage}")
        self.key_env = key_env
        self.outage = outage
        self.batch = batch
        self.timeout = timeout
        self.tries = tries
        # State of the service.
        self.last_error = ""
        self._silence: Outage | None = None

    def load(self) -> None:
        """Raises RewardError if the key's variable is not set."""
        if self.key_env and not os.environ.get(self.key_env):
            raise RewardError(f"reward 'http': the environment variable {self.key_env} is not set")

    def wait_for_outages(self, seconds: float | None = None) -> None:
        """From now on retry for up to `seconds`, by default `outage`; then a call raises UnreachableError."""
        seconds = self.outage if seconds is None else seconds
        self._silence = Outage(f"reward service {self.url}", seconds=seconds) if seconds > 0 else None

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        import httpx2

        scores: list[float | None] = []
        with httpx2.Client(**client_options(self.url, seconds=self.timeout, key=key_from(self.key_env))) as client:
            for start in range(0, len(images), self.batch):
                batch = slice(start, start + self.batch)
                scores += self._scores(client, prompts[batch], images[batch])
        return scores

    def _scores(
        self, client: httpx2.Client, prompts: Sequence[Prompt], images: Sequence[Image]
    ) -> Sequence[float | None]:
        items = list(map(_item, prompts, images))
        document = {"prompts": [item["prompt"] for item in items], "images": [item["image"] for item in items]}
        for field in ("sources", "references"):
            if any(item.get(field) for item in items):
                document[field] = [item.get(field, []) for item in items]

        failed = 0
        while True:
            sent_at = time.monotonic()
            try:
                return self._parsed(self._post(client, document), prompts)
            except TransientError as error:
                fault = error
            # In an outage no attempt counts.
            wait = self._silence.wait(fault, sent_at=sent_at) if self._silence and fault.unreachable else None
            if wait is None:
                failed += 1
                if failed >= self.tries:
                    self.last_error = f"{self.url}: {fault} (attempt {failed}, the last)"
                    logger.warning("%s; %s missing", self.last_error, named(prompts))
                    return [None] * len(prompts)
                wait = max(fault.wait, backoff(failed))
            time.sleep(wait)

    def _post(self, client: httpx2.Client, document: dict[str, Any]) -> httpx2.Response:
        """Return an answer of a final status. Raises TransientError for any other, and for faults of the wire."""
        response = exchange(client, "POST", self.url, seconds=self.timeout, max_bytes=MOST_BYTES, json=document)
        if response.status_code in PASSING or response.status_code >= 500:
            fault = status_fault(response)
            if self._silence and not fault.unreachable:
                self._silence.note_answer()
            raise fault
        if self._silence:
            self._silence.note_answer()
        return response

    def _parsed(self, response: httpx2.Response, prompts: Sequence[Prompt]) -> list[float | None]:
        if response.status_code != 200:
            raise RewardError(f"{self.url} refused {named(prompts)}: {status_fault(response)}")
        try:
            scores = parse_json(response.content).get("scores")
            for score in scores if isinstance(scores, list) else ():
                _ = float(score) if type(score) is int else score  # a number beyond floats is none
        except MALFORMED as error:
            raise TransientError(f"an answer that is not JSON ({type(error).__name__})") from None
        if not isinstance(scores, list) or len(scores) != len(prompts):
            count = f"{len(scores)} scores" if isinstance(scores, list) else 'no {"scores": […]}'
            raise RewardError(f"{self.url} answered {count} for {len(prompts)} images ({named(prompts)})")
        return scores


def _item(prompt: Prompt, image: Image) -> dict[str, Any]:
    """Encode one image and its prompt for the request."""
    item: dict[str, Any] = {
        "prompt": {
            "id": prompt.id,
            "text": prompt.text,
            "theme": prompt.theme,
            "grid": [prompt.grid.rows, prompt.grid.cols],
            "panels": list(prompt.panels),
            "criteria": {dimension: dict(texts) for dimension, texts in prompt.criteria.items()},
        },
        "image": base64.b64encode(png_bytes(image.convert("RGB"))).decode(),
        # As stored, at their original size: the service chooses the size of comparison.
        "sources": [base64.b64encode(path.read_bytes()).decode() for path in prompt.sources],
    }
    if prompt.references:
        item["references"] = [base64.b64encode(path.read_bytes()).decode() for path in prompt.references]
    return item
