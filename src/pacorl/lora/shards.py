"""Weights that lie in shards on several processes (FSDP2): made whole to be saved, cut to be put back."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def materialize(module: nn.Module) -> None:
    """Reshard what a forward gathered: after one without backward FSDP2 leaves the root's weights unsharded, and a
    change of them would be lost."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """The full form of a tensor that may be sharded. Every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(own: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, which every process has, on `own`'s device and cut as `own` is."""
    value = value.to(own.device, own.dtype)
    if isinstance(own, DTensor) and not isinstance(value, DTensor):
        # No source rank: each process cuts its share from what it has, and nothing is sent.
        return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    return value
