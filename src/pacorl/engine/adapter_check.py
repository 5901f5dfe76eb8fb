"""Whether a new adapter can change what its policy paints: asked once, before a run begins.

A LoRA starts as the identity (B = 0), so its effect shows in gradients: where the velocity's gradient by a module's B
is zero, no step will ever move it. Some modules cannot matter by construction: what Qwen-Image's last block makes of
the text is thrown away. They are frozen, so that no process waits for their gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pacorl.policies.policy import Policy
from pacorl.types import Conditioning, Size


def check_adapter(policy: Policy, conditioning: Conditioning, size: Size, *, targets: tuple[str, ...]) -> list[str]:
    """Takes one forward and backward at σ = ½; freezes the adapted modules that no output depends on, and names them.

    `conditioning` is a batch of one, `size` its painted size. Raises ValueError where a pattern of `targets` has no
    module that changes the output: training it would train nothing.
    """
    transformer = policy.transformer
    with torch.enable_grad():
        x_BNC = policy.noise([0], size)
        velocity = policy.velocity(x_BNC, torch.full((1,), 0.5, device=x_BNC.device), conditioning, size)
        velocity.square().mean().backward()
    ups = {
        name.split(".lora_B.")[0]: parameter
        for name, parameter in transformer.named_parameters()
        if ".lora_B." in name and parameter.requires_grad
    }
    moving = {name for name, up in ups.items() if _moves(up.grad)}
    idle = [name for name, up in ups.items() if up.grad is None or not up.grad.any()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in moving):
            raise ValueError(
                f"adapter target {target!r} changes nothing that {type(transformer).__name__} paints: "
                "no finite gradient reaches it; leave it out of adapter.targets"
            )
    transformer.zero_grad(set_to_none=True)
    _freeze(transformer, idle)
    return idle


def _moves(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.isfinite().all()) and bool(gradient.any())


def _freeze(transformer: nn.Module, names: list[str]) -> None:
    for name in names:
        for parameter in transformer.get_submodule(name).parameters():
            parameter.requires_grad_(False)
