"""Reinforcement learning in the tiny world, by criteria and with contrast, graded by the oracle.

python -m research.tiny.rl OUT GENERATOR JUDGE [KEY=VALUE …]
python -m research.tiny.rl grade OUT
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.core.grid import split
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import read_jsonl
from pacorl.io.images import open_image
from pacorl.io.quiet import quiet_loading
from pacorl.tiny.oracle import Oracle
from pacorl.types import Grid, Prompt
from research.tiny.measure import measures

GRID = Grid(2, 2)


def grade(out: Path) -> None:
    """Print the oracle's measures of each evaluation."""
    oracle = Oracle()
    for file in sorted((out / "samples").glob("evaluation-*.jsonl")):
        prompts, sets = [], []
        for line in read_jsonl(file):
            prompts.append(Prompt(0, line["text"], grid=GRID, panels=tuple(line["panels"])))
            sets.append(oracle.read(split(open_image(file.parent / line["image"]), GRID)))
        print(f"{file.stem}: {measures(prompts, sets)}", flush=True)
    seconds: dict[str, float] = {}
    for line in read_jsonl(out / "metrics.jsonl"):
        for key, value in line.items():
            if key.startswith("seconds/"):
                seconds[key[8:]] = round(seconds.get(key[8:], 0) + value, 1)
    print("seconds", seconds)


def main(out: Path, generator: str, judge: str, *overrides: str) -> None:
    """Train by the quickstart's recipe with overrides, and grade."""
    quiet_loading()
    config = load(
        PolicyConfig,
        recipe("quickstart"),
        [
            f"out={out}", f"model.checkpoint={generator}", f"judge.checkpoint={judge}",
            "prompts.evaluation=tiny:dev:96", "prompts.evaluation_limit=96",
            "evaluation.size=[128,128]", "evaluation.steps=8", "evaluation.batch=24",
            *overrides,
        ],
    )  # fmt: skip
    began = time.process_time()
    PolicyTrainer(config).train()
    print("CPU s", round(time.process_time() - began, 1))
    grade(out)


if __name__ == "__main__":
    if sys.argv[1] == "grade":
        grade(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), *sys.argv[2:])
