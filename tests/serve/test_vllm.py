"""The vLLM that `pacorl serve --backend vllm` becomes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import pacorl
from pacorl.serve.vllm import environment_of, run_vllm, vllm_command


def adapter(folder: Path, *, rank: int = 12, key: str = "base_model.model.language_model.q.lora_A.weight") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": rank, "lora_alpha": 1, "base_model_name_or_path": "base"})
    )
    shapes = {key: (rank, 2), key.replace("lora_A", "lora_B"): (2, rank)}
    weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_judge_gets_the_flags_it_needs() -> None:
    command = vllm_command("base", "judge", port=8001, extra=("--seed", "1"))
    assert command[:3] == ["vllm", "serve", "base"]
    # An empty list would let callers make vLLM fetch from every host.
    assert value_of(command, "--allowed-media-domains") == "nothing.invalid"
    assert value_of(command, "--served-model-name") == "judge"
    assert value_of(command, "--host") == "127.0.0.1"
    assert value_of(command, "--port") == "8001"
    assert json.loads(value_of(command, "--limit-mm-per-prompt")) == {"image": 4, "video": 0}
    assert command[-2:] == ["--seed", "1"]
    assert "--enable-lora" not in command
    # The checkpoint's repetition penalty shapes the reasons of a judge in this process too.
    assert "--generation-config" not in command


def test_an_adapter_is_served_beside_its_base(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora")
    command = vllm_command(folder, "paco")
    assert command[:3] == ["vllm", "serve", "base"]
    assert value_of(command, "--served-model-name") == "base"
    assert value_of(command, "--max-lora-rank") == "16"
    assert value_of(command, "--lora-modules") == f"paco={folder}"


@pytest.mark.parametrize(
    ("before", "after"), [(pacorl.EXPANDABLE, None), ("expandable_segments:False", "expandable_segments:False")]
)
def test_vllm_has_not_the_allocator_of_this_package(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str | None
) -> None:
    monkeypatch.setenv(pacorl.ALLOCATOR[0], before)
    assert environment_of("").get(pacorl.ALLOCATOR[0]) == after


def test_this_process_becomes_vllm_and_its_key_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: seen.extend(arguments))
    monkeypatch.setattr(shutil, "which", str)
    run_vllm(vllm_command("base", "judge"), api_key="secret")
    file, command, environment = seen
    assert (file, environment["VLLM_API_KEY"]) == ("vllm", "secret")
    assert "secret" not in command
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(ValueError, match="--backend builtin"):
        run_vllm(vllm_command("base", "judge"))


def test_an_adapter_that_vllm_would_not_apply_is_refused(tmp_path: Path) -> None:
    folder = Path(adapter(tmp_path / "lora", key="base_model.model.visual.blocks.0.attn.qkv.lora_A.weight"))
    for config, weights, named in (
        (None, None, "vision tower"),
        ('{"r": 12, "lora_alpha": 1}', None, "names no base"),
        ('{"r": 1', None, r"adapter_config\.json"),
        (None, b"x", "adapter_model"),
    ):
        if config:
            (folder / "adapter_config.json").write_text(config)
        if weights:
            (folder / "adapter_model.safetensors").write_bytes(weights)
        with pytest.raises(ValueError, match=named):
            vllm_command(str(folder), "paco")
