"""Does log-taming keep two rewards in balance? With and without it on the tiny world, three seeds, with a plot.

    python benchmarks/log_tame.py                           # 20 epochs each, plot in log_tame.png
    python benchmarks/log_tame.py --epochs 2 --seeds 1 --json

Consistency and prompt match are rewarded by the paper's weights (0.2 and 0.8) on the same prompts and seeds, aggregated
by `log_tamed`, with the fixed threshold and with the rewards' mean spread as threshold, and by `weighted_sum`. The
measure is the paper's, mean of the first reward over mean of the second per epoch; as each epoch has prompts of its
own, the first and the last five epochs are averaged, and what is reported is by how much the ratio moved from the one
to the other. Runs that are finished in `--out` are kept.

The paper reports that consistency by CLIP-T stays below 1.8 with log-taming and exceeds 2.5 without, on FLUX.1-dev
after 50 epochs; its ratio is absolute and of another second reward, so that only the direction can be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import train_policy
from pacorl.io.quiet import quiet_loading
from pacorl.runtime.cores import use_cores

WAYS = {
    "log-tamed above 0.2": ("advantages.aggregate=log_tamed", "advantages.threshold=0.2"),
    "log-tamed above mean": ("advantages.aggregate=log_tamed", "advantages.threshold=mean"),
    "weighted sum": ("advantages.aggregate=weighted_sum",),
}
COLOURS = ("tab:blue", "tab:green", "tab:orange")
WINDOW = 5
"""Epochs that are averaged: each has prompts of its own."""
REWARDS = (
    "rewards=[{name: consistency, weight: 0.2, args: {temperature: 4}}, "
    "{name: panel_match, weight: 0.8, args: {temperature: 4}}]"
)


def main() -> int:
    options = arguments()
    quiet_loading()
    use_cores()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(options.out or folder)
        ratios = {
            way: [
                run(root / f"{way}-{seed}".replace(" ", "-"), settings, seed, options) for seed in range(options.seeds)
            ]
            for way, settings in WAYS.items()
        }
    result = summary(ratios)
    plot(ratios, Path(options.plot))
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", default="log_tame.png")
    parser.add_argument("--out", help="keep the runs here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="section.key=value of configs/tiny.yaml")
    return parser.parse_args()


def run(out: Path, way: Sequence[str], seed: int, options: argparse.Namespace) -> list[float]:
    """The ratio of the two rewards' means in each epoch."""
    settings = [
        f"out={out}",
        f"seed={seed}",
        f"epochs={options.epochs}",
        *way,
        REWARDS,
        "prompts.evaluation=tiny:dev:1",  # the epochs' own rewards are what is looked at
        "evaluation.every=0",
        "evaluation.compare_sizes=false",
        "trackers=[]",
        *options.overrides,
    ]
    train_policy(configs.load(PolicyConfig, recipe(), settings), resume="auto")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["reward/ratio"] for line in lines if line["kind"] == "epoch"]


def summary(ratios: dict[str, list[list[float]]]) -> dict[str, Any]:
    """The ratio at each run's beginning and end, and how far it moved."""
    found = {}
    for way, runs in ratios.items():
        first, last = ([statistics.fmean(part) for part in parts] for parts in zip(*map(ends, runs), strict=True))
        moved = [after / before for before, after in zip(first, last, strict=True)]
        found[way] = {
            "first": [round(ratio, 3) for ratio in first],
            "last": [round(ratio, 3) for ratio in last],
            "moved": [round(ratio, 3) for ratio in moved],
            "mean moved": round(statistics.fmean(moved), 3),
        }
    return found


def ends(ratios: list[float]) -> tuple[list[float], list[float]]:
    """The first and the last epochs of a run."""
    count = min(WINDOW, max(1, len(ratios) // 2))
    return ratios[:count], ratios[-count:]


def plot(ratios: dict[str, list[list[float]]], path: Path) -> None:
    """Each run's ratio by that of its first epochs, averaged over a few."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for way, colour in zip(WAYS, COLOURS, strict=True):
        for number, several in enumerate(ratios[way]):
            count = len(ends(several)[0])
            averaged = [statistics.fmean(several[at : at + count]) for at in range(len(several) - count + 1)]
            epochs = [at + (count + 1) / 2 for at in range(len(averaged))]
            label = "" if number else way
            axes.plot(epochs, [one / averaged[0] for one in averaged], color=colour, label=label)
    axes.axhline(1.0, color="grey", linewidth=0.5)
    axes.set(xlabel="epoch", ylabel=f"consistency : prompt match, by the first {count} epochs")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(result: dict[str, Any]) -> str:
    return "\n".join(
        f"{way:21s} ratio {found['first']} → {found['last']}, moved ×{found['mean moved']} on average"
        for way, found in result.items()
    )


if __name__ == "__main__":
    sys.exit(main())
