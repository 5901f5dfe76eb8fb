"""How far a panel's noise acts on other panels, which decides whether panels may have a credit of their own.

Panel credit is unbiased if a panel's noise acts on that panel alone. So the tokens of one panel are replaced, after the
last SDE step, by those of another draw, and the set is finished and judged again. For objectives of the endpoint whose
samples do not share their initial noise, that is replaced. The change of the set's score has a part that contains the
panel, and a rest, which panel credit leaves out (docs/engine.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from pacorl.core.batches import in_batches
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.panels import panel_of_token
from pacorl.core.sampler import Suffix, Tree
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, Trunk
from pacorl.grpo.rows import Row
from pacorl.grpo.scoring import Scorer, reward_table
from pacorl.rewards.reward import Reward
from pacorl.types import Prompt, RewardTable, Rollout

CHILDREN = 4
"""Samples of a group. Each is finished and judged as it is, and once with new noise in each panel."""
LOCAL = 0.1
"""Share of the rest up to which `panel` is recommended."""
PARTLY_LOCAL = 0.3
"""Share of the rest up to which a mix of both is."""


@dataclass(frozen=True)
class Locality:
    """Changes of a score by new noise of one panel."""

    own: float
    """Root mean square change of a score's part that contains the panel with new noise."""
    rest: float
    """The same of its other parts, which panel credit leaves out."""

    @classmethod
    def of(cls, changes: Sequence[tuple[float, float]]) -> Locality:
        """Summarise the changes of `panel_changes`.

        Raises:
            ValueError: if there are none.
        """
        if not changes:
            raise ValueError("no group has all its scores; see why the rewards give none")
        # Root mean squares: changes of either sign count alike.
        own, rest = (math.sqrt(fmean(change**2 for change in part)) for part in zip(*changes, strict=True))
        return Locality(own, rest)

    @property
    def share(self) -> float:
        """Share of the rest in the squared change; NaN without a change."""
        total = self.own**2 + self.rest**2
        return self.rest**2 / total if total else math.nan

    @property
    def credit(self) -> Literal["set", "panel"] | float:
        """Value of `advantages.credit` that the locality permits."""
        if self.share <= LOCAL:
            return "panel"
        return 0.5 if self.share <= PARTLY_LOCAL else "set"

    @property
    def advice(self) -> str:
        """The credit as a config has it."""
        return str(self.credit)


@torch.no_grad()
def panel_changes(
    config: PolicyConfig, draw: Draw, rewards: Mapping[str, Reward], prompt: Prompt, *, children: int, **scoring: Any
) -> list[tuple[float, float]]:
    """Replace each panel's tokens by a sibling's: changes of the parts with the panel, and of the others.

    Args:
        config: the run.
        draw: parameters of its rollouts.
        rewards: by name.
        prompt: of the group.
        children: samples of the group, which branch from one latent, or have noise of their own.
        scoring: options of the `Scorer`.
    """
    # One latent: a sibling's panel is another draw of the step's noise.
    tree = Tree(1, (children, *[1] * (len(draw.sampler.stochastic_steps) - 1)))
    sampler = draw.sampler.model_copy(update={"tree": tree})
    is_endpoint = OBJECTIVES[config.objective.name].needs == "endpoint"
    if is_endpoint and draw.sampler.stochastic and draw.sampler.tree.seeds > 1:
        # Such samples differ from the initial noise on: it is redrawn, and all steps follow.
        sampler = sampler.model_copy(update={"stochastic": False, "suffix": Suffix()})
    local = replace(draw, sampler=sampler)
    trunk = Trunk(local, [Row(prompt, member) for member in range(children)])
    x_BNC = torch.stack(list(trunk.grow()[1].values()))
    weight_R = torch.tensor([reward.weight for reward in config.rewards], dtype=torch.float64)

    def scores(x_BNC: Tensor) -> tuple[Tensor, Tensor]:
        """Score finished sets: (B,) weighted scores and (B, P) parts of them, NaN if missing."""
        rollouts = []
        for rows in in_batches(trunk.rows, draw.batch):
            rollouts.append(trunk.finish(rows, x_BNC[[row.number for row in rows]]))
        table = scored(rewards, trunk.rows, rollouts, **scoring)
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


def scored(
    rewards: Mapping[str, Reward], rows: Sequence[Row], rollouts: Iterable[Rollout], **scoring: Any
) -> RewardTable:
    """Score the rollouts of some rows, with the parts of the scores; `scoring` are options of the `Scorer`."""
    with Scorer(rewards, overlap=False, by_panel=True, **scoring) as scorer:
        for rollout in rollouts:
            scorer.submit(rollout)
        return reward_table(scorer.results(), rows, names=tuple(rewards), parts=scorer.parts)
