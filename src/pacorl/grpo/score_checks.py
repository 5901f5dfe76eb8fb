"""Checks of an epoch's scores: not finite, missing and alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pacorl.core.metric_names import ALARM, ALIKE
from pacorl.grpo.rows import Row
from pacorl.grpo.run import Run
from pacorl.grpo.scoring import Scorer, Scores
from pacorl.runtime.processes import SharedFault
from pacorl.types import Prompt


def not_finite(run: Run, rows: Sequence[Row], scores: Mapping[int, Scores]) -> list[tuple[str, Prompt]]:
    """List reward and prompt of each score that is not finite; a missing score is None."""
    not_finite_scores = []
    for row in rows:
        for name, value in zip(run.rewards, scores[row.number], strict=True):
            if value is not None and not math.isfinite(value):
                not_finite_scores.append((name, row.prompt))
    return not_finite_scores


def check_missing(run: Run, metrics: Mapping[str, float], scoring: Scorer) -> None:
    """Raise SharedFault with the rewards' reasons, on all ranks, if more scores are missing than the run tolerates."""
    missing = metrics["samples/missing"]
    not_finite = metrics["samples/not_finite"]
    tolerated = run.config.advantages.max_missing
    if missing <= tolerated:
        return

    reasons = sorted({error for error in run.runtime.gather(scoring.last_error()) if error})
    if not_finite:
        reasons.append(f"{not_finite:.0%} were no finite numbers")
    fault = ValueError(
        f"{missing:.0%} of the scores of epoch {run.epoch + 1} are missing, and advantages.max_missing is "
        f"{tolerated:.0%}; the state is saved. {'; '.join(reasons) or 'The rewards gave no reason'}"
    )
    raise SharedFault(fault)


def check_alike(run: Run, metrics: Mapping[str, float]) -> dict[str, float]:
    """Warn, and return an alarm, if no reward tells any group's images apart."""
    if any(metrics.get(f"reward/{name}/zero_std_groups", 0.0) < 1 for name in run.rewards):
        return {}
    constants = " and ".join(map(repr, run.rewards))
    run.warn_once(
        ALIKE,
        f"epoch {run.epoch + 1} has nothing to learn from: reward {constants} gave all images of each prompt one "
        "score; print what it returns for images that differ",
    )
    return {f"{ALARM}{ALIKE}": 1.0}
