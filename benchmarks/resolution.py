"""What training at half of the evaluation's size saves, and what it costs, on the tiny world.

    python benchmarks/resolution.py                         # 20 epochs at 64 and at 128 px, evaluated at 128 px
    python benchmarks/resolution.py --epochs 2 --json

Two runs of the quickstart's recipe differ by the training size alone; they start from the same adapter, prompts and
seeds, their epochs take turns, so that a busy machine slows them alike, and both are evaluated at full size before and
after as many epochs. Sampling takes the paper's 10 steps, and the judge scores beside it, as it does by default; one
thread each. Reported are seconds per epoch (the median, and their parts), the scores at full size, by the oracle too,
and, from the two costs, the part that does not depend on the size: a half-size epoch has a quarter of the pixels, so
cost = fixed + pixels × rate has two unknowns and two equations. Fixed are the judge, who sees panels at one size, where
it is not hidden, and the prompt's 48 tokens, which stand beside 64 of the picture or 256. Exits with 1 where a
half-size epoch costs more than .35 of a full-size one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from pacorl import config as configs
from pacorl.app.quickstart import recipe
from pacorl.app.quiet import quiet_loading
from pacorl.config import PolicyRun
from pacorl.core.grid import split
from pacorl.data.characters import GRADES, Oracle
from pacorl.train.evaluate import evaluate
from pacorl.train.policy import prepare, run_epoch
from pacorl.train.training import Training
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

SIDES = {"half": 64, "full": 128}
LIMIT = 0.35


def main() -> int:
    options = arguments()
    quiet_loading()
    torch.set_num_threads(1)
    oracle = Oracle()

    def grade(prompts: Sequence[Prompt], images: Sequence[Image]) -> dict[str, float]:
        graded = [
            oracle.grade(prompt, split(image, prompt.grid)) for prompt, image in zip(prompts, images, strict=True)
        ]
        return {f"oracle's {name.replace('_', ' ')}": fmean(one[name] for one in graded) for name in GRADES}

    with tempfile.TemporaryDirectory() as folder:
        runs = {name: prepared(Path(options.out or folder) / name, side, options) for name, side in SIDES.items()}
        before = {name: measures(evaluate(training, grade)) for name, training in runs.items()}
        seconds = timed_epochs(runs, options.epochs)
        after = {name: measures(evaluate(training, grade)) for name, training in runs.items()}
        for training in runs.values():
            training.logbook.close()
    result = compare(seconds) | {"before": before, "after": after}
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0 if result["half by full"] <= LIMIT else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", help="keep the runs here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="section.key=value of configs/tiny.yaml")
    return parser.parse_args()


def prepared(out: Path, side: int, options: argparse.Namespace) -> Training:
    settings = [
        f"out={out}",
        f"epochs={options.epochs}",
        f"sampling.size=[{side},{side}]",
        "sampling.steps=10",
        "evaluation.size=[128,128]",
        "trackers=[]",
        *options.overrides,
    ]
    return prepare(configs.load(PolicyRun, recipe(), settings))


def timed_epochs(runs: dict[str, Training], epochs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each epoch of each run, as a whole and by part."""
    spent: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in runs}
    for number in range(epochs):
        for name, training in runs.items():
            started = time.perf_counter()
            line = run_epoch(training)
            spent[name]["whole"].append(time.perf_counter() - started)
            for part in ("rollout", "reward", "update", "hidden_reward"):
                spent[name][part].append(line.get(f"seconds/{part}", 0.0))
        shown = ", ".join(f"{name} {parts['whole'][-1]:.1f} s" for name, parts in spent.items())
        print(f"epoch {number + 1} of {epochs}: {shown}", file=sys.stderr, flush=True)
    return spent


def measures(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if "/" not in name}


def compare(seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The costs' ratio, epoch by epoch, and their fixed part."""
    runs = {
        name: {part: statistics.median(several) for part, several in parts.items()} for name, parts in seconds.items()
    }
    half, full = (runs[name]["whole"] for name in SIDES)
    pixels = (SIDES["half"] / SIDES["full"]) ** 2
    fixed = (half - pixels * full) / (1 - pixels)
    ratios = [a / b for a, b in zip(seconds["half"]["whole"], seconds["full"]["whole"], strict=True)]
    return {
        "half by full": statistics.median(ratios),
        "fixed seconds": fixed,
        "fixed share of a half-size epoch": fixed / half,
        "by part": {part: runs["half"][part] / runs["full"][part] for part in ("rollout", "update", "hidden_reward")},
        "seconds": runs,
        "ratios": ratios,
    }


def table(result: dict[str, Any]) -> str:
    lines = []
    for name, parts in result["seconds"].items():
        shown = ", ".join(f"{part.replace('_', ' ')} {spent:.2f}" for part, spent in parts.items() if part != "whole")
        lines.append(f"{name}: {parts['whole']:.2f} s an epoch ({shown})")
        for measure, before in result["before"][name].items():
            after = result["after"][name].get(measure, float("nan"))
            lines.append(f"    {measure} at full size: {before:.3f} → {after:.3f}")
    shares = ", ".join(f"{part.replace('_', ' ')} {share:.2f}" for part, share in result["by part"].items())
    lines.append(f"half by full: {result['half by full']:.3f} (limit {LIMIT}; {shares})")
    lines.append(
        f"of a half-size epoch {result['fixed share of a half-size epoch']:.0%} does not depend on the size: "
        f"{result['fixed seconds']:.2f} s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
