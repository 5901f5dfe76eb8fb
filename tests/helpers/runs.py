"""What the processes of a world do: runs of the tiny recipe and of tiny edit models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pacorl.grpo.policy_config import PolicyConfig


def train(overrides: Sequence[str], resume: bool = False) -> None:
    """The run, and nothing else."""
    from tiny_runs import train_policy

    from pacorl.config import base as configs
    from pacorl.config.recipes import recipe

    train_policy(configs.load(PolicyConfig, recipe(), list(overrides)), resume=resume)


def train_judge(overrides: Sequence[str], resume: bool = False) -> None:
    """A judge's run."""
    from pacorl.config import base as configs
    from pacorl.judge_training.judge_config import JudgeConfig
    from pacorl.judge_training.judge_trainer import JudgeTrainer

    recipe = Path(__file__).parents[2] / "configs" / "reward" / "tiny.yaml"
    JudgeTrainer(configs.load(JudgeConfig, recipe, list(overrides)), resume=resume).train()


def train_each(runs: Sequence[tuple[Path | None, Sequence[str]]]) -> None:
    """Several runs, each by a config file (or none) and overrides, in the same processes: to start those costs most."""
    from accelerate.state import AcceleratorState
    from tiny_runs import train_policy

    from pacorl.config import base as configs

    for path, overrides in runs:
        AcceleratorState._reset_state()  # FSDP2's plugin keeps the block classes of the first model
        train_policy(configs.load(PolicyConfig, path, list(overrides)))


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
