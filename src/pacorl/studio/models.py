"""Models to choose from: what they do, and which of them fit this card and main memory."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pacorl.config.options import MEMORY
from pacorl.io.hub import OF_PIPELINE, PIPELINE, download_command, local_file
from pacorl.judge.judge import JudgeSettings
from pacorl.models.policies import POLICIES, kind_of
from pacorl.types import TINY

JUDGE = JudgeSettings().checkpoint
"""The published judge, which reads every model's pictures but the practice model's."""
PACE = {"normal": "", "low": ", slower", "lowest": ", slowly"}
"""`memory` → what it costs."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A published model."""

    name: str
    does: str
    licence: str
    index: str = PIPELINE
    """A file that is here if the model is."""
    gated: bool = False
    """Whether the hub gives it only to people who accepted its licence there."""

    @property
    def is_here(self) -> bool:
        """Whether it can be loaded without a download."""
        return self.name == TINY or Path(self.name).is_file() or local_file(self.name, self.index) is not None

    @property
    def download(self) -> list[str]:
        """Arguments of Python that fetch it into the hub's cache, and go on with an interrupted download."""
        files = OF_PIPELINE if self.index == PIPELINE else ()
        return ["-m", "huggingface_hub.cli.hf", *shlex.split(download_command(self.name, *files))[1:]]


def offers() -> Iterator[Offer]:
    """List the practice model, the published generators and the judge."""
    yield Offer(TINY, "draws and changes pictures", "Apache-2.0")
    for spec in POLICIES.values():
        does = " and ".join(["draws"] * spec.sets + ["changes pictures"] * spec.edits)
        yield Offer(spec.published, does, spec.licence[1] or spec.licence[0], gated=spec.gated)
    yield Offer(JUDGE, "judges", "Apache-2.0", index="config.json")


@cache
def fit_of(model: str) -> tuple[str, str]:
    """Plan a generator beside its judge on this machine.

    Returns:
        The first form of `memory` that fits, empty if none does; and a line for a person.
    """
    from pacorl.plan.generation import plan_generation

    spec = POLICIES.named(kind_of(model))
    needs = ""
    for memory in MEMORY:
        plan = plan_generation(spec.options_for(model, dtype="bfloat16", memory=memory), judge=judge_of(model))
        card, main = plan.peak_bytes, plan.memory.held
        if not plan.device_bytes:  # the models are in main memory
            card, main = 0, main + card
        needs = f"{card / 2**30:.0f} GB of a card and " if card else ""
        needs += f"{main / 2**30:.0f} GB of main memory"
        if not plan.shortage and main <= (plan.main_bytes or main):
            return memory, f"runs here{PACE[memory]}: takes {needs}"
    return "", f"does not fit this machine: takes {needs}"


def judge_of(model: str) -> str:
    """Return the judge that reads a model's pictures."""
    return TINY if model == TINY else JUDGE


def shown_name(model: str, kind: str = "model") -> str:
    """Name a model for a person."""
    if model == TINY:
        return f"the practice {kind}"
    return Path(model).name if Path(model).is_absolute() else model
