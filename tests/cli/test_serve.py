from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.twins.parts import tiny_judge
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.io.versions import install_command
from pacorl.judge.http.endpoints import load_endpoints
from pacorl.serve import builtin, vllm
from pacorl.tiny.characters import vocabulary

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
    monkeypatch.setattr(builtin, "run_builtin", lambda judges, **options: seen.update(options, judges=judges))

    def run_vllm(servers: Any, options: Any, **others: Any) -> int:
        seen.update(others, servers=servers, options=options)
        return 143

    monkeypatch.setattr(vllm, "run_vllm", run_vllm)
    monkeypatch.delenv("PACORL_API_KEY", raising=False)
    return seen


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_built_in_server_gets_judges_and_limits(calls: CALLS, judge_folder: Path) -> None:
    result = run("serve", judge_folder, "--name", "mine", "--port", 9001, "--max-images", 3, "--max-body-mib", 2)
    assert not calls["access_log"]
    assert result.exit_code == 0, result.output
    assert list(calls["judges"]) == ["mine"]
    assert (calls["host"], calls["port"]) == ("127.0.0.1", 9001)
    assert (calls["limits"].images, calls["limits"].body_bytes) == (3, 2 * 2**20)
    assert "serving mine at http://127.0.0.1:9001/v1" in result.stderr


@pytest.mark.slow
def test_vllm_gets_what_follows_the_dashes(calls: CALLS, tmp_path: Path) -> None:
    path = tmp_path / "judges.yaml"
    result = run(
        *("serve", "org/Base-7B", "--backend", "vllm", "--adapter", "paco=org/lora", "--replicas", 2),
        *("--gpus", "0,1", "--api-key", "secret", "--write", path, "--", "--seed", "1"),
    )
    assert result.exit_code == 143, result.output
    assert [server.port for server in calls["servers"]] == [8000, 8001]
    assert (calls["options"].gpus, calls["options"].extra) == (("0", "1"), ("--seed", "1"))
    assert calls["api_key"] == "secret"
    assert "secret" not in path.read_text()
    assert load_endpoints(path).api_key_env == "PACORL_API_KEY"
    assert load_endpoints(path).named("paco").adapter == "org/lora"


def test_a_description_starts_its_own_servers(calls: CALLS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "judges.yaml"
    path.write_text("api_key_env: MY_KEY\njudges: [{name: a, checkpoint: x, endpoints: ['http://127.0.0.1:7000']}]")
    assert "MY_KEY" in str(run("serve", path, "--backend", "vllm").exception)
    monkeypatch.setenv("MY_KEY", "hidden")
    run("serve", path, "--backend", "vllm")
    assert (calls["servers"][0].names, calls["api_key"]) == (("a",), "hidden")
    assert "leave --name" in str(run("serve", path, "--name", "b").exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "--backend", "ray"), "neither vllm nor builtin"),
        (("x", "--replicas", "2"), "2 are described"),
        (("x", "--adapter", "lora"), "NAME=FOLDER"),
        (("x", "--", "--seed", "1"), "--seed 1 would be for vLLM"),
        (("x", "--calibration", "c.json", "--backend", "vllm"), "needs --backend builtin and no --adapter"),
        (("x", "--calibration", "c.json", "--adapter", "a=lora"), "needs --backend builtin and no --adapter"),
    ],
)
def test_what_cannot_be_served_is_named(calls: CALLS, arguments: tuple[str, ...], message: str) -> None:
    assert message in str(run("serve", *arguments).exception)
    assert calls == {}


def test_an_open_server_without_a_key_is_warned_about(calls: CALLS) -> None:
    assert "asks for no key" in run("serve", "x", "--backend", "vllm", "--host", "0.0.0.0").stderr
    assert "asks for no key" not in run("serve", "x", "--backend", "vllm", "--host", "0.0.0.0", "--api-key", "k").stderr


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
    ("command", "module", "what", "extra"),
    [
        (["studio"], "pacorl.studio.server", "the studio", "serve"),
        (["serve", "tiny"], "pacorl.serve.builtin", "the built-in server", "serve"),
        (["dataset", "annotate", "x"], "pacorl.studio.annotate.routes", "the annotation page", "data"),
    ],
)
def test_an_extra_that_is_missing_is_named(
    command: list[str], module: str, what: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (module, "pacorl.web.site"):
        package, _, leaf = name.rpartition(".")
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(
            importlib.import_module(package), leaf, raising=False
        )  # `from package import leaf` reads it
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ValueError)
    assert str(result.exception) == f"{what} needs uvicorn: {install_command(extra)}"


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_key_file_is_read_again_at_sighup(
    calls: CALLS, judge_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    path = tmp_path / "keys"
    path.write_text("# ours\nold\n\nnew\n")
    result = run("serve", judge_folder, "--api-key-file", path, "--host", "0.0.0.0", "--write", tmp_path / "j.yaml")
    assert result.exit_code == 0, result.output
    assert "asks for no key" not in result.stderr
    assert load_endpoints(tmp_path / "j.yaml").api_key_env == "PACORL_API_KEY"
    keys = calls["api_key"]
    assert keys == ["old", "new"]

    # A file without a key must not open the server.
    path.write_text("\n")
    handlers[signal.SIGHUP]()
    assert keys == ["old", "new"]
    assert "the earlier keys stay" in capfd.readouterr().err
    path.write_text("new\nof ci, do not remove\n")  # its words would be keys
    handlers[signal.SIGHUP]()
    assert keys == ["old", "new"]
    assert f"{path}, line 2: a key has no spaces" in capfd.readouterr().err
    path.write_text("new\n")
    handlers[signal.SIGHUP]()
    assert keys == ["new"]

    # The unit of docs/serve.md empties the variable.
    monkeypatch.setenv("PACORL_API_KEY", "")
    assert run("serve", judge_folder, "--api-key-file", path).exit_code == 0
    monkeypatch.delenv("PACORL_API_KEY")

    # Without a file a SIGHUP does not end the server.
    handlers.clear()
    assert run("serve", judge_folder).exit_code == 0
    handlers[signal.SIGHUP]()
    assert "no --api-key-file" in capfd.readouterr().err

    path.write_text("")
    assert "has no key" in str(run("serve", judge_folder, "--api-key-file", path).exception)
    for further in (("--api-key", "secret"), ("--backend", "vllm")):
        refused = run("serve", judge_folder, "--api-key-file", path, *further)
        assert "--api-key-file is for --backend builtin" in str(refused.exception)
