"""The judge protocol, the options common to all backends, and the entries of the table `JUDGES`.

A judge gets images and a question. Its score is P(Yes | Yes or No) of the first answer token (arXiv 2512.04784, §3.2).

To add a backend: a file with an options model, a class behind `Judge` and a `JudgeSpec`, and one line of `JUDGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import model_validator

from pacorl.config.base import Positive, Section
from pacorl.core.devices import NONE, Quantization
from pacorl.io.files import digest
from pacorl.types import Chat, Question, Verdict

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


@runtime_checkable
class ChatJudge(Judge, Protocol):
    """Judge of whole turns, with a system prompt and texts between the images."""

    def reply(self, chat: Chat, *, max_new_tokens: int = 512) -> str:
        """Answer in words. Raises RuntimeError if there is no answer."""


@dataclass(slots=True)
class Counters:
    """Counts of a judge's requests and questions."""

    requests: int = 0
    """Chat requests sent, retries included."""
    retries: int = 0
    """Requests that repeat a failed request."""
    missing: int = 0
    """Distinct questions that ended without a probability."""
    cached: int = 0
    """Questions answered by an identical question of the same call."""


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


# --- options and specs -----------------------------------------------------------------------------------------

BACKEND_KEYS = {
    *("model", "api_key_env", "concurrency", "timeout", "retries", "startup", "outage"),
    *("dtype", "quantize", "stream", "batch_tokens"),
}
"""Keys of single backends. A backend drops foreign keys."""


class BackendOptions(Section):
    """Options common to all backends; each backend adds its own keys."""

    backend: str
    """In this process, or behind an OpenAI-compatible API."""
    checkpoint: str
    """A folder, a hub name, `tiny`, or a server's URL or endpoints YAML, by the backend."""
    symmetric: bool = False
    """Whether each pair is asked about in both orders and scored by the mean, at twice the questions."""
    variants: bool = False
    """Whether yes/Yes/YES/y/Y are added up against no/No/NO/n/N; for judges that spell their answers freely."""
    calibration: str = ""
    """A file of `pacorl calibrate`, whose curves map each P(Yes)."""
    overlap: bool | Literal["auto"] = "auto"
    """Whether samples are scored while the next are drawn. auto: yes, unless judge and generator would share the same
    CPU cores; so it is without a judge too. Scores are the same either way."""

    @model_validator(mode="before")
    @classmethod
    def _without_keys_of_other_backends(cls, section: Any) -> Any:
        # A file written for one backend is often overridden to another (`judge.backend=…`). An adapter stays, and is
        # refused later: it would change the verdicts.
        if not isinstance(section, Mapping):
            return section
        foreign = BACKEND_KEYS - cls.model_fields.keys()
        if section.get("adapter") == "":
            foreign |= {"adapter"} - cls.model_fields.keys()
        return {key: value for key, value in section.items() if key not in foreign}

    def patience(self, missing: int) -> float:
        """Return the seconds after which `missing` scores are given up if no server answers."""
        return 0.0

    def on_resume(self) -> BackendOptions:
        """Return the options with which a resumed run opens the judge."""
        return self

    def identity(self) -> str:
        """Return an identifier of the verdicts, independent of paths: a digest of the weights, or a server's model.

        Empty if unknown, e.g. for a checkpoint outside this machine.
        """
        return ""

    @property
    def calibration_digests(self) -> list[str]:
        """The calibration file's digest, a part of `identity`; empty without a file."""
        return [digest(Path(self.calibration))] if self.calibration else []

    @property
    def name(self) -> str:
        """The judge's name in messages."""
        return self.checkpoint


class InProcessOptions(BackendOptions):
    """Options of a judge in this process."""

    adapter: str = ""
    """A LoRA on top of the checkpoint, a folder or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights."""
    quantize: Quantization = NONE
    """int8: the weights of the model's blocks are kept in 8 bits."""
    stream: bool = False
    """Whether the weights of the model's blocks stay in main memory, and are sent to the device layer by layer in each
    forward."""
    batch_tokens: Positive = 8192
    """Most tokens of one forward, padding included; so many keep a GPU busy with a 7B model, whose activations then
    take about 2 GiB."""


@dataclass(frozen=True, slots=True)
class JudgeSpec:
    """A line of `JUDGES`."""

    options: type[BackendOptions]
    """The section `judge:` of this backend."""
    open: Callable[..., Judge]
    """(options, *, device, processes, waits) → the judge, ready for questions. `processes` share it; `waits` allows for
    a server that is still starting.

    Raises ValueError or OSError with the fault.
    """
    from_source: Callable[..., tuple[Judge, str]]
    """(source, *, adapter, model, api_key_env, temperature, variants, calibration, quantize, stream)
    → the judge and its display name. Backends ignore arguments that do not apply."""
    check: Callable[[str, str], object] = lambda source, adapter: None
    """(source, adapter) → raises ValueError for faults that are visible before loading; a server's appear later."""
    claims: Callable[[str], bool] = lambda source: False
    """Whether a source belongs to this backend; unclaimed sources go to the table's default."""
    remedy: Callable[[Any], str] = lambda options: ""
    """(options) → remedy for a silent judge, a clause for the end of a message."""
    bases: Mapping[str, Path] = field(default_factory=dict)
    """Published base → JSON file with its `config.json` as `model` and its image options as `processor`, for plans and
    twins. The first one's sizes approximate other checkpoints outside this machine."""
    embedded: Mapping[str, Path] = field(default_factory=dict)
    """Name of a committed checkpoint → its folder."""

    @property
    def in_process(self) -> bool:
        """Whether it is opened after the generator's text encoders have left the device.

        A remote judge is opened before any weights load, so that a wrong address fails early.
        """
        return issubclass(self.options, InProcessOptions)
