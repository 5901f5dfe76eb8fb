"""Last finished state of a run in host memory, saved if the main thread hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pacorl.grpo.checkpoint import WRITING, RunState, checkpoint_of, gather_state, write_run
from pacorl.grpo.lora_run import LoraRun
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import as_read_back, read_object
from pacorl.runtime.watch import UNSAVED


@dataclass(slots=True)
class LastState:
    """Copy of the state after the newest epoch or evaluation, on the ranks that store one.

    A hung run may be in the middle of a step, and other ranks' shards may be unreachable.
    """

    config: PolicyConfig
    targets: Sequence[str]
    """Name suffixes of the adapted modules."""
    copy: RunState | None = None
    """None before the first."""

    def take(self, run: LoraRun, state: Mapping[str, Any]) -> None:
        """Copy the run's state, with the main process's `state`. All ranks call it, between two steps."""
        content = gather_state(run, state)
        if run.runtime.keeps_state:
            copied = {}
            for kind, tensors in content.tensors.items():
                copied[kind] = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
            self.copy = replace(content, tensors=copied)  # the earlier copy stays until this one is whole

    def save(self) -> str:
        """Write the copy as a checkpoint, unless it exists, and return a message.

        Raises:
            OSError: if the disk is full.
        """
        run = self.copy
        if run is None:  # before the first epoch
            return UNSAVED

        path = checkpoint_of(run, self.config) / "state.json"
        with WRITING:  # the main thread may be writing this very state
            state = read_object(path) if path.is_file() else {}
        expected: dict[str, object] = as_read_back(dict(run.state))
        if not state.items() >= expected.items():
            write_run(run, self.config, targets=self.targets)
        return f"stopped after epoch {run.state['epoch']}, and saved; go on with --resume auto"
