from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import pacorl
from pacorl.config.base import ConfigError, dump
from pacorl.io.files import write_atomic
from pacorl.judge.http.endpoints import (
    Endpoints,
    Server,
    describe,
    is_loopback,
    load_endpoints,
    servers_of,
)
from pacorl.serve import vllm
from pacorl.serve.vllm import ServerFailedError, VllmOptions, run_vllm, vllm_command

FAKE = Path(__file__).with_name("fake_vllm.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(port: int | None = None, **fields: Any) -> Server:
    url = f"http://127.0.0.1:{port or free_port()}/v1"
    return Server(**({"url": url, "checkpoint": "base", "names": ("judge",), "adapters": {}} | fields))


def program(trouble: str, folder: Path) -> tuple[str, ...]:
    return sys.executable, str(FAKE), trouble, str(folder)


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_gone(folder: Path, *, processes: int) -> None:
    pids = [pid for note in notes(folder) for pid in note["pids"]]
    assert len(pids) == processes
    deadline = time.monotonic() + 120
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


def adapter(folder: Path, *, rank: int = 12, key: str = "base_model.model.language_model.q.lora_A.weight") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    save_file({key: np.zeros((rank, 2), np.float32)}, folder / "adapter_model.safetensors")
    return str(folder)


# --- command lines ---------------------------------------------------------------------------------------------


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_judge_gets_the_flags_it_needs() -> None:
    command = vllm_command(server(8001), VllmOptions(images=2, extra=("--seed", "1")), gpus=2)
    assert command[:3] == ["vllm", "serve", "base"]
    assert value_of(command, "--served-model-name") == "judge"
    assert value_of(command, "--host") == "127.0.0.1"
    assert value_of(command, "--port") == "8001"
    assert json.loads(value_of(command, "--limit-mm-per-prompt")) == {"image": 2, "video": 0}
    assert value_of(command, "--tensor-parallel-size") == "2"
    assert command[-2:] == ["--seed", "1"]
    assert "--enable-lora" not in command


def test_vllm_reads_the_checkpoints_own_generation_config() -> None:
    """Its repetition penalty shapes the reasons of a judge in this process too."""
    assert "--generation-config" not in vllm_command(server(8001), VllmOptions())


def test_callers_make_vllm_fetch_nothing_unless_its_user_allows_a_host() -> None:
    command = vllm_command(server(8001), VllmOptions(extra=("--allowed-media-domains", "images.example")))
    allowed = [number for number, word in enumerate(command) if word == "--allowed-media-domains"]
    # An empty list would allow every host.
    assert [command[number + 1] for number in allowed] == ["nothing.invalid", "images.example"]
    assert command[allowed[0] + 2].startswith("--")


def test_adapters_are_served_beside_their_base(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora")
    command = vllm_command(server(names=(), adapters={"paco": folder, "hub": "org/lora"}), VllmOptions())
    assert value_of(command, "--served-model-name") == "base"
    assert value_of(command, "--max-lora-rank") == "64"
    at = command.index("--lora-modules")
    assert command[at + 1 : at + 3] == [f"paco={folder}", "hub=org/lora"]
    assert value_of(vllm_command(server(adapters={"paco": folder}), VllmOptions()), "--max-lora-rank") == "16"


@pytest.mark.parametrize(("before", "after"), [({}, "0"), ({"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "1"}, "1")])
def test_vllm_follows_no_redirect_unless_its_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: str
) -> None:
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ServerFailedError):
        run_vllm([server()], program=program("dies", tmp_path))
    assert [note["environment"]["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] for note in notes(tmp_path)] == [after]


@pytest.mark.parametrize(
    ("setting", "passed_on"),
    [(pacorl.EXPANDABLE, None), ("expandable_segments:False", "expandable_segments:False"), (None, None)],
)
def test_vllm_s_allocator_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, passed_on: str | None
) -> None:
    """With expandable segments, this package's own setting, vLLM ends at its start with several GPUs."""
    name = pacorl.ALLOCATOR[0]
    monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv(name, setting)
    with pytest.raises(ServerFailedError):
        run_vllm([server()], program=program("dies", tmp_path))
    assert [note["environment"].get(name) for note in notes(tmp_path)] == [passed_on]


def test_an_adapter_of_the_vision_tower_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", key="base_model.model.visual.blocks.0.attn.qkv.lora_A.weight")
    with pytest.raises(ValueError, match="changes the vision tower"):
        vllm_command(server(adapters={"paco": folder}), VllmOptions())


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no PEFT adapter"):
        vllm_command(server(adapters={"paco": str(tmp_path)}), VllmOptions())
    folder = Path(adapter(tmp_path / "lora"))
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: its weights are damaged"):
        vllm_command(server(adapters={"paco": str(folder)}), VllmOptions())
    (folder / "adapter_config.json").write_text('{"r": [1]}')
    with pytest.raises(ValueError, match="no PEFT adapter"):
        vllm_command(server(adapters={"paco": str(folder)}), VllmOptions())


# --- descriptions ----------------------------------------------------------------------------------------------


def test_a_command_line_is_described_and_read_back(tmp_path: Path) -> None:
    description = describe("org/Base-7B", adapters=["paco=org/lora"], replicas=2, port=9000, api_key_env="KEY")
    write_atomic(tmp_path / "judges.yaml", dump(description))
    assert load_endpoints(tmp_path / "judges.yaml") == description
    first, second = servers_of(description)
    assert (first.port, second.port, first.host) == (9000, 9001, "127.0.0.1")
    assert (first.names, first.adapters) == (("Base-7B",), {"paco": "org/lora"})


def test_a_judge_without_a_checkpoint_cannot_be_started() -> None:
    description = Endpoints.model_validate({"judges": [{"name": "a", "endpoints": ["http://h:1"]}]})
    with pytest.raises(ConfigError, match="'a' names no checkpoint"):
        servers_of(description)


def test_an_adapter_needs_a_name() -> None:
    with pytest.raises(ValueError, match="NAME=FOLDER"):
        describe("base", adapters=["folder"])


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_loopback(host: str, alone: bool) -> None:
    assert is_loopback(host) == alone


# --- processes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_server_and_worker(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    code = run_vllm(
        [server(), server()],
        VllmOptions(gpus=("4", "5", "6", "7")),
        api_key="secret",
        program=program("none", tmp_path),
        on_ready=lambda: os.kill(os.getpid(), number),
    )
    assert code == 128 + number
    assert signal.getsignal(number) is before
    assert_gone(tmp_path, processes=4)
    seen = notes(tmp_path)
    assert sorted(note["environment"]["CUDA_VISIBLE_DEVICES"] for note in seen) == ["4,5", "6,7"]
    assert all(note["environment"]["VLLM_API_KEY"] == "secret" for note in seen)
    assert all("secret" not in note["arguments"] for note in seen)


def test_a_stubborn_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "GRACE_SECONDS", 0.2)
    run_vllm([server()], program=program("stubborn", tmp_path), on_ready=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert_gone(tmp_path, processes=2)


@pytest.mark.parametrize(
    ("trouble", "seconds", "message"),
    [("dies", 60, "ended with code 3"), ("never-healthy", 0.5, "not healthy in time")],
)
def test_a_server_that_fails_takes_its_workers_along(
    tmp_path: Path, trouble: str, seconds: float, message: str
) -> None:
    def noted() -> Callable[[], None]:
        return lambda: pytest.fail("it is not ready")

    with pytest.raises(ServerFailedError, match=message):
        run_vllm([server()], program=program(trouble, tmp_path), startup_seconds=seconds, on_ready=noted())
    if notes(tmp_path):  # it may have been too slow to begin
        assert_gone(tmp_path, processes=2)


@pytest.mark.slow
def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    script = (
        "import sys; from pacorl.judge.http.endpoints import Server; from pacorl.serve.vllm import run_vllm\n"
        f"server = Server('http://127.0.0.1:{port}/v1', 'base', ('judge',), {{}})\n"
        f"run_vllm([server], program={program('none', tmp_path)!r}, on_ready=lambda: print('ready', flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
    leader, worker = notes(tmp_path)[0]["pids"]
    deadline = time.monotonic() + 120
    while alive(leader) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(leader)
    os.kill(worker, signal.SIGKILL)  # the stand-in does not end its worker on SIGTERM, as vLLM does


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="choose another --port"):
            run_vllm([server(taken.getsockname()[1])], program=program("none", tmp_path))


def test_a_missing_vllm_is_named() -> None:
    with pytest.raises(ValueError, match="--backend builtin"):
        run_vllm([server()], program=("no-such-vllm",))


def test_gpus_are_shared_out_evenly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 GPUs cannot be shared out evenly among 2 servers"):
        run_vllm([server(), server()], VllmOptions(gpus=("0", "1", "2")), program=program("none", tmp_path))
