"""Which device computes, and in which types."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_world import toy_config

from pacorl.core import devices
from pacorl.core.devices import available_device, best_dtype, check_card_used, driver_version, widest_float
from pacorl.grpo.trainer import PolicyTrainer
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


def test_what_metal_lacks_is_refused_before_weights_are_looked_for() -> None:
    options = FLUX.options.model_validate({"checkpoint": "nowhere", "dtype": "float64"})
    with pytest.raises(ValueError, match=r"model\.dtype float64: an Apple GPU has no such type; take float32"):
        FLUX.load(options, device="mps")
    with pytest.raises(ValueError, match=r"dtype float64: an Apple GPU has no such type; take float32"):
        LocalJudge.from_pretrained("nowhere", device="mps", dtype="float64")


def fault(compiled: str, device: str) -> str:
    """Why a generator in this form is not loaded; `nowhere` has no checkpoint."""
    options = FLUX.options.model_validate({"checkpoint": "nowhere", "compile": compiled})
    with pytest.raises((ValueError, OSError)) as raised:
        FLUX.load(options, device=device)
    return str(raised.value)


@pytest.mark.parametrize(("lacks", "fix"), [("triton", "pip install triton"), ("compiler", "install gcc")])
def test_a_card_compiles_with_triton_and_a_c_compiler(
    lacks: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: None if name == lacks else name)
    monkeypatch.setenv("PATH", str(tmp_path))
    if lacks == "compiler":
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setenv("CC", "cc")
    assert fix in fault("blocks", "cuda")
    for other in (("none", "cuda"), ("blocks", "cpu")):
        assert "model.compile" not in fault(*other)


def put_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A machine whose only program is this `nvidia-smi`; none without a script."""
    if script:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("script", "version"), [("echo 570.86.15; echo 570.86.15", "570.86.15"), ("exit 9", ""), ("", "")]
)
def test_the_driver_is_read_from_nvidia_smi(
    script: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_driver(tmp_path, monkeypatch, script)
    assert driver_version() == version


def test_bfloat16_on_the_cpu_beside_a_card_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_driver(tmp_path, monkeypatch, "echo 550.54.14")
    config = toy_config(tmp_path / "run")
    bf16 = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    with pytest.raises(ValueError, match=r"model\.dtype bfloat16 would train on the CPU, and .*driver 550\.54\.14"):
        PolicyTrainer(bf16)
    check_card_used("float32", torch.device("cpu"))
    check_card_used("bfloat16", torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_card_used("bfloat16", torch.device("cpu"))
