"""The judge protocol, and a config's judge.

A judge gets images and a question. Its score is P(Yes | Yes or No) of the first answer token (arXiv 2512.04784, §3.2).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, model_validator

from pacorl.config.base import Positive, Section
from pacorl.core.devices import NONE, Quantization
from pacorl.io.net import is_url, service_url
from pacorl.io.outage import OUTAGE_SECONDS
from pacorl.types import Question, Verdict

RETRIES = 6
"""Further requests of a question before its verdict is missing."""
WORDS = (("Yes",), ("No",))
"""The spellings of Yes and of No that count by default."""
VARIANTS = (("Yes", "yes", "YES", "Y", "y"), ("No", "no", "NO", "N", "n"))
"""The spellings that EditReward-Bench adds up, if they are single tokens."""


class JudgeRefusedError(ValueError):
    """Fatal fault of a judge: wrong model name, refused key, Yes or No not a single token."""


class Judge(Protocol):
    """Answers questions about images.

    Example:
        judge = LocalJudge.from_pretrained("X-GenGroup/PaCo-Reward-7B", dtype="bfloat16", device="cuda")
        judge.verdicts([Question((first, second), same_theme("a red fox"))])[0].p_yes
    """

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """Return one verdict per question, in order; a missing verdict carries its reason."""

    def explain(self, question: Question) -> str:
        """Answer in words."""


@dataclass(slots=True)
class Counters:
    """Counts of a judge's requests and questions."""

    requests: int = 0
    """Chat requests sent, retries included."""
    retries: int = 0
    """Requests that repeat a failed request."""
    missing: int = 0
    """Distinct questions that ended without a probability."""


@runtime_checkable
class RemoteJudge(Judge, Protocol):
    """A judge outside this process: thread-safe, with counters, and to be closed at the end."""

    counters: Counters
    """Counts so far."""

    def close(self) -> None:
        """Abandon running requests."""


def counts_of(judge: Judge | None) -> dict[str, int]:
    """Return a remote judge's counts by name; empty for a judge in this process."""
    return asdict(judge.counters) if isinstance(judge, RemoteJudge) else {}


def close_judge(judge: Judge | None) -> None:
    """Close a remote judge."""
    if isinstance(judge, RemoteJudge):
        judge.close()


# --- settings --------------------------------------------------------------------------------------------------

BATCH_TOKENS = 8192
"""Most tokens of one forward, padding included; so many keep a GPU busy with a 7B model, whose activations then take
about 2 GiB."""
STARTUP_SECONDS = 180.0
"""Time for which a run that begins waits for a server that does not answer yet: a 7B model loads that long."""
DAY = 86_400.0


class JudgeSettings(Section):
    """A judge in this process, or behind an OpenAI-compatible API."""

    checkpoint: str = "X-GenGroup/PaCo-Reward-7B"
    """A transformers folder, a hub name, `tiny` or `tiny-edits` for the committed judges, or a server's address:
    `URL[,URL…][#MODEL]`."""
    adapter: str = ""
    """A LoRA on top of the checkpoint, a folder or a hub name."""
    model: str = ""
    """The model's name at a server; empty for its only one."""
    api_key_env: str = ""
    """The environment variable that holds a server's key."""

    # Verdicts.
    symmetric: bool = False
    """Whether each pair is asked about in both orders and scored by the mean, at twice the questions."""
    calibration: str = ""
    """A file of `pacorl calibrate`, whose curve maps each P(Yes)."""

    # In this process.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights."""
    quantize: Quantization = NONE
    """int8: the weights of the model's blocks are kept in 8 bits."""
    stream: bool = False
    """Whether the weights of the model's blocks stay in main memory, and are sent to the device layer by layer in each
    forward."""
    overlap: bool | Literal["auto"] = "auto"
    """Whether samples are scored while the next are drawn. auto: yes, unless judge and generator would share the same
    CPU cores; so it is without a judge too. Scores are the same either way."""

    # At a server.
    concurrency: Positive = 32
    """Requests that a server is sent at a time, by all processes together."""
    timeout: float = Field(60.0, gt=0, le=DAY)
    """Seconds for an answer."""
    outage: float = Field(OUTAGE_SECONDS, ge=0, le=DAY)
    """Seconds for which a training retries questions that no server answers; then it saves, and ends with
    exit code 75. 0: such verdicts are missing, and count for advantages.max_missing."""

    @model_validator(mode="after")
    def _makes_sense(self) -> JudgeSettings:
        if self.remote:
            _, named = split_address(self.checkpoint)
            if self.adapter:
                raise ValueError(
                    f"adapter {self.adapter} is a server's own affair; name it there, and here as the model"
                )
            if named and self.model not in ("", named):
                raise ValueError(f"checkpoint names the model {named}, and model is {self.model}; name one")
        return self

    @property
    def remote(self) -> bool:
        """Whether it is behind an API; a remote judge is opened before any weights load, so that a wrong address fails
        early."""
        return is_address(self.checkpoint)

    @property
    def name(self) -> str:
        """The judge's name in messages."""
        if not self.remote:
            return self.checkpoint
        return self.model or split_address(self.checkpoint)[1] or self.checkpoint

    def patience(self, missing: int) -> float:
        """Return the seconds after which `missing` scores are given up if no server answers."""
        if not self.remote:
            return 0.0
        rounds = 1 + math.ceil(missing / self.concurrency)
        return STARTUP_SECONDS + self.outage + rounds * (1 + RETRIES) * self.timeout


# --- addresses -------------------------------------------------------------------------------------------------

ADDRESS = re.compile(r"[\w.-]+:\d+(/\S*)?")
"""An address without `http://`."""


def is_address(source: str) -> bool:
    """Whether a judge's name is the address of a server, or of several."""
    first = source.split(",", maxsplit=1)[0].partition("#")[0].strip()
    return is_url(first) or (bool(ADDRESS.fullmatch(first)) and not Path(first).exists())


def split_address(source: str) -> tuple[list[str], str]:
    """Split `URL[,URL…][#MODEL]` into the base URLs of its servers, and the model's name or "".

    Raises:
        ValueError: a URL is invalid, or has a password or a key, which would be logged.
    """
    addresses, _, model = source.partition("#")
    urls = []
    for address in addresses.split(","):
        url = address.strip() if "://" in address else f"http://{address.strip()}"
        split = urlsplit(service_url(url, name="address").rstrip("/"))
        urls.append(urlunsplit((split.scheme, split.netloc, split.path or "/v1", "", "")))
    # Each once: a repeated address would get twice its slots.
    return list(dict.fromkeys(urls)), model
