"""Any scorer behind a URL as a reward: one JSON POST per few images.

Request: `{"prompts": [{"id", "text", "theme", "grid": [rows, cols], "panels", "criteria"}, …], "images": [PNG in
base64, …]}`, and `"sources": [[PNG, …], …]` if the prompts edit images. Answer: `{"scores": [number or null, …]}`,
one per image. A network that fails is tried again; what still fails is missing, never 0.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from PIL.Image import Image

from pacorl.io.documents import parse_json
from pacorl.rewards.reward import RewardError, named
from pacorl.types import Prompt

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 20.0
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that another try may not see."""

logger = logging.getLogger(__name__)


class HttpScorer:
    """Scores by a service of one's own. `key_env` names the environment variable that holds a bearer key."""

    def __init__(
        self,
        url: str,
        *,
        batch: int = 8,
        concurrency: int = 4,
        timeout: float = 60.0,
        tries: int = 5,
        key_env: str = "",
    ) -> None:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname or address.password:
            raise ValueError(f"rewards.http.args.url: {url!r} is no http(s) URL without a password")
        for name, value in (("batch", batch), ("concurrency", concurrency), ("timeout", timeout), ("tries", tries)):
            if not value > 0:
                raise ValueError(f"rewards.http.args.{name} must be above 0, got {value}")
        self.url, self.key_env = url, key_env
        self.batch, self.concurrency, self.timeout, self.tries = batch, concurrency, timeout, tries
        self.last_error = ""

    def load(self) -> None:
        """Raises RewardError if the key's variable is not set."""
        if self.key_env and not os.environ.get(self.key_env):
            raise RewardError(f"reward 'http': the environment variable {self.key_env} is not set")

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        starts = range(0, len(images), self.batch)
        batches = [(prompts[start : start + self.batch], images[start : start + self.batch]) for start in starts]
        with ThreadPoolExecutor(self.concurrency) as pool:
            return [score for answer in pool.map(self._scores, *zip(*batches, strict=True)) for score in answer]

    def _scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        body = json.dumps(_request(prompts, images)).encode()
        for attempt in range(self.tries):
            if attempt:
                time.sleep(min(FIRST_WAIT_SECONDS * 2 ** (attempt - 1), LONGEST_WAIT_SECONDS))
            try:
                return self._parsed(self._post(body, prompts), prompts)
            except OSError as error:  # no connection, a timeout, a passing status
                self.last_error = f"{self.url}: {error}"
        logger.warning("%s; %d tries, %s missing", self.last_error, self.tries, named(prompts))
        return [None] * len(images)

    def _post(self, body: bytes, prompts: Sequence[Prompt]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.key_env:
            headers["Authorization"] = f"Bearer {os.environ[self.key_env]}"
        request = urllib.request.Request(self.url, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                # An OSError, which `_scores` tries again; any other status is a fault that no try mends.
                if error.code in PASSING:
                    raise ConnectionError(f"HTTP {error.code}") from None
                reply = error.read(200).decode(errors="replace")
            raise RewardError(f"{self.url} refused {named(prompts)}: HTTP {error.code} {reply}") from None

    def _parsed(self, answer: bytes, prompts: Sequence[Prompt]) -> list[float | None]:
        try:
            scores = parse_json(answer)["scores"]
        except (ValueError, TypeError, KeyError):
            shown = answer[:120].decode(errors="replace")
            raise RewardError(f'{self.url} answered no {{"scores": […]}} to {named(prompts)}: {shown!r}') from None
        if not isinstance(scores, list) or len(scores) != len(prompts):
            count = len(scores) if isinstance(scores, list) else "no list of"
            raise RewardError(f"{self.url} answered {count} scores for {len(prompts)} images ({named(prompts)})")
        return scores


def _request(prompts: Sequence[Prompt], images: Sequence[Image]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "prompts": [
            {
                "id": prompt.id,
                "text": prompt.text,
                "theme": prompt.theme,
                "grid": [prompt.grid.rows, prompt.grid.cols],
                "panels": list(prompt.panels),
                "criteria": {dimension: dict(texts) for dimension, texts in prompt.criteria.items()},
            }
            for prompt in prompts
        ],
        "images": [_png(image) for image in images],
    }
    if any(prompt.sources for prompt in prompts):
        # As they are on the disk, at their own size: what the service compares them with is its own choice.
        document["sources"] = [
            [base64.b64encode(path.read_bytes()).decode() for path in prompt.sources] for prompt in prompts
        ]
    return document


def _png(image: Image) -> str:
    buffer = io.BytesIO()
    # Level 1: the service is near, and the default level takes several times as long for a tenth fewer bytes.
    image.convert("RGB").save(buffer, "PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()
