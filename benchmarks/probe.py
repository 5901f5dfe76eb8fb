"""Whether `pacorl probe` foretells which settings learn faster, on the tiny world.

    python benchmarks/probe.py --out runs/probe                     # a probe, then eight settings of 12 epochs: hours
    python benchmarks/probe.py --out runs/probe --seeds 0 --epochs 4 --json

One probe of `configs/tiny.yaml` predicts the gain of an epoch under each setting: another SDE step, another noise
level, other starts per group, another temperature of the rewards. Each setting is then trained for so many epochs, and
the oracle grades the averaged adapter's development images before and after (`learning.py` runs and resumes it; a
finished run is not run again, and each leaves a JSON in --out, as the probe does). Reported is Spearman's rank
correlation of prediction and rise per epoch, the mean over seeds, with a bootstrap interval over settings.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from learning import learn
from scipy.stats import rankdata

from pacorl.config import base as configs
from pacorl.config.policy_run import PolicyConfig, recipe
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.io.quiet import quiet_loading
from pacorl.probe.design import ProbeOptions
from pacorl.probe.run import probe
from pacorl.probe.show import to_dict

SETTINGS: Mapping[str, Sequence[str]] = {
    "as_configured": (),
    "step_0": ("sampling.sde_steps=[0]",),
    "step_3": ("sampling.sde_steps=[3]",),
    "noise_0.35": ("sampling.noise_level=0.35",),
    "noise_1": ("sampling.noise_level=1.0",),
    "two_starts": ("sampling.tree={seeds: 2}",),
    "own_starts": ("sampling.tree={seeds: 12}",),
    "temperature_1": (
        "rewards=[{name: consistency, args: {temperature: 1}}, "
        "{name: panel_match, weight: 0.5, args: {temperature: 1}}]",
    ),
}
"""Setting → what it changes in the recipe."""
OPTIONS = ProbeOptions(steps=(0, 3), noise_levels=(0.35, 1.0), sizes=(), temperatures=(1.0,))


def main() -> None:
    options = arguments()
    quiet_loading()
    torch.set_num_threads(1)
    predicted = predictions(probed(options))
    for seed in options.seeds:
        for name, overrides in SETTINGS.items():
            learn(name, overrides, seed, options)
    summary = compared(predicted, rises(options))
    print(json.dumps(summary, indent=2) if options.json else table(summary))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=12, help="of each setting's run")
    parser.add_argument("--every", type=int, default=4, help="epochs between evaluations")
    parser.add_argument("--prompts", type=int, default=48, help="of the development split")
    parser.add_argument("--probe-epochs", type=float, default=4.0, help="the probe's budget")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.rise = math.inf  # no run ends early
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def probed(options: argparse.Namespace) -> dict[str, Any]:
    """The probe's document, or the one that was left behind."""
    file = options.out / "probe" / "probe.json"
    if not file.exists():
        config = configs.load(PolicyConfig, recipe(), [f"out={options.out / 'probe'}", "trackers=[]"])
        findings = probe(config, ProbeOptions(**vars(OPTIONS) | {"epochs": options.probe_epochs}))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(to_dict(findings), indent=1) + "\n")
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def predictions(document: Mapping[str, Any]) -> dict[str, float]:
    """Setting → the gain of one selection, in units of the recipe's reward."""
    gains = {entry["name"]: entry["signal"]["gain"]["value"] for entry in document["candidates"]}
    forms = {form["seeds"]: form["signal"]["gain"]["value"] for form in document["forms"]}
    own, other = document["temperatures"]
    return {
        "as_configured": gains["as configured"],
        "step_0": gains["step 0"],
        "step_3": gains["step 3"],
        "noise_0.35": gains["noise 0.35"],
        "noise_1": gains["noise 1"],
        "two_starts": forms[2],
        "own_starts": forms[12],
        # Another temperature is another unit: the accuracy of its advantages moves the recipe's own signal.
        "temperature_1": gains["as configured"] * teaching(other) / teaching(own),
    }


def teaching(entry: Mapping[str, Any]) -> float:
    """√(S/V) times the share of groups that are not alike."""
    return float(entry["signal"]["share"]["value"] ** 0.5 * (1 - entry["groups_alike"]))


def rises(options: argparse.Namespace) -> dict[str, list[float]]:
    """Setting → per seed the oracle's agreement at the end, less that at the start, by epochs."""
    risen: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for name in SETTINGS:
        for seed in options.seeds:
            run = json.loads((options.out / f"{name}-{seed}.json").read_text())
            risen[name].append((run["agreement"][-1] - run["agreement"][0]) / run["epochs"][-1])
    return risen


def compared(predicted: Mapping[str, float], risen: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The rank correlation over settings, and all that it is of."""
    names = list(SETTINGS)
    foretold, learned = (
        np.array(column) for column in ([predicted[n] for n in names], [fmean(risen[n]) for n in names])
    )

    def correlation(indices: Indices) -> Floats:
        ranks = rankdata(foretold[indices]), rankdata(learned[indices])
        return np.array([np.corrcoef(*ranks)[0, 1] if min(map(np.ptp, ranks)) > 0 else np.nan])

    (interval,) = bootstrap(names, correlation)
    settings = {
        name: {"predicted": predicted[name], "rise_per_epoch": fmean(risen[name]), "by_seed": list(risen[name])}
        for name in names
    }
    return {"rank_correlation": vars_of(interval), "settings": settings}


def vars_of(interval: Interval) -> dict[str, float | None]:
    return {"value": interval.mean, "low": interval.low, "high": interval.high}


def table(summary: Mapping[str, Any]) -> str:
    rows = ["| setting | predicted gain | rise per epoch | by seed |", "|---|---|---|---|"]
    for name, entry in summary["settings"].items():
        seeds = ", ".join(f"{rise:+.4f}" for rise in entry["by_seed"])
        rows.append(f"| {name} | {entry['predicted']:.3f} | {entry['rise_per_epoch']:+.4f} | {seeds} |")
    figure = summary["rank_correlation"]
    ends = "" if figure["low"] is None else f", 95 % interval {figure['low']:.2f} to {figure['high']:.2f}"
    return "\n".join([*rows, "", f"rank correlation {figure['value']:.2f}{ends}, over {len(SETTINGS)} settings"])


if __name__ == "__main__":
    main()
