"""Adapters that do something: PEFT starts B at zero."""

from __future__ import annotations

import torch
from torch import nn

from pacorl.models.adapters import adapter_state


@torch.no_grad()
def draw_adapter(model: nn.Module, *, std: float) -> None:
    """Draw every weight of a model's adapter."""
    for value in adapter_state(model).values():
        value.copy_(torch.randn_like(value) * std)
