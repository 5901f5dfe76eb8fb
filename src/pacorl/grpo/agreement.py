"""Agreement within and across the sets of an epoch, by its judge: κ tells a shared look from one look for all sets.

The judge is asked about a fixed number of pairs an epoch, whatever the rewards. Their draw follows from (seed, epoch),
and one process asks them, so that they do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

from pacorl.core.contrast import Pair, kappa, pairs_within
from pacorl.core.grid import split
from pacorl.core.metric_names import MONITOR
from pacorl.core.schedule import seed_of
from pacorl.grpo.rows import Row
from pacorl.rewards.consistency import Consistency
from pacorl.types import Rollout, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.grpo.trainer import PolicyTrainer

COUPLES = 16
"""Pairs of sets that are compared in an epoch, each of one prompt."""
PAIRS = 4
"""Pairs of panels within a couple's sets, and as many across them."""


def measure_agreement(trainer: PolicyTrainer, rows: Sequence[Row], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Measure P(Yes) of pairs of panels within sets and across sets of one prompt. All ranks call it.

    Returns:
        `monitor/within`, `monitor/across` and `monitor/kappa`; empty without a judge, without sets, and with the
        monitor off.

    Raises:
        SharedFault: wraps an exception of the judge, on all ranks.
    """
    config, runtime, reward = trainer.config, trainer.runtime, consistency_of(trainer)
    rng = Random(seed_of(config.seed, trainer.epoch, "agreement"))
    couples = draw_couples(rows, group_size=config.group_size, rng=rng)
    if reward is None or config.monitor == "off" or not couples:
        return {}

    # 1. The images, of which a couple's may be on two processes.
    numbers = {row.number for couple in couples for row in couple}
    own: dict[int, Image] = {}
    for rollout in rollouts:
        own |= {row: image for row, image in zip(rollout.row_B, rollout.images, strict=True) if row in numbers}
    images = runtime.gather_rows(lambda: own)

    # 2. The pairs: a couple's panels are numbered over both of its sets.
    panels, pairs = [], []
    for first, second in couples:
        count = first.prompt.grid.count
        panels.append([panel for row in (first, second) for panel in split(images[row.number], row.prompt.grid)])
        within = pairs_within(2, count)
        across = [*product(range(count), range(count, 2 * count))]
        pairs.append([*rng.sample(within, min(PAIRS, len(within))), *rng.sample(across, PAIRS)])

    # 3. The answers, of the main process.
    prompts = [first.prompt for first, _ in couples]
    ask = partial(reward.mean_verdicts, prompts, panels, pairs=pairs)

    def answers() -> dict[int, dict[Pair, Verdict]]:
        if not runtime.is_main:
            return {}
        return dict(enumerate(trainer.limited(reward, ask, f"the judge (agreement of {len(couples)} pairs of sets)")))

    # 4. Means without missing answers.
    p_yes: dict[str, list[float]] = {"within": [], "across": []}
    for prompt, verdicts in zip(prompts, runtime.gather_rows(answers).values(), strict=True):
        for (first_panel, second_panel), verdict in verdicts.items():
            same_set = first_panel // prompt.grid.count == second_panel // prompt.grid.count
            if verdict.p_yes is not None:
                p_yes["within" if same_set else "across"].append(verdict.p_yes)
    if not all(p_yes.values()):
        return {}
    means = {kind: fmean(values) for kind, values in p_yes.items()}
    means["kappa"] = kappa(means["within"], means["across"])
    return {f"{MONITOR}{name}": value for name, value in means.items()}


def consistency_of(trainer: PolicyTrainer) -> Consistency | None:
    """Return the run's reward of consistency, or one of its judge, which asks for the theme; None without a judge."""
    rewards = [reward for reward in trainer.rewards.values() if isinstance(reward, Consistency)]
    if not rewards and trainer.judge:
        rewards = [Consistency(trainer.judge)]
    return rewards[0] if rewards else None


def draw_couples(rows: Sequence[Row], *, group_size: int, rng: Random) -> list[tuple[Row, Row]]:
    """Draw pairs of sets of one prompt, from all groups in turn; none of single images."""
    groups = [rows[first : first + group_size] for first in range(0, len(rows), group_size)]
    groups = [group for group in groups if group[0].prompt.grid.count > 1]
    rng.shuffle(groups)
    couples = []
    for turn in range(COUPLES if groups else 0):
        first, second = rng.sample(groups[turn % len(groups)], 2)
        couples.append((first, second))
    return couples
