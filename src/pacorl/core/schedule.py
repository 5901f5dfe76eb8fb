"""Schedule of an epoch: its seeds, and its stochastic, trained sampling steps.

Both are functions of the epoch's number, so that a resumed run needs no state for it. One window serves all
groups and processes: windows that differ between the samples of a group would make their rewards differ for that reason
alone.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Literal

from pacorl.config.base import Positive, Section


def seed_of(*parts: int | str) -> int:
    """Hash the names of a draw to a 63-bit seed, the same on every machine."""
    # Python's own hash of a text differs from process to process.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class NoiseWindow(Section):
    """Select the stochastic and trained steps of an epoch from `sde_steps`, equal for all groups."""

    kind: Literal["fixed", "random", "sliding"] = "fixed"
    """fixed: all of them. random: `size` of them, drawn for each epoch. sliding: `size` neighbours, which move by one
    step from noise to image each epoch, and stay at the end (MixGRPO, arXiv 2507.21802)."""
    size: Positive = 1
    """SDE steps of an epoch, unless `kind` is fixed."""

    def at(self, epoch: int, steps: Sequence[int], *, seed: int) -> tuple[int, ...]:
        """Choose the stochastic steps of an epoch, ascending; the same for equal seeds."""
        if self.kind == "fixed":
            return tuple(steps)
        if self.kind == "random":
            drawn = random.Random(f"noise window {seed} {epoch}").sample(steps, self.size)
            return tuple(sorted(drawn))
        first = min(epoch, len(steps) - self.size)
        return tuple(steps[first : first + self.size])
