"""Which device computes, in which types, and copies to it."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from pacorl.core.devices import best_dtype, to_device, warn_of_pageable


@pytest.mark.parametrize(
    ("checkpoint", "device", "dtype"),
    [("lab/model", "mps", "bfloat16"), ("lab/model", "cuda:1", "bfloat16"), ("lab/model", "cpu", "float32")]
    + [("tiny", device, "float32") for device in ("mps", "cuda", "cpu")],
)
def test_weights_are_of_the_device_s_best_type(checkpoint: str, device: str, dtype: str) -> None:
    assert best_dtype(checkpoint, device) == dtype


def test_memory_that_cannot_be_pinned_is_copied_all_the_same_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under WSL2."""
    sent: list[tuple[Tensor, torch.device]] = []
    fault = RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
    monkeypatch.setattr(Tensor, "pin_memory", Mock(side_effect=fault))
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, **_: sent.append((tensor, device)) or tensor)
    warn_of_pageable.cache_clear()
    tensor, card = torch.arange(5.0), torch.device("cuda")

    assert to_device(tensor, card) is to_device(tensor, card) is tensor
    assert sent == [(tensor, card)] * 2
    (record,) = caplog.records
    assert "CUDA error: out of memory): copies to the card come from pageable memory" in record.getMessage()
