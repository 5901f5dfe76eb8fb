"""`model.gradient_checkpointing: auto`, decided on the card once everything else is on it.

Checkpointing computes the activations of each block again in the backward: a third more work in training for much less
memory. It is needless where a batch's activations fit the memory that is still free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pacorl.models.lora.sharding import is_sharded

if TYPE_CHECKING:
    from torch import nn

    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.models.policies.policy import Policy
    from pacorl.runtime.processes import Runtime
    from pacorl.types import Conditioning, Size

AUTO = "auto"
FREE_MARGIN = 2 * 2**30
"""Bytes of a card to leave free: gradients of activations, the optimizer's step and the allocator's fragments."""
TRAINED_COPIES = 4
"""Copies of the trained weights that are allocated later: their gradient, AdamW's two moments, and the average."""


def decide_checkpointing(
    config: PolicyConfig, policy: Policy, conditioning: Conditioning, size: Size, *, batch: int, runtime: Runtime
) -> bool:
    """Turn gradient checkpointing off if all ranks can do without, and on otherwise. All ranks call it.

    One forward counts the activations of one image and keeps none of them. Models that take turns on the device keep
    checkpointing: the memory that is free now is another model's in a moment.

    Args:
        config: of the run.
        policy: on the device, as it is trained.
        conditioning: of one image.
        size: of that image.
        batch: images in the largest forward of training.
        runtime: of the run.

    Returns:
        Whether it is on.
    """
    transformer: Any = runtime.unwrap(policy.transformer)
    if config.in_turns:
        return True

    transformer.disable_gradient_checkpointing()
    needed = batch * activation_bytes(policy, conditioning, size) + TRAINED_COPIES * trained_bytes(transformer)
    fits = needed + FREE_MARGIN <= free_bytes(runtime.device)

    if all(runtime.gather(fits)):
        return False
    transformer.enable_gradient_checkpointing()
    return True


def trained_bytes(transformer: nn.Module) -> int:
    """Count the bytes of the trained weights on this device; of sharded weights, this rank's share."""
    count = 0
    for weight in transformer.parameters():
        if weight.requires_grad:
            count += weight.to_local().nbytes if is_sharded(weight) else weight.nbytes
    return count


def activation_bytes(policy: Policy, conditioning: Conditioning, size: Size) -> int:
    """Count the bytes of one forward's activations for the backward, without storing them.

    Tensors saved by several operations count for each, so the count is an upper bound.

    Args:
        policy: with a trainable adapter.
        conditioning: of a batch.
        size: of its images.
    """
    # Weights are saved for the backward too, but take no new memory.
    tensors = (*policy.transformer.parameters(), *policy.transformer.buffers())
    weights = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    counted = 0

    def count(tensor: torch.Tensor) -> None:
        nonlocal counted
        if tensor.untyped_storage().data_ptr() not in weights:
            counted += tensor.nbytes

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, _never):
        x_BNC = policy.noise([0] * len(conditioning), size)
        sigma_B = torch.full((len(x_BNC),), 0.5, device=x_BNC.device)
        policy.velocity(x_BNC, sigma_B, conditioning, size)
    return counted


def _never(packed: object) -> torch.Tensor:
    raise RuntimeError("activations were counted here, not kept: this forward has no backward")


def free_bytes(device: torch.device) -> float:
    """Memory that a tensor could still get on a device; without limit on the CPU."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(free + unused)
