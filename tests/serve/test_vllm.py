"""The vLLM that `pacorl serve --backend vllm` becomes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import pacorl
from pacorl.io.net import is_loopback
from pacorl.serve.vllm import Served, environment_of, run_vllm, vllm_command


def adapter(folder: Path, *, rank: int = 12, key: str = "base_model.model.language_model.q.lora_A.weight") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "base_model_name_or_path": "base"}))
    save_file({key: np.zeros((rank, 2), np.float32)}, folder / "adapter_model.safetensors")
    return str(folder)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_judge_gets_the_flags_it_needs() -> None:
    command = vllm_command(Served("base", "judge", port=8001), extra=("--seed", "1"))
    assert command[:3] == ["vllm", "serve", "base"]
    assert value_of(command, "--served-model-name") == "judge"
    assert value_of(command, "--host") == "127.0.0.1"
    assert value_of(command, "--port") == "8001"
    assert json.loads(value_of(command, "--limit-mm-per-prompt")) == {"image": 4, "video": 0}
    assert command[-2:] == ["--seed", "1"]
    assert "--enable-lora" not in command
    # The checkpoint's repetition penalty shapes the reasons of a judge in this process too.
    assert "--generation-config" not in command


def test_callers_make_vllm_fetch_nothing_unless_its_user_allows_a_host() -> None:
    command = vllm_command(Served("base", "judge"), extra=("--allowed-media-domains", "images.example"))
    allowed = [number for number, word in enumerate(command) if word == "--allowed-media-domains"]
    # An empty list would allow every host.
    assert [command[number + 1] for number in allowed] == ["nothing.invalid", "images.example"]
    assert command[allowed[0] + 2].startswith("--")


def test_an_adapter_is_served_beside_its_base(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora")
    command = vllm_command(Served(folder, "paco"))
    assert command[:3] == ["vllm", "serve", "base"]
    assert value_of(command, "--served-model-name") == "base"
    assert value_of(command, "--max-lora-rank") == "16"
    assert value_of(command, "--lora-modules") == f"paco={folder}"


@pytest.mark.parametrize(("before", "after"), [({}, "0"), ({"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "1"}, "1")])
def test_vllm_follows_no_redirect_unless_its_user_says_so(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: str
) -> None:
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    assert environment_of("")["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == after


@pytest.mark.parametrize(
    ("setting", "passed_on"),
    [(pacorl.EXPANDABLE, None), ("expandable_segments:False", "expandable_segments:False"), (None, None)],
)
def test_vllm_s_allocator_is_its_own(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, passed_on: str | None
) -> None:
    """With expandable segments, this package's own setting, vLLM ends at its start with several GPUs."""
    name = pacorl.ALLOCATOR[0]
    monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv(name, setting)
    assert environment_of("").get(name) == passed_on


def test_this_process_becomes_vllm_and_its_key_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def execvpe(file: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        seen.append((file, command, environment))

    monkeypatch.setattr(os, "execvpe", execvpe)
    run_vllm(Served("base", "judge"), api_key="secret", program=("true",))
    ((file, command, environment),) = seen
    assert file == "true"
    assert environment["VLLM_API_KEY"] == "secret"
    assert "secret" not in command


def test_an_adapter_that_vllm_would_not_apply_is_refused(tmp_path: Path) -> None:
    folder = Path(adapter(tmp_path / "lora", key="base_model.model.visual.blocks.0.attn.qkv.lora_A.weight"))
    for config, weights, named in (
        (None, None, "vision tower"),
        (None, b"x", "adapter_model"),
        ('{"r": [1], "base_model_name_or_path": "base"}', None, "PEFT"),
        ('{"r": 1}', None, "base"),
    ):
        if config:
            (folder / "adapter_config.json").write_text(config)
        if weights:
            (folder / "adapter_model.safetensors").write_bytes(weights)
        with pytest.raises(ValueError, match=named):
            vllm_command(Served(str(folder), "paco"))


def test_a_missing_vllm_is_named() -> None:
    with pytest.raises(ValueError, match="--backend builtin"):
        run_vllm(Served("base", "judge"), program=("no-such-vllm",))


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_loopback(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone
