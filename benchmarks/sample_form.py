"""The sample form of an epoch, which pacorl had before it computed each distinct latent once, for comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pacorl.engine import rollout


@contextmanager
def sample_form() -> Iterator[None]:
    """Within the block an SDE step passes its latent once per sample, in sampling and in training.

    The update replays the rollout's batches, so the copies go through its forward and backward as well. Only the first
    copy of a node is read, and gets the gradient of all its samples: the results are those of the node form.
    """
    branch = rollout._Trunk._branch

    def branch_each(self: Any, nodes: Sequence[int], level: int, x_VNC: Tensor) -> Any:
        copies = [nodes.index(n) for row in self.rows if (n := self.tree.node_of(row.number, level)) in nodes]
        return branch(self, [nodes[copy] for copy in copies], level, x_VNC[torch.tensor(copies)])

    rollout._Trunk._branch = branch_each  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        rollout._Trunk._branch = branch  # type: ignore[method-assign]
