"""The tiny recipe's runs, as many tests start and read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig

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


def tiny_run(overrides: Sequence[str]) -> PolicyConfig:
    """configs/tiny.yaml with some settings changed, and two updates of all steps, so that two groups are enough."""
    return configs.load(PolicyConfig, recipe(), ["optimizer.updates_per_epoch=2", "sampling.suffix={}", *overrides])


def metrics(run: Path, kind: str = "", *, times: bool = False) -> list[dict[str, float]]:
    """A run's lines, by default of every kind and without what clocks say."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if times or not name.startswith("seconds")}
        for line in lines
        if kind in ("", line["kind"])
    ]
