"""The seam of a judge, the options that every judge has, and what a line of the table `JUDGES` brings.

A judge is shown images and a question, and its P(Yes | Yes or No) of the first answer token is the score
(arXiv 2512.04784, §3.2).

To add a backend: a file with an options model, a class behind `Judge` and a `JudgeSpec`, and one line of `JUDGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import model_validator

from pacorl.config.base import Positive, Section
from pacorl.models.quantize import NONE, Quantization
from pacorl.types import Question, Verdict

WORDS = (("Yes",), ("No",))
"""The spellings of Yes and of No that count by default."""
VARIANTS = (("Yes", "yes", "YES", "Y", "y"), ("No", "no", "NO", "N", "n"))
"""The spellings whose probabilities EditReward-Bench adds up (those of them that are single tokens)."""


class JudgeRefusedError(ValueError):
    """A fault that no retry mends: wrong model name, refused key, Yes or No not a single token."""


class Judge(Protocol):
    """Answers questions about images.

    Example:
        judge = LocalJudge.from_pretrained("X-GenGroup/PaCo-Reward-7B", dtype="bfloat16", device="cuda")
        judge.verdicts([Question((first, second), same_theme("a red fox"))])[0].p_yes
    """

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order; a failed one says why."""

    def explain(self, question: Question) -> str:
        """The answer in words."""


@dataclass(slots=True)
class Counters:
    """What a judge has done so far."""

    requests: int = 0
    """Chat requests sent, retries included."""
    retries: int = 0
    """Of these, those that repeat a failed one."""
    missing: int = 0
    """Distinct questions that ended without a probability."""
    cached: int = 0
    """Questions answered by an identical one of the same call."""


@runtime_checkable
class RemoteJudge(Judge, Protocol):
    """A judge outside of this process: several threads may ask it at once, it counts, and it is closed at the end."""

    counters: Counters
    """What it has done so far."""

    def close(self) -> None:
        """Abandons what is running."""


@dataclass(frozen=True, slots=True)
class JudgeFacts:
    """What a judge says of itself."""

    yes_ids: tuple[int, ...] = ()
    """Token ids of Yes; empty if a server does not tell, and its answers are read by their text."""
    no_ids: tuple[int, ...] = ()
    """Token ids of No, likewise."""
    served: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Endpoint → model names; empty for a judge in this process."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the libraries or the server, by name."""
    weight_bytes: int = 0
    """Of this process; a server's memory is its own."""


@runtime_checkable
class Inspectable(Protocol):
    """A judge that knows what it is."""

    def facts(self) -> JudgeFacts:
        """Raises what the judge raises if it cannot be asked."""


def counts_of(judge: Judge | None) -> dict[str, int]:
    """What a remote judge has done so far, by name; nothing of one in this process."""
    return asdict(judge.counters) if isinstance(judge, RemoteJudge) else {}


def close_judge(judge: Judge | None) -> None:
    """Ends what a judge runs beside its caller."""
    if isinstance(judge, RemoteJudge):
        judge.close()


# --- options and specs -----------------------------------------------------------------------------------------

BACKEND_KEYS = {
    *("model", "api_key_env", "concurrency", "timeout", "retries", "startup", "outage"),
    *("dtype", "quantize", "stream", "batch_tokens"),
}
"""Keys of single backends. A backend drops the keys of the others."""


class BackendOptions(Section):
    """Who answers the questions; each backend adds its own keys."""

    backend: str
    """In this process, or behind an OpenAI-compatible API."""
    checkpoint: str
    """A folder, a hub name, `tiny`, or a server's URL or endpoints YAML, by the backend."""
    symmetric: bool = False
    """Whether each pair is asked about in both orders and scored by the mean, at twice the questions."""
    variants: bool = False
    """Whether yes/Yes/YES/y/Y are added up against no/No/NO/n/N; for judges that spell their answers freely."""
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
            foreign |= {"adapter"}
        return {key: value for key, value in section.items() if key not in foreign}

    def patience(self, missing: int) -> float:
        """Seconds after which so many scores are surely missing, if nobody answers."""
        return 0.0

    def on_resume(self) -> BackendOptions:
        """The options by which a resumed run opens the judge."""
        return self

    def identity(self) -> str:
        """What decides the verdicts, wherever it lies: a digest of the weights, or a server's model.

        Empty if it cannot be known, as of a checkpoint that is not on this machine yet.
        """
        return ""

    @property
    def name(self) -> str:
        """What messages call the judge."""
        return self.checkpoint


class InProcessOptions(BackendOptions):
    """A judge that lives in this process's memory."""

    adapter: str = ""
    """A LoRA on top of the checkpoint, a folder or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the weights."""
    quantize: Quantization = NONE
    """Whether the weights of the model's blocks are kept in 8 or 4 bits: `int8`, `fp8`, or `nf4`, which needs
    `pip install 'pacorl[nf4]'`."""
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
    """(options, *, device, processes, waits) → the judge, ready to be asked; `processes` share it, and with `waits` one
    that is still starting is waited for.

    Raises ValueError or OSError that names what is wrong.
    """
    from_source: Callable[..., tuple[Judge, str]]
    """(source, *, adapter, model, api_key_env, temperature, variants, decline, quantize, stream) → the judge that a
    person names in one word, and what to call it. A backend ignores what says nothing to it."""
    check: Callable[[str, str], object] = lambda source, adapter: None
    """(source, adapter) → says what can be known to be wrong with them at once; a server says it when it is reached."""
    claims: Callable[[str], bool] = lambda source: False
    """Whether a source is one of this backend's; the table's default takes what nobody claims."""
    remedy: Callable[[Any], str] = lambda options: ""
    """(options) → how to get the judge to answer, once it did not; a clause for the end of a message."""
    base: str = ""
    """What the published judge is made from; its sizes stand in for a checkpoint that is not here."""
    architecture: Path | None = None
    """A JSON of that base's `config.json` as `model` and image options as `processor`, for the memory plan."""
    tiny: Path | None = None
    """The committed checkpoint that `tiny` names."""

    @property
    def in_process(self) -> bool:
        """Whether it is opened after the generator's text encoders have left the device.

        Another is opened before any weights load, so that a wrong address costs no time.
        """
        return issubclass(self.options, InProcessOptions)
