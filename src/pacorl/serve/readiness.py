"""Probe of a judge: two questions with plain answers, its models, token ids, versions and memory."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from pacorl.core.questions import same_theme
from pacorl.io.versions import versions
from pacorl.judge.judge import Inspectable, Judge, JudgeFacts
from pacorl.tiny.characters import Panel, draw
from pacorl.types import Question

PROBE_SIZE = 224  # pixels; a multiple of 28, so that every image processor takes the image as it is
RED_HERO = Panel(colour="red", shape="round", hat="crown", palette="sunset", pose="standing", prop="boat")
BLUE_HERO = Panel(colour="blue", shape="tall", hat="top-hat", palette="night", pose="standing", prop="boat")
LIBRARIES = ("pacorl", "torch", "transformers", "vllm")


@dataclass(frozen=True, slots=True)
class JudgeProbe:
    """Result of a probe."""

    judge: str
    served: dict[str, tuple[str, ...]]
    """Endpoint → model names; empty for a judge in this process."""
    token_ids: dict[str, tuple[int, ...]]
    """Ids of Yes and of No; empty if a server does not list them, and its answers are read as text."""
    p_yes_same: float | None
    """P(Yes) of two images of one drawn hero."""
    p_yes_different: float | None
    """P(Yes) of two heroes that share no trait."""
    seconds: float
    """Duration of both questions. They are the judge's first, and a server may still warm up."""
    errors: tuple[str, ...]
    versions: dict[str, str]
    memory_gib: dict[str, float]

    @property
    def problems(self) -> tuple[str, ...]:
        """Faults of the judge; empty for a good one."""
        if self.errors:
            return self.errors
        if self.p_yes_same is not None and self.p_yes_different is not None and self.p_yes_same > self.p_yes_different:
            return ()
        return ("two images of one hero are no more consistent to it than images of two; is it trained as a judge?",)

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        return asdict(self) | {"problems": list(self.problems)}


def probe(judge: Judge, *, name: str) -> JudgeProbe:
    """Ask a judge two questions with plain answers.

    Raises:
        Exception: the judge's, if it cannot be asked.
    """
    facts = judge.facts() if isinstance(judge, Inspectable) else JudgeFacts()
    # A pose is no trait: the first pair is one hero, the second shares its pose and prop alone.
    waving = Panel.parse(RED_HERO.text.replace("standing", "waving"))
    red, red_waving, blue = (draw(panel, PROBE_SIZE) for panel in (RED_HERO, waving, BLUE_HERO))
    text = same_theme(RED_HERO.subject)

    # An installation may lack some libraries.
    installed = {name: number for name, number in versions(LIBRARIES).items() if number != "not installed"}

    start = time.perf_counter()
    same, different = judge.verdicts([Question((red, red_waving), text), Question((red, blue), text)])
    return JudgeProbe(
        judge=name,
        served=dict(facts.served),
        token_ids={"Yes": facts.yes_ids, "No": facts.no_ids} if facts.yes_ids else {},
        p_yes_same=same.p_yes,
        p_yes_different=different.p_yes,
        seconds=time.perf_counter() - start,
        errors=tuple(dict.fromkeys(verdict.error for verdict in (same, different) if not verdict.valid)),
        versions=installed | dict(facts.versions),
        memory_gib=_memory(facts.weight_bytes),
    )


def _memory(weight_bytes: int) -> dict[str, float]:
    """Measure the GiB of a judge in this process; empty for a judge behind a server."""
    if not weight_bytes:
        return {}
    import torch

    memory = {"weights": weight_bytes / 2**30}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory |= {"GPU, most used": torch.cuda.max_memory_allocated() / 2**30, "GPU, free": free / 2**30}
        memory["GPU, all"] = total / 2**30
    return memory
