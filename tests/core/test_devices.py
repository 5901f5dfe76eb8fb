"""Which device computes, and in which types."""

from __future__ import annotations

import pytest
import torch

from pacorl.core.devices import available_device, best_dtype, widest_float
from pacorl.judge.local import LocalJudge
from pacorl.models.policies.flux import FLUX


def test_the_device_is_torchs_own_accelerator_or_the_cpu() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert available_device() == (accelerator.type if accelerator else "cpu")


@pytest.mark.parametrize(
    ("checkpoint", "device", "dtype"),
    [("lab/model", "mps", "bfloat16"), ("lab/model", "cuda:1", "bfloat16"), ("lab/model", "cpu", "float32")]
    + [("tiny", device, "float32") for device in ("mps", "cuda", "cpu")],
)
def test_weights_are_of_the_device_s_best_type(checkpoint: str, device: str, dtype: str) -> None:
    assert best_dtype(checkpoint, device) == dtype


def test_metrics_are_added_up_in_what_the_device_has() -> None:
    assert widest_float(torch.device("mps")) == torch.float32
    assert {widest_float(torch.device(name)) for name in ("cpu", "cuda")} == {torch.float64}


@pytest.mark.parametrize(("key", "value", "fix"), [("dtype", "float64", "float32"), ("quantize", "fp8", "int8")])
def test_what_metal_lacks_is_refused_before_weights_are_looked_for(key: str, value: str, fix: str) -> None:
    options = FLUX.options.model_validate({"checkpoint": "nowhere", key: value})
    with pytest.raises(ValueError, match=rf"model\.{key} {value}: an Apple GPU has no such type; take {fix}"):
        FLUX.load(options, device="mps")
    with pytest.raises(ValueError, match=rf"judge\.{key} {value}: an Apple GPU has no such type; take {fix}"):
        LocalJudge.from_pretrained("nowhere", device="mps", **{key: value})
