"""One run of the tiny generator as flat numbers, for `claims/*.yaml`: rise by epoch, CPU seconds, ratio of the rewards.

    python -m research.benchmarks.generator_atom --out runs/atom --seed 0 --set "sampling.size=[128, 128]"

The run is that of `learning.py` (configs/tiny.yaml on one thread, graded by the oracle at 128 px); `metrics.json` in
--out contains the numbers. CPU seconds exclude evaluations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

import torch
from research.benchmarks.learning import GRADES, Run, learn

from pacorl.io.quiet import quiet_loading

FORM = "atom"
WINDOW = 5
"""Epochs at either end over which the ratio of the rewards is averaged: each epoch has prompts of its own."""


def main() -> None:
    options = parsed(parser(__doc__))
    quiet_loading()
    torch.set_num_threads(1)
    learn(FORM, options.set, options.seed, options)
    run = json.loads((options.out / f"{FORM}-{options.seed}.json").read_text())
    log = options.out / f"{FORM}-{options.seed}" / "metrics.jsonl"
    (options.out / "metrics.json").write_text(json.dumps(flat(run) | ratio(log), indent=1) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """Describe the options of an atom."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--set", nargs="*", default=[], help="settings of configs/tiny.yaml, as KEY=VALUE")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--every", type=int, default=10, help="epochs between evaluations")
    parser.add_argument("--prompts", type=int, default=96, help="prompts of an evaluation")
    parser.add_argument("--split", choices=["dev", "test"], default="dev")
    parser.set_defaults(until=None)  # an option of learning.py: an atom spends its whole budget
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, and make the folder of the results."""
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def flat(run: Run) -> dict[str, float]:
    """Compute the CPU seconds, the rise of each grade at the end and `rise_N`, that of agreement at evaluation N."""
    numbers = {"cpu_seconds": run["cpu_seconds"][-1]}
    for name in GRADES:
        numbers[f"{name}_rise"] = run[name][-1] - run[name][0]
    for number, value in enumerate(run["attribute_agreement"][1:], 1):
        numbers[f"rise_{number}"] = value - run["attribute_agreement"][0]
    return numbers


def ratio(log: Path) -> dict[str, float]:
    """Read the ratio of the first reward to the second in the first and the last epochs."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ratios = [line["reward/ratio"] for line in lines if line["kind"] == "epoch"]
    return {"ratio_first": fmean(ratios[:WINDOW]), "ratio_last": fmean(ratios[-WINDOW:])}


if __name__ == "__main__":
    main()
