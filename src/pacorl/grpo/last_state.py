"""The last finished state of a run in host memory, for a stop that its main thread cannot meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pacorl.grpo.checkpoint import WRITING, RunState, TrainedWeights, checkpoint_of, gather_state, write_run
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import as_read_back, read_object
from pacorl.runtime.watch import UNSAVED


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
            self.copy = run.in_host_memory()  # the earlier copy stays until this one is whole

    def save(self) -> str:
        """Write the copy as a checkpoint, unless there is one, and return what was done, in words.

        Raises:
            OSError: if the disk is full.
        """
        run = self.copy
        if run is None:
            return UNSAVED
        with WRITING:  # the main thread may be writing this very state
            written = self._is_written(run)
        if not written:
            write_run(run, self.config, targets=self.targets)
        return f"stopped after epoch {run.state['epoch']}, and saved; go on with --resume auto"

    def _is_written(self, run: RunState) -> bool:
        path = checkpoint_of(run, self.config) / "state.json"
        state = read_object(path) if path.is_file() else {}
        kept: dict[str, object] = as_read_back(dict(run.state))
        return state.items() >= kept.items()
