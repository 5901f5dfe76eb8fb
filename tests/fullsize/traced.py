"""A run of the project's own loop on the pretended card: what each of its phases asks of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, partialmethod, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from fake_server import FakeServer
from PIL import Image
from tests.fullsize.pretended import PretendedCard, pretended
from tests.fullsize.published import (
    weightless,
    write_clip,
    write_generator,
    write_judge,
)
from torch.utils import _foreach_utils

from pacorl.config.base import load
from pacorl.grpo import builders, epoch, evaluate, monitor, rollout, scoring, update
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.scoring import Batch, Scorer
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.plan.ledger import META
from pacorl.plan.memory import Phase
from pacorl.plan.passes import Depth
from pacorl.plan.plan import Plan, plan_policy
from pacorl.rewards import reward as reward_calls
from pacorl.runtime.processes import Runtime
from pacorl.runtime.turns import Turns
from pacorl.runtime.workers import Call, Workers
from pacorl.tiny.world import set_prompts

CONFIGS = Path(__file__).parents[2] / "configs"
SETS = set_prompts("train", 8)
INSTRUCTION = "Turn the sky to sunset."
TEXTS = [*(prompt.text for prompt in SETS), INSTRUCTION]


@contextmanager
def card_of_processes() -> Iterator[None]:
    """Within the block accelerate gives every process the meta device, and torch treats it as the card that it is."""
    with pytest.MonkeyPatch.context() as patch:
        for state in (PartialState, AcceleratorState, GradientState):
            patch.setattr(state, "_shared_state", {})
        PartialState(cpu=True)
        PartialState._shared_state["device"] = META
        kinds = _foreach_utils._get_foreach_kernels_supported_devices()
        for user in (_foreach_utils, import_module("torch.optim.optimizer")):
            patch.setattr(user, "_get_foreach_kernels_supported_devices", lambda: [*kinds, META.type])
        yield


@dataclass(frozen=True, slots=True)
class Watched:
    """Puts the run's own functions on the card's books."""

    card: PretendedCard
    patch: pytest.MonkeyPatch

    def as_phase(self, phase: str, owner: Any, name: str) -> None:
        """What a function asks of the card is a phase's."""
        self.around(owner, name, lambda: self.card.during(phase))

    def around(self, owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

        self.patch.setattr(owner, name, within)


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move frozen weights by new parameters: one of the meta device, unlike a card's, takes no data of the host's."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                part._parameters[name] = torch.nn.Parameter(parameter.data.to(device), False)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)


@contextmanager
def lent_to(self: Turns, models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """`Turns.lent_to` in its own order, without pinned memory: the pretended card has none."""
    host = torch.device("cpu")
    move(self.generator, host)
    for model in models:
        model.to(self.device)
    try:
        yield
    finally:
        for model in models:
            model.to(host)
        move(self.generator, self.device)


def handed_on(card: PretendedCard, plain: Callable[[], Callable[[], ExitStack]]) -> Callable[[], ExitStack]:
    """What a thread of the scorer enters, and the card's books: torch hands its modes to no thread."""
    enter = plain()

    def with_books() -> ExitStack:
        stack = enter()
        if card.lane != "main":
            stack.enter_context(card.attached())
        return stack

    return with_books


def at_once(self: Scorer, batch: Batch, plain: Callable[[Scorer, Batch], None]) -> None:
    """Calls that overlap with nothing are made here, where the card's books are."""
    if self.overlap:
        return plain(self, batch)
    with patched_submit():
        return plain(self, batch)


@contextmanager
def patched_submit() -> Iterator[None]:
    """Calls are made where they are submitted; their time limits cost no memory."""

    def submit(self: Workers, act: Callable[[], Any], what: str, *, seconds: float = 0.0) -> Call[Any]:
        call: Call[Any] = Call(act, what, seconds)
        with self.context():
            call.future.set_result(act())
        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "submit", submit)
        yield


def here(act: Callable[[], Any], what: str, **rest: Any) -> Any:
    """A scorer's call, made here."""
    with scoring.torch_context()():
        return act()


@contextmanager
def phases(card: PretendedCard) -> Iterator[None]:
    """Within the block the run's own functions tell the card which phase they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "torch_context", partial(handed_on, card, scoring.torch_context))
        patch.setattr(Scorer, "_start", partialmethod(at_once, plain=Scorer._start))
        for module in (evaluate, monitor, reward_calls):
            patch.setattr(module, "call_in_time", here)
        patch.setattr(Turns, "lent_to", lent_to)
        watched = Watched(card, patch)
        for phase, owner, name in (
            ("load", builders, "build_adapted_policy"),
            ("encode", ConditioningCache, "prepare"),
            ("place", builders, "place_transformer"),
            ("sample", PolicyTrainer, "draw"),
            ("sample", rollout.Trunk, "grow"),
            ("sample", rollout.Trunk, "finish"),
            ("score", epoch, "collect_scores"),
            ("score", epoch, "measure_agreement"),
            ("train", update, "update_policy"),
            ("optimizer", Runtime, "step"),
            ("sample", evaluate, "sample_images"),
            ("score", evaluate, "score_images"),
            ("decode", PipelinePolicy, "decode"),
            ("save", PolicyTrainer, "save"),
        ):
            watched.as_phase(phase, owner, name)
        yield


def write_prompts(folder: Path, *, edits: bool) -> Path:
    """Prompts of a run: sets of four panels, or edits of square sources."""
    path = folder / "prompts.jsonl"
    if not edits:
        path.write_text("".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in SETS))
        return path
    records = []
    for number in range(8):
        Image.new("RGB", (512, 512), (number, 0, 0)).save(folder / f"{number}.png")
        records.append({"image": f"{number}.png", "instruction": INSTRUCTION})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run_of(
    recipe: str, folder: Path, *, depth: Depth, quarters: int, url: str, overrides: Sequence[str]
) -> PolicyConfig:
    """A recipe on checkpoints of this machine: its own settings but for the number of prompts, steps and blocks."""
    path = CONFIGS / f"{recipe}.yaml"
    config = load(PolicyConfig, path, overrides)
    edits = not config.generator.sets or any(reward.name == "edit_consistency" for reward in config.rewards)
    checkpoint = write_generator(folder / "generator", config.generator, TEXTS, depth=depth)
    prompts, clip = write_prompts(folder, edits=edits), write_clip(folder / "clip", TEXTS)
    judge = write_judge(folder / "judge", TEXTS, quarters=quarters)
    is_http = config.judge is not None and config.judge.remote
    rewards = [reward.model_dump(mode="json") for reward in config.rewards]
    for reward in rewards:
        if reward["name"] == "panel_clip_text":
            reward["args"]["checkpoint"] = str(clip)
    # All steps without noise cost the same, so that two are enough, or as many as the suffix has.
    steps = config.sampling.sde_steps[-1] + 1 + (config.sampling.suffix.steps or 2)
    small = [
        f"model.checkpoint={checkpoint}",
        f"prompts.train={prompts}",
        f"prompts.evaluation={prompts}",
        "prompts.evaluation_limit=4",  # of whose panels a judge takes as many questions at a time as of more
        f"out={folder / 'run'}",
        "epochs=1",
        f"prompts_per_epoch={config.optimizer.updates_per_epoch}",
        f"group_size={max(config.sampling.batch, 2 if config.sampling.tree.seeds is None else 4)}",
        f"sampling.steps={steps}",
        "evaluation.steps=2",
        "trackers=[]",
        f"rewards={json.dumps(rewards)}",
        f"judge.checkpoint={f'{url}#judge' if is_http else judge}",
    ]
    return load(PolicyConfig, path, [*small, *overrides])


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run asked of the card at some depth, and what its plan said before."""

    phases: dict[str, int]
    plan: Plan
    config: PolicyConfig

    @property
    def planned(self) -> Mapping[Phase, int]:
        """Bytes on the device by phase, as the plan has them."""
        return self.plan.memory.phases

    @property
    def peaks(self) -> dict[Phase, int]:
        """Bytes on the device by the plan's phases; a judge that works beside the sampling takes its own."""
        judge = self.phases.get("judge", 0)
        peaks = {}
        for phase, names in OF.items():
            if phase in self.planned:
                peak = max(self.phases[name] for name in names if name in self.phases)
                peaks[phase] = peak + judge * (phase in BESIDE)
        return peaks


OF: dict[Phase, tuple[str, ...]] = {
    "encode": ("load", "encode"),
    "sample": ("sample", "evaluation/sample"),
    "decode": ("decode", "evaluation/decode"),
    "score": ("score", "evaluation/score"),
    "train": ("train", "optimizer"),
}
"""A phase of the plan → those of a trace."""
BESIDE = ("sample", "decode", "score")


def trace(
    recipe: str,
    folder: Path,
    *,
    depth: Depth,
    quarters: int = 1,
    overrides: Sequence[str] = (),
) -> Trace:
    """A recipe's loop with so many blocks: loading, an epoch, an evaluation and a checkpoint.

    A judge of this process has so many `quarters` of its own.
    """
    with FakeServer().running() as server:
        config = run_of(recipe, folder, depth=depth, quarters=quarters, url=server.url, overrides=overrides)
        plan = plan_policy(config)
        with weightless(), card_of_processes(), pretended() as card, phases(card):
            run = PolicyTrainer(config)
            run.run_epoch()
            card.stage = "evaluation/"
            run.evaluate()  # with AdamW's moments beside it, as all but the first
            card.stage = ""
            run.save()
            run.close()
    return Trace(dict(card.peaks), plan, config)
