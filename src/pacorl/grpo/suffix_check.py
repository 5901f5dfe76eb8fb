"""Does the cheap way to the image still say which samples of a group are the better ones?

A group is finished a second time, by all steps, from the latents that the epoch's samples left their last stochastic
step with, and judged again. What matters of a reward is its order within a group, so advantages are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import StatisticsError, correlation
from typing import TYPE_CHECKING

import torch

from pacorl.core.metric_names import SUFFIX_CORRELATION
from pacorl.core.sampler import Sampler, Suffix
from pacorl.grpo.rollout import Draw, Trunk
from pacorl.grpo.rows import Row
from pacorl.grpo.run import Run
from pacorl.grpo.scoring import Scorer, Scores
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Samples

if TYPE_CHECKING:
    from torch import Tensor

    from pacorl.rewards.reward import Reward

Compare = Callable[[Run, Sampler, Sequence[Row], Mapping[int, Scores]], Advantages]
"""Scores of an epoch → advantages."""
LEAST_CORRELATION = 0.9
"""Of the advantages by both ways, below which the run warns. Between two judgements of equal images it is 1."""


def check_suffix(
    run: Run,
    sampler: Sampler,
    rows: Sequence[Row],
    *,
    samples: Sequence[Samples],
    scores: Mapping[int, Scores],
    by_suffix: Advantages,
    compare: Compare,
) -> dict[str, float]:
    """Correlate the first group's advantages with those by all steps, if a check is due, and warn if it is low.

    Args:
        run: with the policy that sampled.
        sampler: of the epoch.
        rows: of all ranks.
        samples: of this rank, by update.
        scores: of all ranks.
        by_suffix: the epoch's advantages.
        compare: scores → advantages, as the epoch compares them.

    Raises:
        SharedFault: what a reward raised on any rank.
    """
    sampling = run.config.sampling
    suffix, products = sampling.suffix, sampling.products
    if (suffix.is_full and products == "exact") or not suffix.check_every or run.epoch % suffix.check_every:
        return {}

    group = rows[: run.config.group_size]
    with run.sampling_policy():
        draw = run.draw(sampler, exact=True)
        with run.clock.timed("suffix_check"):
            make = partial(Scorer, **run.scorer_options)
            full = full_scores(draw, group, samples, rewards=run.rewards, runtime=run.runtime, scorer=make)

    by_all_steps = compare(run, sampler, rows, {**scores, **full})
    agreement = advantage_correlation(by_suffix, by_all_steps, group)
    if agreement is None:
        return {}
    if agreement < LEAST_CORRELATION:
        departure, fix = f"sampling.products {products}", "set sampling.products to exact"
        if not suffix.is_full:
            departure = f"sampling.suffix {suffix.says}"
            fix = "give it more steps, solver ab2, or leave sampling.suffix out"
        run.warn_once(
            SUFFIX_CORRELATION,
            f"epoch {run.epoch + 1}: with {departure} a group's advantages correlate by {agreement:.2f} with those of "
            f"all steps, less than {LEAST_CORRELATION}; {fix}",
        )
    return {SUFFIX_CORRELATION: agreement}


# With a graph, a process that has nothing to finish here would leave the others waiting in their next backward.
@torch.no_grad()
def full_scores(
    draw: Draw,
    group: Sequence[Row],
    samples: Sequence[Samples],
    *,
    rewards: Mapping[str, Reward],
    runtime: Runtime,
    scorer: Callable[..., Scorer] = Scorer,
) -> dict[int, Scores]:
    """The scores of a group's samples, had they been finished by all steps. Every rank calls it.

    Args:
        draw: what the epoch's samples were drawn with; the policy is still the one that drew them.
        group: the rows of one prompt.
        samples: of this rank.
        rewards: by name.
        runtime: among whose ranks the batches are shared, since each must make as many forwards if they are sharded.
        scorer: makes the scorer from rewards and `overlap`.

    Returns:
        Global row → one score per reward, on every rank.

    Raises:
        SharedFault: what a reward raised on any rank.
    """
    draw = replace(draw, sampler=draw.sampler.model_copy(update={"suffix": Suffix()}))
    trunk = Trunk(draw, group)
    latents = runtime.gather_rows(lambda: _suffix_latents(trunk, samples))
    batches = [group[start : start + draw.batch] for start in range(0, len(group), draw.batch)]
    with scorer(rewards, overlap=False) as scoring:
        for number, batch in runtime.shard(batches):
            x_BNC = torch.stack([latents[row.number] for row in batch]).to(runtime.device)
            rollout = trunk.finish(batch, x_BNC)
            if number >= 0:  # else it only kept other ranks' forwards going
                scoring.submit(rollout)
        return runtime.gather_rows(scoring.results)


def _suffix_latents(trunk: Trunk, samples: Sequence[Samples]) -> Mapping[int, Tensor]:
    """Row → the latent that the suffix begins with, of those rows of the trunk that were sampled here."""
    steps = trunk.draw.sampler.stochastic_steps
    if not steps:
        return trunk.grow()[1]  # noise, which costs no forward
    rows = {row.number for row in trunk.rows}
    last = [nodes for update in samples for nodes in update.nodes if nodes.step == steps[-1]]
    return {
        row: x_NC
        for nodes in last
        for row, x_NC in zip(nodes.row_B, nodes.next_latents_ENC[nodes.child_B], strict=True)
        if row in rows
    }


def advantage_correlation(cheap: Advantages, full: Advantages, group: Sequence[Row]) -> float | None:
    """Pearson's, over the samples of a group that both ways gave a score; None if either says that all are alike."""
    rows = [row.number for row in group if cheap.used_B[row.number] and full.used_B[row.number]]
    try:
        return correlation(cheap.value_B[rows].tolist(), full.value_B[rows].tolist())
    except StatisticsError:
        return None
