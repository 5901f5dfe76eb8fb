"""The last finished state of a run in host memory, for a stop that its main thread cannot meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pacorl.config.policy_run import PolicyConfig
from pacorl.engine.watch import UNSAVED
from pacorl.train.checkpoint import RunState, TrainedWeights, gather_state, write_run


@dataclass(slots=True)
class LastState:
    """A copy of the state after the newest epoch or evaluation, on the ranks that keep one.

    The trained weights themselves may be in the middle of a step when the run is stopped, and other ranks' shards out
    of reach.
    """

    config: PolicyConfig
    """The run's."""
    targets: Sequence[str]
    """The adapter's modules."""
    copy: RunState | None = None
    """None before the first, and of DeepSpeed, whose optimizer only all ranks together can save."""
    saved: bool = False
    """Whether a checkpoint holds it."""

    def take(self, weights: TrainedWeights, state: Mapping[str, Any]) -> None:
        """Copy the run's state. All ranks call it, between two steps.

        Args:
            weights: the run's.
            state: what state.json would hold; the main process's is taken.
        """
        if weights.runtime.deepspeed:
            return
        run = gather_state(weights, state)
        if weights.runtime.keeps_state:
            # The earlier copy stays until this one is whole.
            self.copy, self.saved = run.in_host_memory(), False

    def save(self) -> str:
        """Write the copy as a checkpoint, unless there is one, and return what was done, in words.

        Raises:
            OSError: if the disk is full.
        """
        run = self.copy
        if run is None:
            return UNSAVED
        if not self.saved:
            write_run(run, self.config, targets=self.targets)
        return f"stopped after epoch {run.state['epoch']}, and saved; go on with --resume auto"
