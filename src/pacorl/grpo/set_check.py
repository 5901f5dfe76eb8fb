"""Check of a set judge: do its answers preserve the advantages of the pair judge?

The images of an epoch are scored a second time, pair by pair, and both advantages are compared: those of panels, with
panel credit. All of the epoch's images are compared, since those of one group would give too wide an interval for the
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import StatisticsError, correlation

from pacorl.core.metric_names import SET_CORRELATION
from pacorl.core.sampler import Sampler
from pacorl.grpo.rows import Row
from pacorl.grpo.run import Run
from pacorl.grpo.scoring import Parts, Scorer, Scores
from pacorl.judge.judge import PairByPair
from pacorl.judge.set_judge import LEAST_CORRELATION
from pacorl.types import Advantages, Samples

Compare = Callable[[Run, Sampler, Sequence[Row], Mapping[int, Scores], Mapping[int, Parts] | None], Advantages]
"""Scores of an epoch and their parts → advantages."""


def check_set_judge(
    run: Run,
    sampler: Sampler,
    rows: Sequence[Row],
    *,
    samples: Sequence[Samples],
    scores: Mapping[int, Scores],
    parts: Mapping[int, Parts] | None,
    by_set: Advantages,
    compare: Compare,
) -> dict[str, float]:
    """Correlate the epoch's advantages with those by the pair judge, if a check is due; warn if it is low.

    Called where a set judge scored the epoch.

    Args:
        run: the run.
        sampler: sampler of the epoch.
        rows: rows of all ranks.
        samples: samples of this rank by update.
        scores: scores of all ranks, by the set judge.
        parts: parts of these scores; None without panel credit.
        by_set: advantages of the epoch.
        compare: function from scores to advantages.

    Raises:
        SharedFault: wraps a reward's exception on any rank.
    """
    # 1. Is a check due?
    judge = run.judge
    every = getattr(run.config.judge, "set_check_every", 0)
    if not isinstance(judge, PairByPair) or not every or run.epoch % every:
        return {}

    # 2. Score the images again by the rewards that ask the judge.
    asking = {name: reward for name, reward in run.rewards.items() if getattr(reward, "judge", None) is judge}
    scorer = Scorer(asking, overlap=False, by_panel=run.by_panel, **run.scorer_options)
    with run.clock.timed("set_check"), judge.pair_by_pair(), scorer as scoring:
        for rollout in chain(*(update.rollouts for update in samples)):
            scoring.submit(rollout)
        answers = run.runtime.gather_rows(scoring.results)
        answer_parts = run.runtime.gather_rows(lambda: scoring.parts) if parts is not None else {}

    # 3. Correlate.
    pair_scores = {row: with_answers(run, values, asking, answers[row]) for row, values in scores.items()}
    pair_parts = None if parts is None else {row: {**parts.get(row, {}), **answer_parts.get(row, {})} for row in scores}
    agreement = advantage_agreement(by_set, compare(run, sampler, rows, pair_scores, pair_parts))
    if agreement is None:
        return {}
    if agreement < LEAST_CORRELATION:
        run.warn_once(
            SET_CORRELATION,
            f"epoch {run.epoch + 1}: by judge.set_judge the advantages correlate by {agreement:.3f} with the pair "
            f"judge's, less than {LEAST_CORRELATION}; distil it again with samples of this policy, or leave "
            "judge.set_judge out",
        )
    return {SET_CORRELATION: agreement}


def with_answers(run: Run, values: Scores, asking: Mapping[str, object], answers: Scores) -> Scores:
    """Replace the scores of the rewards in `asking` by `answers`."""
    answer_of = dict(zip(asking, answers, strict=True))
    return [answer_of.get(name, value) for name, value in zip(run.rewards, values, strict=True)]


def advantage_agreement(first: Advantages, second: Advantages) -> float | None:
    """Compute Pearson's correlation of the advantages, of panels if there are any; None if either is constant.

    Samples that one of them excludes are left out.
    """
    used_B = first.used_B & second.used_B
    columns = []
    for advantages in (first, second):
        value_LB = advantages.value_B[None] if advantages.value_LBP is None else advantages.value_LBP
        columns.append(value_LB[:, used_B].flatten())
    finite = columns[0].isfinite() & columns[1].isfinite()
    try:
        return correlation(*(column[finite].tolist() for column in columns))
    except StatisticsError:
        return None
