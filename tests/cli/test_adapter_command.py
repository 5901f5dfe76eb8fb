"""`pacorl adapter` as it is called: what it says of an adapter, what it writes, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from pacorl.cli.adapter import register
from pacorl.lora.formats import Lora, read_lora, write_lora

app = typer.Typer()
register(app)


@app.callback()
def several() -> None:
    """More commands than one, as in `pacorl`."""


def run(*words: str | Path):
    return CliRunner().invoke(app, ["adapter", *map(str, words)])


@pytest.fixture
def kohya(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    block = "lora_unet_transformer_blocks_0_attn_to_q"
    tensors = {f"{block}.lora_up.weight": torch.randn(8, 2), f"{block}.lora_down.weight": torch.randn(2, 8)}
    file = tmp_path / "night.safetensors"
    save_file(tensors | {f"{block}.alpha": torch.tensor(1.0)}, file)
    return file


def test_it_says_what_an_adapter_is(kohya: Path, tmp_path: Path) -> None:
    """The converter of a kohya file folds α into the weights."""
    assert run(kohya).stdout == f"{kohya}: 1 modules, rank 2, alpha 2, scale 1\n"
    state = {f"{name}.lora_{side}.weight": torch.zeros(2, 2) for name in "xy" for side in "AB"}
    write_lora(tmp_path / "peft", Lora(state, {"x": 4.0, "y": 2.0}, "org/base"))
    expected = f"{tmp_path / 'peft'}: 2 modules, rank 2, alpha 2 to 4, scale 1 to 2, trained on org/base\n"
    assert run(tmp_path / "peft").stdout == expected


def test_it_writes_what_every_tool_reads(kohya: Path, tmp_path: Path) -> None:
    result = run(kohya, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "(pacorl, PEFT)" in result.stdout
    assert "(diffusers, ComfyUI)" in result.stdout
    names = {"adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    state = read_lora(kohya).state
    assert all(torch.equal(read_lora(tmp_path / "out").state[name], value) for name, value in state.items())


def test_a_folder_that_holds_something_is_not_written_into(kohya: Path) -> None:
    result = run(kohya, "--out", kohya.parent)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == f"--out {kohya.parent} is not empty; name a new folder"
