"""Reinforcement learning in the tiny world, by criteria and with contrast, graded by the oracle.

python -m research.world.rl OUT GENERATOR JUDGE [KEY=VALUE …]
python -m research.world.rl grade OUT
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.core.contrast import kappa
from pacorl.core.grid import split
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import read_jsonl
from pacorl.io.images import open_image
from pacorl.io.quiet import quiet_loading
from pacorl.records.prompts import save_prompts
from pacorl.types import Grid
from research.world.oracle import Oracle, agreement
from research.world.world import LOOKS, PLACE_WORDS, set_prompts

GRID = Grid(2, 2)


def grade(out: Path) -> None:
    """Print the oracle's measures of each evaluation: κ per look over sets whose theme names no look."""
    oracle = Oracle()
    for file in sorted((out / "samples").glob("evaluation-*.jsonl")):
        sets, matches, free = [], [], []
        for line in read_jsonl(file):
            panels = oracle.read(split(open_image(file.parent / line["image"]), GRID))
            sets.append(panels)
            for text, panel in zip(line["panels"], panels, strict=True):
                pose, prop = text.split(", ")
                matches.append((panel is not None and panel.pose == pose) + (panel is not None and panel.prop == prop))
            theme = line["prompt"].split(". ")[0]
            if " of a hero " in theme and theme.endswith(tuple(PLACE_WORDS.values())):
                free.append(panels)
        measured = agreement(free)
        valid = np.mean([panel is not None for panels in sets for panel in panels])
        print(
            f"{file.stem}: valid {valid:.3f} match {np.mean(matches) / 2:.3f} | {len(free)} free sets: within",
            f"{np.mean([within for within, _ in measured.values()]):.3f} across",
            f"{np.mean([across for _, across in measured.values()]):.3f} κ",
            f"{np.mean([kappa(*measured[name]) for name in LOOKS]):.3f}",
            " ".join(f"{name} {kappa(*measured[name]):.2f}" for name in LOOKS),
            flush=True,
        )
    seconds: dict[str, float] = {}
    for line in read_jsonl(out / "metrics.jsonl"):
        for key, value in line.items():
            if key.startswith("seconds/") and "hidden" not in key:
                seconds[key[8:]] = round(seconds.get(key[8:], 0) + value, 1)
    print("seconds", seconds)


def main(out: Path, generator: str, judge: str, *overrides: str) -> None:
    """Train by the quickstart's recipe with overrides, and grade."""
    quiet_loading()
    folder = out.parent / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    for split_name, count in (("train", 288), ("dev", 96)):
        if not (folder / f"{split_name}.jsonl").is_file():
            save_prompts(set_prompts(split_name, count, grid=GRID), folder / f"{split_name}.jsonl")  # type: ignore[arg-type]
    config = load(
        PolicyConfig,
        recipe("quickstart"),
        [
            f"out={out}", f"model.checkpoint={generator}", f"judge.checkpoint={judge}",
            f"prompts.train={folder}/train.jsonl", f"prompts.evaluation={folder}/dev.jsonl",
            "rewards=[{name: consistency, args: {ask: criteria, contrast: 1}}]",
            "prompts.evaluation_limit=96", "evaluation.size=[64,64]", "evaluation.steps=8", "evaluation.batch=24",
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
