"""What log-taming does to the advantages of a run's epochs, beside a fixed weight in its place.

    python -m research.log_taming quickstart

The run has the paper's rewards of sets, 0.2 consistency and 0.8 match of the panels, and trains by their plain sum.
From each epoch's scores the advantages are computed again: log-tamed, by the plain sum, and by the plain sum with
*matched* weights, in which a tamed reward has its weight times 1/(1 + mean). Then again with the scores of either
reward times ten, an imbalance such as rewards on a scale of 0 to 10 bring. Columns with r are correlations.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from torch import Tensor

from pacorl.config.base import load
from pacorl.core.advantages import THRESHOLD, AdvantageOptions, advantages, coefficient_of_variation, is_tamed
from pacorl.grpo import epoch
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading
from pacorl.types import RewardTable

WEIGHTS = (0.2, 0.8)
REWARDS = [
    {"name": "consistency", "args": {"ask": "criteria"}, "weight": WEIGHTS[0]},
    {"name": "panel_match", "args": {"temperature": 4}, "weight": WEIGHTS[1]},
]
SCALES = {(1.0, 1.0): "As they are", (10.0, 1.0): "Consistency times ten", (1.0, 10.0): "Match times ten"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    quiet_loading()

    with TemporaryDirectory() as folder:
        settings = [f"out={folder}/run", f"epochs={options.epochs}", "trackers=[]", f"rewards={json.dumps(REWARDS)}"]
        settings += ["advantages.aggregate=weighted_sum", "advantages.credit=set", *options.overrides]
        config = load(PolicyConfig, options.config, settings)
        tables = tables_of(config)
    for scale, what in SCALES.items():
        print(f"\n{what}\n")
        print_rows(tables, scale)


def print_rows(tables: list[RewardTable], scale: tuple[float, float]) -> None:
    print("| epoch | h | tamed | r: plain, consistency | r: tamed, consistency | r: tamed, plain | r: tamed, matched |")
    print("|---|---|---|---|---|---|---|")
    for number, table in enumerate(tables, 1):
        scaled = replace(table, score_RB=table.score_RB * torch.tensor(scale)[:, None])
        print(row_of(number, scaled, list(WEIGHTS)))


def tables_of(config: PolicyConfig) -> list[RewardTable]:
    """Train, and return the scores of each epoch."""
    tables: list[RewardTable] = []
    real = epoch.advantages

    def kept(table: RewardTable, *args: object, **options: object) -> object:
        tables.append(table)
        return real(table, *args, **options)

    trainer = PolicyTrainer(config)
    try:
        with mock.patch.object(epoch, "advantages", kept):
            for _ in range(config.epochs):
                epoch.run_epoch(trainer)
    finally:
        trainer.close()
    return tables


def row_of(number: int, table: RewardTable, weights: list[float]) -> str:
    """Compare the three advantages of one epoch."""
    score_RB = table.score_RB.double()
    tamed_R = is_tamed(score_RB, THRESHOLD)
    matched = torch.tensor(weights).double() * torch.where(tamed_R, 1 / (1 + score_RB.mean(1).abs()), 1.0)

    plain = advantages(table, AdvantageOptions(aggregate="weighted_sum"), weights=weights).value_B
    tamed = advantages(table, AdvantageOptions(), weights=weights).value_B
    by_weight = advantages(table, AdvantageOptions(aggregate="weighted_sum"), weights=matched.tolist()).value_B
    first = advantages(table, AdvantageOptions(aggregate="weighted_sum"), weights=[1.0, 0.0]).value_B

    spreads = ", ".join(f"{spread:.2f}" for spread in coefficient_of_variation(score_RB).tolist())
    names = ", ".join(name for name, is_one in zip(table.names, tamed_R.tolist(), strict=True) if is_one) or "none"
    numbers = (
        correlation(plain, first),
        correlation(tamed, first),
        correlation(tamed, plain),
        correlation(tamed, by_weight),
    )
    return f"| {number} | {spreads} | {names} | " + " | ".join(f"{value:.3f}" for value in numbers) + " |"


def correlation(one_B: Tensor, other_B: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one_B, other_B]))[0, 1])


if __name__ == "__main__":
    main()
