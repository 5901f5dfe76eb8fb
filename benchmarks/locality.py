"""Whether the panels of a set may have a credit of their own: does a panel's noise act on the other panels alone?

    python benchmarks/locality.py --groups 6

Samples are drawn as in training, by the recipe of the quickstart or `--config`. After the last SDE step the tokens of
one panel are replaced by a sibling's, which is another draw of that panel's noise, and both sets are finished and
judged. The change of the score has a part that contains the panel and a rest, which panel credit leaves out. `rest` is
its share of the mean square: near 0, panel credit is unbiased (docs/engine.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from pacorl.config import base as configs
from pacorl.config.recipes import recipe
from pacorl.core.panels import panel_of_token
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Trunk
from pacorl.grpo.rows import epoch_rows
from pacorl.grpo.scoring import Scorer
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=recipe())
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--set", nargs="+", default=[], help="settings, as KEY=VALUE of the config")
    options = parser.parse_args()
    quiet_loading()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        settings = ["sampling.tree={seeds: 1}", "advantages.credit=panel", "trackers=[]", *options.set]
        config = configs.load(PolicyConfig, options.config, [*settings, f"out={folder}/run"])
        trainer = PolicyTrainer(config)
        print(json.dumps(measured(trainer, options.groups), indent=2))
        trainer.close()


@torch.no_grad()
def measured(trainer: PolicyTrainer, groups: int) -> dict[str, float]:
    """Root mean square changes of both parts of the weighted score, and the share of the rest."""
    config = trainer.config
    count = config.group_size
    rows = epoch_rows(trainer.train_prompts, epoch=0, count=groups, group_size=count, seed=config.seed)
    own, rest = [], []
    for first in range(0, len(rows), count):
        group = rows[first : first + count]
        trunk = Trunk(trainer.draw(trainer.sampler), group)
        x_BNC = torch.stack(list(trunk.grow()[1].values()))
        before = scores(trainer, trunk, x_BNC)
        grid = group[0].prompt.grid
        panel_N = panel_of_token(grid, trunk.size, trainer.policy.token_grid(trunk.size)).to(x_BNC.device)
        for panel in range(grid.count):
            redrawn = torch.where((panel_N == panel)[:, None], x_BNC.roll(1, 0), x_BNC)
            change_B1P = scores(trainer, trunk, redrawn) - before
            own += change_B1P[:, 1 + panel].tolist()
            rest += (change_B1P[:, 0] - change_B1P[:, 1 + panel]).tolist()
    own_square, rest_square = fmean(change**2 for change in own), fmean(change**2 for change in rest)
    return {"own": own_square**0.5, "rest": rest_square**0.5, "share": rest_square / (own_square + rest_square)}


def scores(trainer: PolicyTrainer, trunk: Trunk, x_BNC: Tensor) -> Tensor:
    """(B, 1 + P): the weighted score of each set, and its part of each panel; NaN if one is missing."""
    with Scorer(trainer.rewards, overlap=False, by_panel=True) as scorer:
        scorer.submit(trunk.finish(trunk.rows, x_BNC))
        found = scorer.results()
        table = []
        for row in trunk.rows:
            total = torch.zeros(1 + row.prompt.grid.count, dtype=torch.float64)
            for reward, score in zip(trainer.config.rewards, found[row.number], strict=True):
                whole = float("nan") if score is None else score
                part_P = scorer.parts[row.number].get(reward.key, [whole] * row.prompt.grid.count)
                total += reward.weight * torch.tensor([whole, *part_P], dtype=torch.float64)
            table.append(total)
    return torch.stack(table)


if __name__ == "__main__":
    main()
