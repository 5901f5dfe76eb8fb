"""Copies to a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pacorl.core.devices import to_device, warn_of_pageable


def test_memory_that_cannot_be_pinned_is_copied_all_the_same_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under WSL2."""
    sent: list[tuple[Tensor, torch.device]] = []

    def refuse(tensor: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    def send(tensor: Tensor, device: torch.device, **options: Any) -> Tensor:
        sent.append((tensor, device))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", refuse)
    monkeypatch.setattr(Tensor, "to", send)
    warn_of_pageable.cache_clear()
    tensor, card = torch.arange(5.0), torch.device("cuda")

    assert to_device(tensor, card) is to_device(tensor, card) is tensor

    assert sent == [(tensor, card)] * 2
    (record,) = caplog.records
    assert "CUDA error: out of memory): copies to the card come from pageable memory" in record.getMessage()
