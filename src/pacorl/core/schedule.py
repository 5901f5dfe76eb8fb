"""The learning rate as a function of the optimizer step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(step: int, *, peak: float, schedule: Literal["constant", "cosine"], warmup: int, total: int) -> float:
    """The rate of the step after `step` finished ones.

    It rises in equal parts over `warmup` steps to `peak`, then stays, or falls along a half cosine to 0 at `total`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
