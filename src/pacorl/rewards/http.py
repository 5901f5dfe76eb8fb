"""Any scorer behind a URL as a reward: one JSON POST per few images.

Request: `{"prompts": [{"id", "text", "theme", "grid": [rows, cols], "panels", "criteria"}, …], "images": [PNG in
base64, …]}`, `"sources": [[PNG, …], …]` if the prompts edit images, and `"references": [[PNG, …], …]` if they have
images of characters. Answer: `{"scores": [number or null, …]}`, one per image. Network failures and invalid JSON are
retried; scores that still fail are missing, not 0. In training an unreachable service is retried for `outage` seconds,
like a judge over HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections.abc import Sequence
from itertools import chain
from typing import Any

from PIL.Image import Image

from pacorl.io.images import png_bytes
from pacorl.io.net import Answer, Circuit, TransientError, blocking, key_from, service_url
from pacorl.io.outage import OUTAGE_SECONDS, Outage, ask
from pacorl.rewards.reward import RewardError, named
from pacorl.types import Prompt

logger = logging.getLogger(__name__)


class HttpScorer:
    """Scores by a service of one's own. `key_env` names the environment variable that holds a bearer key."""

    bounds_itself = True

    def __init__(
        self,
        url: str,
        *,
        batch: int = 8,
        concurrency: int = 4,
        timeout: float = 60.0,
        tries: int = 5,
        key_env: str = "",
        outage: float = OUTAGE_SECONDS,
    ) -> None:
        # Settings, each checked by its name in the config.
        self.url = service_url(url, name="rewards.http.args.url:")
        for name, value in (("batch", batch), ("concurrency", concurrency), ("timeout", timeout), ("tries", tries)):
            if not value > 0:
                raise ValueError(f"rewards.http.args.{name} must be above 0, got {value}")
        if not outage >= 0:
            raise ValueError(f"rewards.http.args.outage must be 0 or above, got {outage}")
        self.key_env = key_env
        self.outage = outage
        self.batch = batch
        self.concurrency = concurrency
        self.timeout = timeout
        self.tries = tries
        # State of the service.
        self.last_error = ""
        self._circuit = Circuit(timeout)
        self._outage: Outage | None = None

    def load(self) -> None:
        """Raises RewardError if the key's variable is not set."""
        if self.key_env and not os.environ.get(self.key_env):
            raise RewardError(f"reward 'http': the environment variable {self.key_env} is not set")

    def wait_for_outages(self, seconds: float | None = None) -> None:
        """From now on retry for up to `seconds`, by default `outage`; then a call raises UnreachableError."""
        seconds = self.outage if seconds is None else seconds
        if seconds:
            self._outage = Outage(f"reward service {self.url}", [self._circuit], seconds=seconds)

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return blocking(self._all_scores(prompts, images))

    async def _all_scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        free = asyncio.Semaphore(self.concurrency)
        key = key_from(self.key_env)

        async def scores(batch: slice) -> list[float | None]:
            async with free:
                return await self._scores(prompts[batch], images[batch], key)

        # A few requests at a time; the answers keep the order of the images.
        batches = [slice(start, start + self.batch) for start in range(0, len(images), self.batch)]
        answers = await asyncio.gather(*map(scores, batches))
        return list(chain(*answers))

    async def _scores(self, prompts: Sequence[Prompt], images: Sequence[Image], key: str) -> list[float | None]:
        # On another thread: images are encoded while other answers come in.
        items = await asyncio.to_thread(lambda: list(map(_item, prompts, images)))
        document = {"prompts": [item["prompt"] for item in items], "images": [item["image"] for item in items]}
        for field in ("sources", "references"):
            if any(item.get(field) for item in items):
                document[field] = [item.get(field, []) for item in items]
        options: dict[str, Any] = {"tries": self.tries, "seconds": self.timeout, "key": key, "circuit": self._circuit}
        options["outage"] = self._outage
        try:
            return await ask(self.url, document, lambda answer: self._parsed(answer, prompts), **options)
        except TransientError as fault:
            self.last_error = f"{self.url}: {fault}"
            logger.warning("%s; %s missing", self.last_error, named(prompts))
            return [None] * len(prompts)

    def _parsed(self, answer: Answer, prompts: Sequence[Prompt]) -> list[float | None]:
        if answer.status != 200:
            fix = f"; redirects are not followed, name {answer.redirect} if it is yours" if answer.redirect else ""
            raise RewardError(f"{self.url} refused {named(prompts)}: {answer.fault()}{fix}")
        scores = answer.document().get("scores")
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
