"""FSDP2's modules and tensors, recognised without importing them.

Their import takes a second, and only a launcher's accelerate, which imports them, shards weights.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def has_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether FSDP2 shards a module's weights."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Return whether a tensor is one process's shard."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))
