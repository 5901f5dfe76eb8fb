"""A run of the project's own loop on the pretended card, with published widths: what each phase asks of it.

Checkpoints are folders with every file that is not a weight. Tokenizers are a twin's, trained on the run's own texts;
all sizes are the published ones but for the number of repeated blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from PIL import Image
from research import twin
from tests.fullsize.pretended import PretendedCard, mapped, pretended
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes

from pacorl.config.base import load
from pacorl.grpo import builders, checkpoint, epoch, evaluate, rollout
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import read_object, write_jsonl
from pacorl.judge.local import BASES
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import WITHOUT_WEIGHTS
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META
from pacorl.plan.peaks import with_units
from pacorl.plan.plan import Plan, plan_training
from pacorl.runtime.processes import Runtime
from pacorl.runtime.turns import Turns
from pacorl.runtime.workers import Workers
from pacorl.tiny.world import set_prompts

CONFIGS = Path(__file__).parents[2] / "configs"
SETS = set_prompts("train", 8)
INSTRUCTION = "Turn the sky to sunset."
TEXTS = [*(prompt.text for prompt in SETS), INSTRUCTION]


def write_judge(folder: Path, texts: Sequence[str]) -> Path:
    """The published 7B judge's folder with a quarter of its blocks, the last of the vision tower among them."""
    published = read_object(BASES["Qwen2.5-VL-7B"])
    text, vision = (dict(published["model"][name]) for name in ("text_config", "vision_config"))
    text["num_hidden_layers"] //= 4
    vision["depth"] //= 4
    vision["fullatt_block_indexes"] = vision["fullatt_block_indexes"][:1]
    model = {**published["model"], "text_config": text, "vision_config": vision}
    twin.write_judge(folder, {**published, "model": model}, texts=texts, weights=False)
    return folder


def load_model(source: str | Path, *, dtype: torch.dtype, **_: Any) -> Any:
    """A checkpoint's model as it would be loaded: of full size, and with nothing in memory."""
    with _disable_current_modes():  # building it is nothing that a card sees
        return mapped(model_on_meta(read_object(Path(source) / "config.json"), dtype=dtype))


def pipeline_loader(load_pipeline: Callable[..., Any]) -> Any:
    """`DiffusionPipeline.from_pretrained` with `load_model` for its parts."""

    def from_pretrained(cls: Any, source: str, *, dtype: torch.dtype, **components: Any) -> Any:
        for config in Path(source).glob("*/config.json"):
            if config.parent.name not in {*components, *WITHOUT_WEIGHTS}:
                components[config.parent.name] = load_model(config.parent, dtype=dtype)
        return load_pipeline(cls, source, dtype=dtype, **components)

    return classmethod(from_pretrained)


def write_prompts(folder: Path, *, edits: bool) -> Path:
    """Prompts of a run: sets of four panels, or edits of square sources."""
    records = [{"prompt": prompt.text} for prompt in SETS]
    if edits:
        records = [{"image": f"{number}.png", "instruction": INSTRUCTION} for number in range(len(SETS))]
        for number, record in enumerate(records):
            Image.new("RGB", (512, 512), (number, 0, 0)).save(folder / record["image"])
    write_jsonl(folder / "prompts.jsonl", records)
    return folder / "prompts.jsonl"


def run_of(recipe: str, folder: Path, *, units: int, overrides: Sequence[str]) -> PolicyConfig:
    """A recipe on checkpoints of this machine: its own settings but for prompts, steps, blocks and rewards of CLIP."""
    path = CONFIGS / f"{recipe}.yaml"
    config = load(PolicyConfig, path, overrides)
    (reward,) = [reward for reward in config.rewards if reward.name != "panel_clip_text"]
    prompts = write_prompts(folder, edits=reward.name == "edit_consistency")
    # All steps without noise cost the same, so that two are enough, or as many as the suffix has.
    steps = config.sampling.sde_steps[-1] + 1 + (config.sampling.suffix.steps or 2)
    parts = with_units(config.generator.parts, units)
    twin.write_generator(folder / "generator", config.generator, parts=parts, texts=TEXTS, weights=False)
    small = [
        f"model.checkpoint={folder / 'generator'}",
        f"prompts.train={prompts}",
        f"prompts.evaluation={prompts}",
        "prompts.evaluation_limit=4",  # of whose panels a judge takes as many questions at a time as of more
        f"out={folder / 'run'}",
        "processes=1",  # as the run has
        "epochs=1",
        f"prompts_per_epoch={config.optimizer.updates_per_epoch}",
        f"group_size={max(config.sampling.batch, 2 if config.sampling.tree.seeds is None else 4)}",
        f"sampling.steps={steps}",
        "evaluation.steps=2",
        "trackers=[]",
        "model.compile=none",
        f"rewards={json.dumps([reward.model_dump(mode='json')])}",
        f"judge.checkpoint={write_judge(folder / 'judge', TEXTS)}",
    ]
    return load(PolicyConfig, path, [*small, *overrides])


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move frozen weights: new ones, whose values nobody looks at; those of the host take no memory."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                part._parameters[name] = torch.nn.Parameter(empty.to(device), False)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)


@contextmanager
def lent_to(self: Turns, models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """`Turns.lent_to` in its own order."""
    if not self.enabled:
        yield
        return
    host = torch.device("cpu")
    move(self.generator, host)
    for model in models:
        move(model, self.device)
    yield
    for model in models:
        move(model, host)
    move(self.generator, self.device)


def submit(self: Workers, act: Callable[[], Any]) -> Future[Any]:
    """`Workers.submit`, at once: time limits cost no memory, and torch hands its modes to no thread."""
    done: Future[Any] = Future()
    with self.context():
        done.set_result(act())
    return done


class AtOnce(ThreadPoolExecutor):
    """Writes a checkpoint at once: torch hands its modes to no thread."""

    def submit(self, act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(act(*args, **kwargs))
        return done


PHASES: tuple[tuple[str, Any, str], ...] = (
    ("load", builders, "build_adapted_policy"),
    ("encode", ConditioningCache, "prepare"),
    ("place", builders, "place_transformer"),
    ("sample", rollout.Trunk, "grow"),
    ("sample", rollout.Trunk, "finish"),
    ("judge", Workers, "submit"),
    ("score", epoch, "collect_scores"),
    ("score", epoch, "measure_agreement"),
    ("train", epoch, "update_policy"),
    ("train", Runtime, "step"),
    ("evaluation/sample", evaluate, "sample_images"),
    ("score", evaluate, "score_images"),
    ("decode", PipelinePolicy, "launch_decode"),
    ("save", PolicyTrainer, "save"),
)
"""Phase → a function of the run whose bytes are counted to it; the inner of two has them."""


def counted(card: PretendedCard, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose bytes are counted to a phase."""

    @wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with card.during(phase):
            return function(*args, **kwargs)

    return within


@contextmanager
def pretended_run() -> Iterator[PretendedCard]:
    """Within the block a run is on the pretended card, which it tells its phases, with checkpoints without weights."""
    with pretended() as card, pytest.MonkeyPatch.context() as patch:
        # Accelerate gives every process the meta device, and torch treats it as the card that it is.
        for state in (PartialState, AcceleratorState, GradientState):
            patch.setattr(state, "_shared_state", {})
        PartialState(cpu=True)
        PartialState._shared_state["device"] = META
        kinds = _foreach_utils._get_foreach_kernels_supported_devices()
        for user in (_foreach_utils, import_module("torch.optim.optimizer")):
            patch.setattr(user, "_get_foreach_kernels_supported_devices", lambda: [*kinds, META.type])

        load_pipeline = diffusers.DiffusionPipeline.from_pretrained.__func__
        patch.setattr(diffusers.DiffusionPipeline, "from_pretrained", pipeline_loader(load_pipeline))
        patch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", load_model)

        patch.setattr(Workers, "submit", submit)
        patch.setattr(checkpoint, "ThreadPoolExecutor", AtOnce)
        patch.setattr(Turns, "lent_to", lent_to)
        for phase, owner, name in PHASES:
            patch.setattr(owner, name, counted(card, phase, getattr(owner, name)))
        yield card


def trace(recipe: str, folder: Path, *, units: int, overrides: Sequence[str] = ()) -> tuple[dict[str, int], int, Plan]:
    """Run a recipe's loop with so many units of blocks: loading, an epoch, an evaluation and a checkpoint.

    Returns:
        Bytes on the device by the plan's phases, the most of all, and the plan of the same run.
    """
    config = run_of(recipe, folder, units=units, overrides=overrides)
    plan = plan_training(config)
    with pretended_run() as card:
        run = PolicyTrainer(config)
        run.run_epoch()
        decoding = card.peaks["decode"]
        run.evaluate()  # with AdamW's moments beside it, as all but the first
        run.save()
        run.close()

    peaks = card.peaks
    # A judge adds its own beside an epoch's sampling; an evaluation is judged when all of it is sampled.
    beside = card.rises["judge"] if config.memory == "normal" else 0
    found = {
        "encode": max(peaks["load"], peaks["encode"]),
        "sample": max(peaks["sample"] + beside, peaks["evaluation/sample"]),
        "decode": max(decoding + beside, peaks["decode"]),
        "score": max(peaks["score"], peaks["judge"]),
        "train": peaks["train"],
    }
    return {phase: found[phase] for phase in plan.memory.phases}, max(peaks.values()), plan
