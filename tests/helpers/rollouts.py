"""All rollouts and nodes of some rows at once."""

from __future__ import annotations

from collections.abc import Sequence

from pacorl.grpo.rollout import Draw, draw_samples
from pacorl.grpo.rows import Row
from pacorl.types import Samples


def collect(draw: Draw, rows: Sequence[Row]) -> Samples:
    samples = Samples()
    list(draw_samples(draw, [rows], samples))
    return samples
