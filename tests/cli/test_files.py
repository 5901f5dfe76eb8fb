"""`pacorl adapter` and `pacorl prompts` as they are called: what they say, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.models.lora.formats import Lora, read_lora, write_lora
from pacorl.records.prompts import load_prompts, prompts_from


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


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
    assert run("adapter", kohya).stdout == f"{kohya}: 1 modules, rank 2, alpha 2, scale 1\n"
    state = {f"{name}.lora_{side}.weight": torch.zeros(2, 2) for name in "xy" for side in "AB"}
    write_lora(tmp_path / "peft", Lora(state, {"x": 4.0, "y": 2.0}, "org/base"))
    expected = f"{tmp_path / 'peft'}: 2 modules, rank 2, alpha 2 to 4, scale 1 to 2, trained on org/base\n"
    assert run("adapter", tmp_path / "peft").stdout == expected


def test_it_writes_what_every_tool_reads(kohya: Path, tmp_path: Path) -> None:
    result = run("adapter", kohya, "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert "(pacorl, PEFT)" in result.stdout
    assert "(diffusers, ComfyUI)" in result.stdout
    names = {"adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    state = read_lora(kohya).state
    assert all(torch.equal(read_lora(tmp_path / "out").state[name], value) for name, value in state.items())


def test_a_folder_that_holds_something_is_not_written_into(kohya: Path) -> None:
    result = run("adapter", kohya, "--out", kohya.parent)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == f"--out {kohya.parent} is not empty; name a new folder"


# --- prompts ----------------------------------------------------------------------------------------------------


def test_check_says_what_leaks(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("a fox\na boat\n")
    (tmp_path / "bench.txt").write_text("A fox.\n")
    mine, bench = str(tmp_path / "mine.txt"), str(tmp_path / "bench.txt")
    leaking = run("prompts", "check", mine, "--against", bench)
    assert leaking.exit_code == 1
    assert "1 of 2 training prompts are measured on" in leaking.output
    document = json.loads(run("prompts", "check", mine, "--against", bench, "--json").output)
    assert document["leaks"][0]["text"] == "a fox"
    assert run("prompts", "check", "tiny:train", "--against", "tiny:dev", "--against", "tiny:test").exit_code == 0


def test_split_writes_two_files_that_share_nothing(tmp_path: Path) -> None:
    result = run("prompts", "split", "tiny:train", "--out", tmp_path, "--test", "40", "--keep-out", "tiny:train:8")
    assert result.exit_code == 0, result.output
    train, test = (load_prompts(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    assert len(test) >= 40
    kept_out = {prompt.text for prompt in prompts_from("tiny:train:8")}
    texts = [{prompt.text for prompt in side} for side in (train, test)]
    assert texts[0].isdisjoint(texts[1])
    assert kept_out.isdisjoint(texts[0] | texts[1])
    assert len(train) + len(test) + int(result.output.split(", ")[-1].split()[0]) == 288
