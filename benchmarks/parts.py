"""What each part of an epoch saves: the recipe `tiny`, and the same with one part taken back, in turns in one run.

    python benchmarks/parts.py
    python benchmarks/parts.py --set-judge ADAPTER --json > measured/parts.json

An epoch includes judge and updates, on one thread. Full size trains on grids of 128 px. Without nodes every sample has
an initial noise and all forwards of its own, without the suffix all steps are Euler's, and without prefixes the judge
reads two images for every question. CPU seconds are those of an epoch. They and the ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading

RECIPE = "the recipe `tiny`"
FULL_SIZE = "sampling.size=[128,128]"
OWN_NOISE = "sampling.tree={seeds: 12}"
EULER = "sampling.suffix={}"

FORMS: dict[str, list[str]] = {
    RECIPE: [],
    "at full size": [FULL_SIZE],
    "without nodes": [OWN_NOISE],
    "without the suffix": [EULER],
    "without the judge's prefixes": [],
    "without all of these": [FULL_SIZE, OWN_NOISE, EULER],
}
WITHOUT_PREFIXES = ("without the judge's prefixes", "without all of these")
"""No setting does this: the judge of a run shares prefixes wherever that gives equal numbers."""


def main() -> None:
    options = arguments()
    quiet_loading()
    torch.set_num_threads(1)
    forms = dict(FORMS)
    if options.set_judge:
        forms["with a set judge"] = [f"judge.set_judge={options.set_judge}", "judge.set_check_every=0"]

    with tempfile.TemporaryDirectory() as folder:
        trainers = {}
        for form, settings in forms.items():
            trainers[form] = trainer(Path(folder) / form, settings, plain_judge=form in WITHOUT_PREFIXES)
        seconds = interleaved(trainers, rounds=options.rounds)
        for each in trainers.values():
            each.close()
    command = f"python benchmarks/parts.py --rounds {options.rounds}" + " --set-judge ADAPTER" * bool(options.set_judge)
    result = record(seconds, command)
    print(json.dumps(result, indent=1) if options.json else table(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set-judge", help="adapter of a set judge, for one form more")
    parser.add_argument("--rounds", type=int, default=5, help="timed epochs of each form")
    parser.add_argument("--json", action="store_true", help="print a record for `tools/figures.py`")
    return parser.parse_args()


def trainer(out: Path, settings: list[str], *, plain_judge: bool) -> PolicyTrainer:
    """Start the recipe with the settings of a form."""
    always = [f"out={out}", "save_every=1000", "trackers=[]", "judge.overlap=false"]
    config = configs.load(PolicyConfig, recipe(), [*always, *settings])
    if not plain_judge:
        return PolicyTrainer(config)
    with patch("pacorl.judge.local.can_share", return_value=False):
        return PolicyTrainer(config)


def interleaved(trainers: dict[str, PolicyTrainer], *, rounds: int) -> dict[str, list[float]]:
    """Measure the CPU seconds of an epoch, by form and round; the first of each warms up."""
    seconds: dict[str, list[float]] = {form: [] for form in trainers}
    for number in range(rounds + 1):
        for form, each in trainers.items():
            started = time.process_time()
            each.run_epoch()
            if number:
                seconds[form].append(time.process_time() - started)
    return seconds


def record(seconds: dict[str, list[float]], command: str) -> dict[str, Any]:
    """Tabulate the seconds in the form of `tools/figures.py`."""
    rows = []
    for form, spent in seconds.items():
        ratios = [form_s / recipe_s for form_s, recipe_s in zip(spent, seconds[RECIPE], strict=True)]
        rows.append([form, median(spent), [median(ratios), min(ratios), max(ratios)]])
    return {
        "command": command,
        "machine": "one thread",
        "columns": [
            ["an epoch", "{}"],
            ["CPU s", "{:.2f}"],
            ["by the first row: median (range over rounds)", "{:.2f} ({:.2f} to {:.2f})"],
        ],
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    lines = []
    for form, spent, (middle, low, high) in result["rows"]:
        lines.append(f"{form:30} {spent:6.2f} CPU s   {middle:5.2f} ({low:.2f} to {high:.2f})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
