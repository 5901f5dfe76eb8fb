"""Which device computes, and in which types."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_world import toy_config

from pacorl.core.devices import best_dtype, check_card_used
from pacorl.grpo.trainer import PolicyTrainer


@pytest.mark.parametrize(
    ("checkpoint", "device", "dtype"),
    [("lab/model", "mps", "bfloat16"), ("lab/model", "cuda:1", "bfloat16"), ("lab/model", "cpu", "float32")]
    + [("tiny", device, "float32") for device in ("mps", "cuda", "cpu")],
)
def test_weights_are_of_the_device_s_best_type(checkpoint: str, device: str, dtype: str) -> None:
    assert best_dtype(checkpoint, device) == dtype


def test_bfloat16_on_the_cpu_beside_a_card_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = toy_config(tmp_path / "run")
    bf16 = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    with pytest.raises(ValueError, match=r"model\.dtype bfloat16 would train on the CPU"):
        PolicyTrainer(bf16)
    check_card_used("float32", torch.device("cpu"))
    check_card_used("bfloat16", torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_card_used("bfloat16", torch.device("cpu"))
