"""What training at half of the evaluation's size saves, and what it costs, on the tiny world.

    python benchmarks/resolution.py                         # 10 epochs at 64 and at 128 px, evaluated at 128 px
    python benchmarks/resolution.py --epochs 2 --json

Two runs of the quickstart's recipe differ by the training size alone; they start from the same adapter, prompts and
seeds, their epochs take turns, so that a busy machine slows them alike, and both are evaluated at full size before and
after as many epochs, by the oracle too. Sampling takes the paper's 10 steps.

The judge scores after sampling here, in the one thread, so that an epoch's seconds can be told apart: the generator's
(rollout and update) and the judge's, which sees panels at one size: the fixed part. It takes no time where the judge
has a device of its own, as in the paper's runs. Exits with 1 where the generator's half-size epoch costs more than 0.35
of a full-size one; the judge and both together are printed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.core.grid import split
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import ExtraMetrics, PolicyTrainer
from pacorl.io.quiet import quiet_loading
from pacorl.tiny.characters import GRADES, Oracle
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
        runs = {
            name: prepared(Path(options.out or folder) / name, side, options, grade) for name, side in SIDES.items()
        }
        before = {name: measures(training.evaluate()) for name, training in runs.items()}
        seconds = timed_epochs(runs, options.epochs)
        after = {name: measures(training.evaluate()) for name, training in runs.items()}
        for training in runs.values():
            training.close()
    result = compare(seconds) | {"before": before, "after": after}
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0 if result["half by full"]["generator"] <= LIMIT else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", help="keep the runs here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="section.key=value of configs/tiny.yaml")
    return parser.parse_args()


def prepared(out: Path, side: int, options: argparse.Namespace, grade: ExtraMetrics) -> PolicyTrainer:
    settings = [
        f"out={out}",
        f"epochs={options.epochs}",
        f"sampling.size=[{side},{side}]",
        "sampling.steps=10",
        "sampling.suffix={}",
        "evaluation.size=[128,128]",
        "judge.overlap=false",
        "trackers=[]",
        *options.overrides,
    ]
    return PolicyTrainer(configs.load(PolicyConfig, recipe(), settings), extra_metrics=grade)


def timed_epochs(runs: dict[str, PolicyTrainer], epochs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of generator and judge in each epoch of each run."""
    spent: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in runs}
    for number in range(epochs):
        for name, training in runs.items():
            line = training.run_epoch()
            generator, judge = line["seconds/rollout"] + line["seconds/update"], line["seconds/reward"]
            for part, seconds in (("generator", generator), ("judge", judge), ("both", generator + judge)):
                spent[name][part].append(seconds)
        shown = ", ".join(f"{name} {parts['both'][-1]:.1f} s" for name, parts in spent.items())
        print(f"epoch {number + 1} of {epochs}: {shown}", file=sys.stderr, flush=True)
    return spent


def measures(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if "/" not in name}


def compare(seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The medians, and those of half-size by full-size, epoch by epoch."""
    ratios = {
        part: [a / b for a, b in zip(seconds["half"][part], seconds["full"][part], strict=True)]
        for part in seconds["half"]
    }
    return {"seconds": {name: medians(parts) for name, parts in seconds.items()}, "half by full": medians(ratios)}


def medians(parts: dict[str, list[float]]) -> dict[str, float]:
    return {part: statistics.median(several) for part, several in parts.items()}


def table(result: dict[str, Any]) -> str:
    lines = []
    for name, parts in result["seconds"].items():
        lines.append(f"{name}: " + ", ".join(f"{part} {spent:.2f} s" for part, spent in parts.items()) + " an epoch")
        for measure, before in result["before"][name].items():
            after = result["after"][name].get(measure, float("nan"))
            lines.append(f"    {measure} at full size: {before:.3f} → {after:.3f}")
    shares = ", ".join(f"{part} {share:.3f}" for part, share in result["half by full"].items())
    return "\n".join([*lines, f"half by full: {shares} (limit for the generator: {LIMIT})"])


if __name__ == "__main__":
    sys.exit(main())
