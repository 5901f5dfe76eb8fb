"""The run's page while it runs, and what its judge did meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pacorl.judges.judge import counts_of
from pacorl.report import write_report

if TYPE_CHECKING:
    from pacorl.train.training import Training

logger = logging.getLogger(__name__)


def write_page_where_due(training: Training) -> None:
    """Build report.html with each evaluation and each checkpoint, on the main process.

    A page that cannot be built is warned of; the run is worth more than its page.
    """
    every = training.config.save_every
    due = training.evaluated == training.epoch or training.epoch % every == 0
    if not due or not training.runtime.is_main:
        return
    try:
        write_report(training.config.out)
    except (OSError, ValueError) as fault:
        logger.warning("report.html was not built after epoch %d: %s", training.epoch, fault)


def judged_since(training: Training, before: Mapping[str, int]) -> dict[str, float]:
    """`judge/…`: what the judges of all processes did since `before`."""
    own = {name: count - before[name] for name, count in counts_of(training.judge).items()}
    parts = training.runtime.gather(own)
    return {f"judge/{name}": float(sum(part[name] for part in parts)) for name in own}
