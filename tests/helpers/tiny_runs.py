"""The tiny recipe's runs, as many tests start and read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import checkpoints
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.plan.plan import Plan, plan_training
from pacorl.report.page import keep_page

JPEG_SIZE = f"{Path(__file__).parents[2]}/examples/jpeg_reward.py:jpeg_size"
"""A reward without a model."""

SMALL_QUICKSTART = [
    "epochs=1",
    "prompts_per_epoch=2",
    "group_size=4",
    "prompts.train=tiny:train:3",
    "prompts.evaluation=tiny:test:3",
    "sampling.steps=4",
    "sampling.batch=4",
    "evaluation.size=[64,64]",
    "evaluation.steps=2",
]
"""What makes a quickstart take seconds and leaves the rest of its recipe alone."""

SMALL = [
    *("epochs=1", "prompts_per_epoch=2", "group_size=4", "save_every=1", "trackers=[]", "prompts.train=tiny:train:3"),
    *("prompts.evaluation=tiny:dev:2", "sampling.steps=3", "sampling.batch=4", "evaluation.size=[64,64]"),
    "evaluation.steps=2",
]
"""The smallest run of the tiny recipe: one epoch, two prompts, four samples each."""

TINY_SETS = [
    "model={checkpoint: tiny, dtype: float32, max_sequence_length: 48}",
    "judge.checkpoint=tiny",
    "prompts={train: 'tiny:train:4', evaluation: 'tiny:dev:2'}",
    "sampling.size=[64,64]",
    "evaluation.size=[64,64]",
    "adapter={rank: 4, alpha: 8}",
    "rewards=[{name: consistency}]",
]
"""Settings of a run of the tiny models without a recipe."""


REWARDS = (
    "rewards=[{name: consistency, args: {temperature: 4}}, {name: panel_match, weight: 0.5, args: {temperature: 4}}]"
)


def tiny_run(overrides: Sequence[str]) -> PolicyConfig:
    """configs/tiny.yaml with the paper's rewards, credit and clip range, and two updates of all steps."""
    settings = ["optimizer.updates_per_epoch=2", "sampling.suffix={}", "advantages.credit=set", "objective={}", REWARDS]
    return configs.load(PolicyConfig, recipe(), [*settings, *overrides])


def train_policy(config: PolicyConfig, **options: Any) -> Path:
    """Run a config to its end as the command does; returns the run's folder."""
    return PolicyTrainer(config, listeners=[keep_page], **options).train().folder


def metrics(run: Path, kind: str = "", *, times: bool = False) -> list[dict[str, float]]:
    """A run's lines, by default of every kind and without what clocks say."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if times or not name.startswith("seconds")}
        for line in lines
        if kind in ("", line["kind"])
    ]


def weights(run: Path) -> dict[str, bytes]:
    """Every tensor of a run's newest checkpoint and of `adapter/`: trained, average, old and optimizer, by its bits."""
    newest = checkpoints(run / "checkpoints")[-1]
    parts = [path for folder in (newest, newest / "lora", run / "adapter") for path in folder.glob("*.safetensors")]
    return {
        f"{path.parent.name}/{path.name}/{name}": value.numpy().tobytes()
        for path in parts
        for name, value in load_file(path).items()
    }


@cache
def planned(*overrides: str) -> Plan:
    """The plan of a run of TINY_SETS."""
    return plan_training(configs.load(PolicyConfig, None, [*TINY_SETS, *overrides]))
