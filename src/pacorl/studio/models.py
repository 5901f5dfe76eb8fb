"""Models to choose from: their abilities, and whether they fit this card and main memory."""

import shlex
from functools import cache
from pathlib import Path

from pacorl.config.options import MEMORY, Memory, StudioModels
from pacorl.io.hub import OF_PIPELINE, PIPELINE, download_command, local_file
from pacorl.judge.judge import JudgeSettings
from pacorl.models.policies import POLICIES, kind_of
from pacorl.types import TINY

JUDGE = JudgeSettings().checkpoint
"""The published judge, which reads every model's pictures but the practice model's."""
PRACTICE = StudioModels()
PRACTICE_ONLY = (
    "The practice model and the practice judge know only a small world of drawn heroes. What they make of pictures of "
    "your own, and their numbers for them, mean nothing: choose another model at the top for those."
)


def offers() -> dict[str, str]:
    """Map the practice model and the published generators to their abilities."""
    listed = {TINY: "draws and changes pictures"}
    for spec in POLICIES.values():
        does = " and ".join(["draws"] * spec.sets + ["changes pictures"] * spec.edits)
        licence = spec.licence[1] or spec.licence[0]
        listed[spec.published] = f"{does}: {spec.parameters / 5e8:.0f} GB without its text encoders, licence {licence}"
    return listed


def is_here(name: str) -> bool:
    """Whether a model can be loaded without a download."""
    index = "config.json" if name == JUDGE else PIPELINE
    return name == TINY or Path(name).is_file() or local_file(name, index) is not None


def download(name: str) -> list[str]:
    """Return arguments of Python that fetch a model into the hub's cache, or go on with it."""
    files = () if name == JUDGE else OF_PIPELINE
    return ["-m", "huggingface_hub.cli.hf", *shlex.split(download_command(name, *files))[1:]]


@cache
def fit_of(model: str) -> tuple[Memory | None, str]:
    """Plan a generator together with its judge on this machine, which takes ten seconds.

    Returns:
        The fastest form of `memory` that fits, or None, and a sentence with the limit that the smallest form exceeds.
    """
    from pacorl.plan.plan import CUDA_BYTES, plan_generation

    spec = POLICIES.named(kind_of(model))
    for memory in MEMORY:
        plan = plan_generation(spec.options_for(model, dtype="bfloat16", memory=memory), judge=judge_of(model))
        # Without a card the models are in main memory.
        main = plan.memory.host if plan.device_bytes else plan.memory.host + plan.peak_bytes
        card = plan.peak_bytes + CUDA_BYTES
        shortage = ""
        for limit, needed, given in ((plan.device, card, plan.device_bytes), ("main memory", main, plan.main_bytes)):
            if given and needed > given:
                shortage = f"{needed / 2**30:.0f} GB of {limit}, and {given / 2**30:.0f} are here"
        if not shortage:
            return memory, f"fits this machine{f' with memory {memory}' * (memory != 'normal')}"
    # The last form is the smallest.
    return None, f"does not fit: with a judge it takes {shortage}"


def judge_of(model: str) -> str:
    """Return the judge that reads a model's pictures."""
    return TINY if model == TINY else JUDGE


def shown_name(model: str, kind: str = "model") -> str:
    """Name a model for a person."""
    if model == TINY:
        return f"the practice {kind}"
    if Path(model).is_absolute():
        return Path(model).name
    return model
