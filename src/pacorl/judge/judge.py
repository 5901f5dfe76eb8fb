"""The judge protocol, and a config's judge.

A judge gets images and a question. Its score is P(Yes | Yes or No) of the first answer token (arXiv 2512.04784, §3.2).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit, urlunsplit

from pydantic import model_validator

from pacorl.config.base import ModelSection
from pacorl.io.net import OUTAGE_SECONDS, is_url, service_url
from pacorl.types import Question, Verdict

RETRIES = 6
"""Further requests of a question before its verdict is missing."""
MOST_WORDS = 512
"""Most tokens of an answer in words."""
WORDS = (("Yes",), ("No",))
"""The spellings of Yes and of No that count by default."""
VARIANTS = (("Yes", "yes", "YES", "Y", "y"), ("No", "no", "NO", "N", "n"))
"""The spellings that EditReward-Bench adds up, if they are single tokens."""


class Judge(Protocol):
    """Model or server that answers questions about images.

    Example:
        judge = LocalJudge.from_pretrained("X-GenGroup/PaCo-Reward-7B", dtype="bfloat16", device="cuda")
        judge.verdicts([Question((first, second), same_theme("a red fox"))])[0].p_yes
    """

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """Return one verdict per question, in order; a missing verdict carries its reason."""

    def explain(self, question: Question) -> str:
        """Answer in words."""


@runtime_checkable
class RemoteJudge(Judge, Protocol):
    """A judge outside this process: thread-safe, and to be closed at the end."""

    def wait_for_outages(self, seconds: float = OUTAGE_SECONDS) -> None:
        """Retry unanswered questions from now on, for up to `seconds`; then raise UnreachableError."""

    def close(self) -> None:
        """Abandon running requests."""


def close_judge(judge: Judge | None) -> None:
    """Close a remote judge."""
    if isinstance(judge, RemoteJudge):
        judge.close()


BATCH_TOKENS = 8192
"""Most tokens of one forward, padding included; so many keep a GPU busy with a 7B model, whose activations then take
about 2 GiB."""
STARTUP_SECONDS = 180.0
"""Time limit for a server to answer at the start of a run: a 7B model takes that long to load."""
CONCURRENCY = 32
"""Concurrent requests to a server, of all processes together."""
ANSWER_SECONDS = 60.0
"""Time limit of an answer."""


class JudgeSettings(ModelSection):
    """A judge in this process, or behind an OpenAI-compatible API."""

    checkpoint: str = "X-GenGroup/PaCo-Reward-7B"
    """A folder or hub name of a model, or of a LoRA, whose adapter_config.json names its base; `tiny` or `tiny-edits`
    for the committed judges; or a server's address, `URL[#MODEL]`, whose key is in PACORL_API_KEY. A model in this
    process computes in bfloat16 on a GPU, a tiny one in float32."""

    @model_validator(mode="after")
    def _makes_sense(self) -> JudgeSettings:
        if self.remote:
            split_address(self.checkpoint)
        return self

    @property
    def remote(self) -> bool:
        """Whether it is behind an API; a remote judge is opened before any weights load, so that a wrong address fails
        early."""
        return is_address(self.checkpoint)

    @property
    def name(self) -> str:
        """The judge's name in messages."""
        return (split_address(self.checkpoint)[1] if self.remote else "") or self.checkpoint


ADDRESS = re.compile(r"[\w.-]+:\d+(/\S*)?")
"""An address without `http://`."""


def is_address(source: str) -> bool:
    """Whether a judge's name is the address of a server."""
    url = source.partition("#")[0].strip()
    return is_url(url) or (bool(ADDRESS.fullmatch(url)) and not Path(url).exists())


def split_address(source: str) -> tuple[str, str]:
    """Split `URL[#MODEL]` into the base URL of the server, and the model's name or "".

    Raises:
        ValueError: the URL is invalid, or has a password or a key, which would be logged.
    """
    address, _, model = source.partition("#")
    url = address.strip() if "://" in address else f"http://{address.strip()}"
    split = urlsplit(service_url(url, name="address").rstrip("/"))
    return urlunsplit((split.scheme, split.netloc, split.path or "/v1", "", "")), model
