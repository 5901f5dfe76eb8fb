"""What the processes of a world do: a run of the tiny recipe that keeps what the tests compare."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from pacorl.grpo.policy_config import PolicyConfig

KEPT = "kept"
"""The folder in a run's that holds what is kept of it."""


def train(overrides: Sequence[str], resume: str = "") -> None:
    """The run, and nothing else."""
    from tiny_runs import train_policy

    from pacorl.config import base as configs
    from pacorl.config.recipes import recipe

    train_policy(configs.load(PolicyConfig, recipe(), list(overrides)), resume=resume)


def train_judge(overrides: Sequence[str], resume: str = "") -> None:
    """A judge's run."""
    from pacorl.config import base as configs
    from pacorl.judge_training.judge_config import JudgeConfig
    from pacorl.judge_training.judge_trainer import JudgeTrainer

    recipe = Path(__file__).parents[2] / "configs" / "reward" / "tiny.yaml"
    JudgeTrainer(configs.load(JudgeConfig, recipe, list(overrides)), resume=bool(resume)).train()


def train_and_keep_each(runs: Sequence[tuple[Path | None, Sequence[str]]]) -> None:
    """Several runs, each by a config file (or none) and overrides, in the same processes: to start those costs most."""
    from accelerate.state import AcceleratorState

    from pacorl.config import base as configs

    for path, overrides in runs:
        AcceleratorState._reset_state()  # FSDP2's plugin keeps the block classes of the first model
        train_and_keep(configs.load(PolicyConfig, path, list(overrides)))


def train_and_keep(config: PolicyConfig) -> None:
    """The run; every rank keeps its samples, the main process the advantages and each update's gradients."""
    from tiny_runs import train_policy

    from pacorl.grpo import epoch
    from pacorl.models.adapters import full_state
    from pacorl.runtime.processes import Runtime
    from pacorl.types import Samples

    kept = config.out / KEPT
    kept.mkdir(parents=True, exist_ok=True)
    draw_samples, advantages, step = epoch.draw_samples, epoch.advantages, Runtime.step

    def keep_samples(draw, units, into):  # type: ignore[no-untyped-def]
        samples = Samples()
        yield from draw_samples(draw, units, samples)
        into.nodes += samples.nodes
        into.rollouts += samples.rollouts
        log_probs = defaultdict(list)
        for nodes in samples.nodes:
            for row, log_prob in zip(nodes.row_B, nodes.log_prob_B, strict=True):
                log_probs[row].append(log_prob)
        for rollout in samples.rollouts:
            for row, final in zip(rollout.row_B, rollout.final_BNC, strict=True):
                torch.save((final, torch.tensor(log_probs[row])), kept / f"sample-{draw.epoch}-{row}.pt")

    def keep_advantages(*args, **rest):  # type: ignore[no-untyped-def]
        found = advantages(*args, **rest)
        if os.environ.get("RANK", "0") == "0":  # every rank computes the same
            torch.save(found.value_B, kept / f"advantages-{len(list(kept.glob('advantages-*')))}.pt")
        return found

    def keep_gradients(runtime, optimizer, parameters, *, max_norm):  # type: ignore[no-untyped-def]
        gradients = full_state({str(n): p.grad for n, p in enumerate(parameters) if p.grad is not None})
        if runtime.is_main:
            torch.save(gradients, kept / f"gradients-{len(list(kept.glob('gradients-*')))}.pt")
        return step(runtime, optimizer, parameters, max_norm=max_norm)

    epoch.draw_samples, epoch.advantages, Runtime.step = keep_samples, keep_advantages, keep_gradients  # type: ignore[assignment,method-assign]
    try:
        train_policy(config)
    finally:
        epoch.draw_samples, epoch.advantages, Runtime.step = draw_samples, advantages, step  # type: ignore[method-assign]


def write_edit_twins(folder: Path) -> None:
    """Checkpoints of the tiny edit models by kind, train.jsonl of a square and a wide source, dev.jsonl."""
    import json

    from edit_twins import klein_pipeline, kontext_pipeline, qwen_pipeline, source_image
    from research.tiny.edits import world_edits, write_edits

    kontext_pipeline().save_pretrained(folder / "kontext")
    qwen_pipeline().save_pretrained(folder / "qwen_edit")
    qwen_pipeline(plus=True).save_pretrained(folder / "qwen_edit_plus")
    klein_pipeline().save_pretrained(folder / "klein")
    write_edits(folder, world_edits("dev", 1), name="dev")
    train = write_edits(folder, world_edits("train", 1), name="train")
    source_image(folder / "wide.png", height=60, width=96)
    with train.open("a") as file:
        file.write(json.dumps({"image": "wide.png", "instruction": "Show the scene at night."}) + "\n")
