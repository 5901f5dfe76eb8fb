"""How far a panel's noise acts on other panels of a set, by which panel credit is biased (docs/method.md).

    python -m research.locality tiny                          # a recipe or a config, and changes of it
    python -m research.locality runs/mine/config.yaml adapter.start=runs/mine/adapter --groups 6

The tokens of one panel are replaced, after the last SDE step, by those of another draw, and the set is finished and
judged again. For objectives of the endpoint whose samples do not share their initial noise, that is replaced. The
change of the set's score has a part that contains the panel, and a rest, which panel credit leaves out. Up to a tenth
of the squared change in the rest, panels may have a credit of their own (`advantages.credit: panel`); up to 0.3, half.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from pacorl.config.base import load
from pacorl.core.batches import in_batches
from pacorl.core.grid import panel_of_token
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Suffix, Tree
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, Trunk
from pacorl.grpo.rows import Row, epoch_rows
from pacorl.grpo.scoring import Scorer, reward_table
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.rewards.reward import Reward
from pacorl.types import Prompt

Change = tuple[float, float]
"""Of a score's part that contains the panel with new noise, and of its other parts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--groups", type=int, default=3, help="prompts")
    parser.add_argument("--children", type=int, default=4, help="sets of a prompt, each judged once more per panel")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        config = load(PolicyConfig, options.config, [*options.overrides, "trackers=[]", f"out={folder}/run"])
        changes = changes_of(config, groups=options.groups, children=options.children)
    own, rest = (math.sqrt(fmean(change**2 for change in part)) for part in zip(*changes, strict=True))
    print(f"{len(changes)} panels with new noise: their own part changes by {own:.4f}, the rest by {rest:.4f}")
    if own or rest:
        print(f"share of the rest in the squared change: {rest**2 / (own**2 + rest**2):.3f}")


def changes_of(config: PolicyConfig, *, groups: int, children: int) -> list[Change]:
    """Measure the changes of a config's first policy over some prompts."""
    trainer = PolicyTrainer(config)
    rows = epoch_rows(trainer.train_prompts, epoch=0, count=groups, group_size=1, seed=config.seed)
    changes = []
    for row in rows:
        # Another epoch for every group: its noise is its own.
        draw = replace(trainer.draw_of(0), epoch=row.number)
        changes += panel_changes(config, draw, trainer.rewards, row.prompt, children=children)
    trainer.close()
    return changes


@torch.no_grad()
def panel_changes(
    config: PolicyConfig, draw: Draw, rewards: Mapping[str, Reward], prompt: Prompt, *, children: int
) -> list[Change]:
    """Replace each panel's tokens by a sibling's: changes of the parts with the panel, and of the others.

    Args:
        config: the run.
        draw: parameters of its rollouts.
        rewards: by name.
        prompt: of the group.
        children: samples of the group, which branch from one latent, or have noise of their own.
    """
    # One latent: a sibling's panel is another draw of the step's noise.
    tree = Tree(1, (children, *[1] * (len(draw.sampler.stochastic_steps) - 1)))
    sampler = replace(draw.sampler, tree=tree)
    is_endpoint = OBJECTIVES[config.objective.name].needs == "endpoint"
    if is_endpoint and draw.sampler.stochastic and draw.sampler.tree.seeds > 1:
        # Such samples differ from the initial noise on: it is redrawn, and all steps follow.
        sampler = replace(sampler, stochastic=False, suffix=Suffix())
    local = replace(draw, sampler=sampler)
    trunk = Trunk(local, [Row(prompt, member) for member in range(children)])
    x_BNC = torch.stack(list(trunk.grow()[1].values()))
    weight_R = torch.tensor([reward.weight for reward in config.rewards], dtype=torch.float64)

    def scores(x_BNC: Tensor) -> tuple[Tensor, Tensor]:
        """Score finished sets: (B,) weighted scores and (B, P) parts of them, NaN if missing."""
        rollouts = []
        for rows in in_batches(trunk.rows, draw.batch):
            rollouts.append(trunk.finish(rows, x_BNC[[row.number for row in rows]])())
        with closing(Scorer(rewards, overlap=False)) as scorer:
            for rollout in rollouts:
                scorer.submit(rollout)
            table = reward_table(scorer.results(), trunk.rows, names=tuple(rewards), by_panel=True)
        assert table.part_RBP is not None
        return weight_R @ table.score_RB, torch.einsum("r, rbp -> bp", weight_R, table.part_RBP)

    score_B, part_BP = scores(x_BNC)
    panel_N = panel_of_token(prompt.grid, trunk.size, draw.policy.token_grid(trunk.size)).to(x_BNC.device)

    # Redraw one panel at a time from a sibling: its own score moves, and the rest should not.
    changes = []
    for panel in range(prompt.grid.count):
        redrawn_B, redrawn_BP = scores(torch.where((panel_N == panel)[:, None], x_BNC.roll(1, 0), x_BNC))
        own_B = (redrawn_BP - part_BP)[:, panel]
        rest_B = redrawn_B - score_B - own_B
        judged = rest_B.isfinite()
        changes += list(zip(own_B[judged].tolist(), rest_B[judged].tolist(), strict=True))
    return changes


if __name__ == "__main__":
    main()
