"""What training at half of the evaluation's size saves, and what it costs, on the tiny world.

    python benchmarks/resolution.py                         # 20 epochs at 64 and at 128 px, evaluated at 128 px
    python benchmarks/resolution.py --epochs 2 --json

Two runs differ by the training size alone; they start from the same adapter, prompts and seeds and are evaluated at
full size before and after equal numbers of epochs. Reported are seconds per epoch (the median, and their parts), the
rewards at full size, and, from the two epochs' costs, the part that does not depend on the size: a half-size epoch
has a quarter of the pixels, so cost = fixed + pixels × rate has two unknowns and two equations. Exits with 1 where a
half-size epoch costs more than .35 of a full-size one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from pacorl import config as configs
from pacorl.app.quickstart import recipe
from pacorl.app.quiet import quiet_loading
from pacorl.app.threads import use_cores
from pacorl.config import PolicyRun
from pacorl.train.policy import train_policy

SIDES = {"half": 64, "full": 128}
LIMIT = 0.35


def main() -> int:
    options = arguments()
    quiet_loading()
    use_cores()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: run(Path(options.out or folder) / name, side, options) for name, side in SIDES.items()}
    result = compare(runs)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0 if result["half by full"] <= LIMIT else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", help="keep the runs here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="section.key=value of configs/tiny.yaml")
    return parser.parse_args()


def run(out: Path, side: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per epoch by part, and the rewards at full size before and after."""
    settings = [
        f"out={out}",
        f"epochs={options.epochs}",
        f"sampling.size=[{side},{side}]",
        "evaluation.size=[128,128]",
        "evaluation.every=0",
        "judge.overlap=false",  # so that the parts add up
        "trackers=[]",
        *options.overrides,
    ]
    train_policy(configs.load(PolicyRun, recipe(), settings))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    parts = {
        name.removeprefix("seconds/"): statistics.median(epoch[name] for epoch in epochs)
        for name in epochs[0]
        if name.startswith("seconds/") and name != "seconds/evaluation"
    }
    before, *_, after = (line for line in lines if line["kind"] == "evaluation")
    return {"parts": parts, "seconds": sum(parts.values()), "before": measures(before), "after": measures(after)}


def measures(line: dict[str, Any]) -> dict[str, float]:
    skipped = ("kind", "epoch", "step")
    return {name: value for name, value in line.items() if name not in skipped and "/" not in name}


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The costs' ratio and their fixed part."""
    half, full = runs["half"]["seconds"], runs["full"]["seconds"]
    pixels = (SIDES["half"] / SIDES["full"]) ** 2
    fixed = (half - pixels * full) / (1 - pixels)
    return {
        "half by full": half / full,
        "fixed seconds": fixed,
        "fixed share of a half-size epoch": fixed / half,
        "by part": {name: spent / runs["full"]["parts"][name] for name, spent in runs["half"]["parts"].items()},
        "runs": runs,
    }


def table(result: dict[str, Any]) -> str:
    lines = []
    for name, found in result["runs"].items():
        parts = ", ".join(f"{part} {spent:.2f}" for part, spent in found["parts"].items())
        lines.append(f"{name}: {found['seconds']:.2f} s an epoch ({parts})")
        for measure, before in found["before"].items():
            lines.append(f"    {measure} at full size: {before:.3f} → {found['after'].get(measure, float('nan')):.3f}")
    shares = ", ".join(f"{part} {share:.2f}" for part, share in result["by part"].items())
    lines.append(f"half by full: {result['half by full']:.3f} (limit {LIMIT}; {shares})")
    lines.append(
        f"of a half-size epoch {result['fixed share of a half-size epoch']:.0%} does not depend on the size: "
        f"{result['fixed seconds']:.2f} s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
