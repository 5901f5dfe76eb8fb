from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.twins.parts import tiny_judge, vocabulary
from typer import Exit
from typer.testing import CliRunner, Result

from pacorl import web
from pacorl.cli import app
from pacorl.judge import identity_at
from pacorl.serve import server, vllm

CALLS = dict[str, Any]


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("served") / "judge"
    for part in tiny_judge(vocabulary()):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> CALLS:
    """What would be served, instead of serving it."""
    seen: CALLS = {}
    monkeypatch.setattr(server, "create_app", lambda name, judge, **options: seen.update(options, name=name))

    monkeypatch.setattr(web, "run", lambda app, listener: seen.update(address=listener.getsockname()))

    def run_vllm(command: list[str], **options: Any) -> None:
        seen.update(options, command=command)
        raise Exit

    monkeypatch.setattr(vllm, "run_vllm", run_vllm)
    monkeypatch.delenv("PACORL_API_KEY", raising=False)
    return seen


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_built_in_server_gets_a_judge_and_its_address(calls: CALLS, judge_folder: Path) -> None:
    result = run("serve", judge_folder, "--name", "mine", "--port", 9001)
    assert result.exit_code == 0, result.output
    assert (calls["name"], calls["identity"]) == ("mine", identity_at(str(judge_folder)))
    assert calls["address"] == ("127.0.0.1", 9001)
    assert "serving mine at http://127.0.0.1:9001/v1" in result.stderr


def test_vllm_gets_what_follows_the_dashes(calls: CALLS) -> None:
    command = ("serve", "org/Base-7B", "--backend", "vllm", "--api-key", "secret", "--port", 8001)
    result = run(*command, "--", "--seed", "1")
    assert result.exit_code == 0, result.output
    assert calls["command"] == vllm.vllm_command("org/Base-7B", "Base-7B", port=8001, extra=["--seed", "1"])
    assert calls["api_key"] == "secret"


@pytest.mark.parametrize("backend", ["builtin", "vllm"])
@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_starts_no_server(
    calls: CALLS, judge_folder: Path, backend: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("serve", judge_folder, "--backend", backend)
    assert "the key is empty" in str(run(*command, "--api-key", key).exception)
    monkeypatch.setenv("PACORL_API_KEY", key)
    assert "PACORL_API_KEY a value, or unset it" in str(run(*command).exception)
    assert calls == {}


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        ("studio", "pacorl.studio.server", "studio"),
        ("serve tiny", "pacorl.serve.server", "serve"),
        ("dataset annotate x", "pacorl.annotate.server", "data"),
    ],
)
def test_an_extra_that_is_missing_is_named(
    words: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (module, "pacorl.web"):
        package, _, leaf = name.rpartition(".")
        monkeypatch.delitem(sys.modules, name, raising=False)
        # `from package import leaf` reads it.
        monkeypatch.delattr(importlib.import_module(package), leaf, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert str(run(*words.split()).exception).endswith(f"needs uvicorn: pip install 'pacorl[{extra}]'")
