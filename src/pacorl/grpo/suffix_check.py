"""Check of a short suffix: does it preserve the advantages within a group?

One group is finished a second time by all steps, from the latents after its last stochastic step, and scored again.
Only the order within a group matters for training, so the advantages are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import StatisticsError, correlation
from typing import TYPE_CHECKING

import torch

from pacorl.core.batches import in_batches
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
"""Correlation of both advantages below which the run warns. For equal images it is 1."""


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
    """Correlate the first group's advantages with advantages by all steps, if a check is due; warn if it is low.

    Args:
        run: the run.
        sampler: sampler of the epoch.
        rows: rows of all ranks.
        samples: samples of this rank by update.
        scores: scores of all ranks.
        by_suffix: advantages of the epoch.
        compare: function from scores to advantages.

    Raises:
        SharedFault: wraps a reward's exception on any rank.
    """
    # 1. Is a check due?
    suffix = run.config.sampling.suffix
    products = run.config.sampling.products
    if (suffix.is_full and products == "exact") or not suffix.check_every or run.epoch % suffix.check_every:
        return {}

    # 2. Score the group by all steps and exact products.
    group = rows[: run.config.group_size]
    with run.sampling_policy():
        draw = run.draw(sampler, exact=True)
        with run.clock.timed("suffix_check"):
            make = partial(Scorer, **run.scorer_options)
            full = full_scores(draw, group, samples, rewards=run.rewards, runtime=run.runtime, scorer=make)

    # 3. Correlate.
    by_all_steps = compare(run, sampler, rows, {**scores, **full})
    agreement = advantage_correlation(by_suffix, by_all_steps, group)
    if agreement is None:
        return {}
    # The warning names the setting that departs most from all steps and exact products.
    if agreement < LEAST_CORRELATION:
        departure = f"sampling.products {products}"
        fix = "set sampling.products to exact"
        if not suffix.is_full:
            departure = f"sampling.suffix {suffix.says}"
            fix = "give it more steps, solver ab2, or leave sampling.suffix out"
        run.warn_once(
            SUFFIX_CORRELATION,
            f"epoch {run.epoch + 1}: with {departure} a group's advantages correlate by {agreement:.2f} with all "
            f"steps' advantages, less than {LEAST_CORRELATION}; {fix}",
        )
    return {SUFFIX_CORRELATION: agreement}


# Without a graph: a process without rows would otherwise block the next backward of the rest.
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
    """Finish a group's samples by all steps and score them. All ranks call it.

    Args:
        draw: parameters of the epoch's rollouts, with the sampling policy.
        group: rows of one prompt.
        samples: samples of this rank.
        rewards: rewards by name.
        runtime: ranks that share the batches. A sharded model needs equally many forwards on each.
        scorer: constructor of the scorer.

    Returns:
        Global row → one score per reward, on every rank.

    Raises:
        SharedFault: wraps a reward's exception on any rank.
    """
    # 1. Latents after the last stochastic step, from all ranks.
    draw = replace(draw, sampler=draw.sampler.model_copy(update={"suffix": Suffix()}))
    trunk = Trunk(draw, group)
    latents = runtime.gather_rows(lambda: _suffix_latents(trunk, samples))

    # 2. The ODE by all steps, and the scores.
    with scorer(rewards, overlap=False) as scoring:
        for number, batch in runtime.shard(in_batches(group, draw.batch)):
            x_BNC = torch.stack([latents[row.number] for row in batch]).to(runtime.device)
            rollout = trunk.finish(batch, x_BNC)
            if number >= 0:  # else a padding batch, for the forwards of other ranks
                scoring.submit(rollout)
        return runtime.gather_rows(scoring.results)


def _suffix_latents(trunk: Trunk, samples: Sequence[Samples]) -> Mapping[int, Tensor]:
    """Map this rank's rows of the trunk to their latents at the start of the suffix."""
    steps = trunk.draw.sampler.stochastic_steps
    if not steps:
        return trunk.grow()[1]  # noise, which costs no forward

    # Samples of the group that this rank has drawn.
    rows = {row.number for row in trunk.rows}
    latents = {}
    for nodes in chain(*(update.nodes for update in samples)):
        if nodes.step == steps[-1]:
            for row, x_NC in zip(nodes.row_B, nodes.next_latents_ENC[nodes.child_B], strict=True):
                if row in rows:
                    latents[row] = x_NC
    return latents


def advantage_correlation(cheap: Advantages, full: Advantages, group: Sequence[Row]) -> float | None:
    """Compute Pearson's correlation over the samples with both advantages; None if either is constant."""
    rows = []
    for row in group:
        if cheap.used_B[row.number] and full.used_B[row.number]:
            rows.append(row.number)

    try:
        return correlation(cheap.value_B[rows].tolist(), full.value_B[rows].tolist())
    except StatisticsError:
        return None
