"""`pacorl serve --backend vllm`: vLLM processes configured for judges, for the lifetime of this process.

One process per endpoint. Signals are passed on; when one server ends, or this process does, none is left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import pacorl
from pacorl.io.children import SAFE_PATH, end_with_parent
from pacorl.io.documents import read_object
from pacorl.io.files import safetensors_errors
from pacorl.io.net import TransientError, blocking, exchange
from pacorl.judge.http.endpoints import Server, root_url
from pacorl.types import TINY, TINY_EDITS

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the sizes that vLLM has kernels for
UNKNOWN_RANK = 64  # of an adapter on the hub, twice the released judge's
NO_HOST = "nothing.invalid"
"""Invalid host by RFC 6761: vLLM reads an empty list of allowed hosts as all hosts."""
GRACE_SECONDS = 20.0
"""Seconds to wait for the end of a server before it is killed."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of vLLM for a judge."""

    dtype: str = "auto"
    max_model_len: int = 8192
    """Tokens of a question and its reasons; two images of 2 megapixels and a long theme fit."""
    images: int = 4
    """Most images of one question."""
    gpus: tuple[str, ...] = ()
    """Device names to share out evenly among the servers (tensor parallel within each); empty: vLLM's own choice."""
    extra: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""


class ServerFailedError(RuntimeError):
    """A server ended by itself, or did not come up."""


def vllm_command(
    server: Server, options: VllmOptions, *, gpus: int = 1, program: Sequence[str] = ("vllm",)
) -> list[str]:
    """Build the command line of one server. Raises ValueError if vLLM would serve an adapter only in part.

    By default vLLM reads the checkpoint's generation_config.json, like a judge in this process: the repetition penalty
    there (1.05 of Qwen2.5-VL) affects the reasons. Requests set every other sampling parameter.
    """
    # The base model and its limits.
    folder = server.checkpoint
    if folder in (TINY, TINY_EDITS):
        from pacorl.judge.local import EMBEDDED  # imports torch, which the launcher does not need otherwise

        folder = str(EMBEDDED[folder])
    command = [*program, "serve", folder]
    command += ["--served-model-name", *(server.names or (server.checkpoint,))]
    command += ["--host", server.host, "--port", str(server.port)]
    command += ["--dtype", options.dtype, "--max-model-len", str(options.max_model_len)]
    command += ["--limit-mm-per-prompt", json.dumps({"image": options.images, "video": 0})]
    # Callers send images in data URLs; vLLM would fetch any URL, even inside this network.
    command += ["--allowed-media-domains", NO_HOST]

    # GPUs and adapters.
    if gpus > 1:
        command += ["--tensor-parallel-size", str(gpus)]
    if server.adapters:
        rank = max(_checked_rank(name, adapter) for name, adapter in server.adapters.items())
        command += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(len(server.adapters))]
        command += ["--lora-modules", *(f"{name}={adapter}" for name, adapter in server.adapters.items())]
    return [*command, *options.extra]


def run_vllm(
    servers: Sequence[Server],
    options: VllmOptions | None = None,
    *,
    api_key: str = "",
    program: Sequence[str] = ("vllm",),
    startup_seconds: float = 1800.0,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Run servers until a signal ends them (returns 128 + its number), or one of them ends.

    Raises ValueError if vLLM is not installed or a port is taken, ServerFailedError if a server ends by itself
    or is not healthy in time; no process is left in any case.
    """
    # Checks.
    options = options or VllmOptions()
    if shutil.which(program[0]) is None:
        raise ValueError(
            f"{program[0]} is not on PATH: install it in an environment of its own (docs/serve.md) and add its bin "
            "folder, or serve with --backend builtin"
        )
    for server in servers:
        _check_port(server)
    if len(options.gpus) % len(servers):
        raise ValueError(f"{len(options.gpus)} GPUs cannot be shared out evenly among {len(servers)} servers")
    each = len(options.gpus) // len(servers)

    # All commands before any process: an invalid adapter must not end servers that started before.
    commands = [vllm_command(server, options, gpus=each, program=program) for server in servers]

    environment = environment_of(api_key)
    with ExitStack() as stack:
        # Start the servers, each with its share of the GPUs.
        caught = stack.enter_context(_signals())
        processes = []
        for number, command in enumerate(commands):
            share = ",".join(options.gpus[number * each : (number + 1) * each])
            devices = {"CUDA_VISIBLE_DEVICES": share} if share else {}
            processes.append(stack.enter_context(_process(command, environment | devices)))

        # Watch them, and report when all are healthy.
        waiting = list(servers)
        deadline = time.monotonic() + startup_seconds
        while not caught:
            _check_alive(servers, processes)
            if waiting:
                waiting = [server for server in waiting if not is_healthy(server)]
                if not waiting and not caught:
                    on_ready()
                elif waiting and time.monotonic() > deadline:
                    raise ServerFailedError(f"{waiting[0].url} was not healthy in time; its log is above")
            time.sleep(0.2)
        return 128 + caught[0]


def environment_of(api_key: str) -> dict[str, str]:
    """Return the environment of the servers, with the key: every user of the machine can read command lines."""
    environment = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"} | os.environ
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if api_key:
        environment["VLLM_API_KEY"] = api_key
    environment |= SAFE_PATH  # vLLM starts further Python processes

    # This package's own setting ends a vLLM of several GPUs at its start: they share memory by cudaIpcGetMemHandle,
    # which refuses expandable segments (vllm-project/vllm#42609).
    if environment.get(pacorl.ALLOCATOR[0]) == pacorl.EXPANDABLE:
        del environment[pacorl.ALLOCATOR[0]]
    return environment


# --- processes -------------------------------------------------------------------------------------------------


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in its own process group, and end the whole group afterwards."""
    # preexec_fn is unsafe while other threads hold locks; the launcher has no threads.
    process = subprocess.Popen(
        command,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509
    )
    try:
        yield process
    finally:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):  # survivors are killed next
            process.wait(GRACE_SECONDS)
        _signal_group(process, signal.SIGKILL)  # its workers, if they outlived it
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # all of it has ended


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals for the end of this process; leaving the block ends the servers."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in PASSED_ON}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- health ----------------------------------------------------------------------------------------------------


def _check_alive(servers: Sequence[Server], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for server, process in zip(servers, processes, strict=True):
        if process.poll() is not None:
            raise ServerFailedError(
                f"the server of {server.url} ended with code {process.returncode}; its log is above"
            )


def is_healthy(server: Server) -> bool:
    """Return whether a server is ready."""
    # "Every address" is one to listen at, and none to connect to.
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host)
    url = root_url(server.url) if host is None else f"http://{host}:{server.port}"
    try:
        return blocking(exchange(f"{url}/health", seconds=5)).status == 200
    except TransientError:
        return False


def _check_port(server: Server) -> None:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family) as probe:
        # As vLLM binds it: a port whose last connections still wait for their end is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            raise ValueError(f"{server.url} cannot be served: {error.strerror}; choose another --port") from None


def _checked_rank(name: str, adapter: str) -> int:
    """Return the rank to reserve for an adapter."""
    from safetensors import safe_open

    # A name of the hub is not read: vLLM loads it, and its rank is unknown here.
    folder = Path(adapter)
    if not folder.is_dir():
        return UNKNOWN_RANK
    try:
        rank = int(read_object(folder / "adapter_config.json")["r"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"adapter {name}: {folder} is no PEFT adapter ({error})") from None

    # vLLM loads an adapter for the vision tower without an error, and does not apply it.
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{weights} is missing; only safetensors are served")
    with safetensors_errors(weights), safe_open(weights, framework="numpy") as tensors:
        keys = list(tensors.keys())
    if vision := [key for key in keys if ".visual." in key]:
        raise ValueError(
            f"adapter {name} changes the vision tower ({vision[0]}), which vLLM would leave out without an error; "
            "merge it into the checkpoint first"
        )

    # vLLM reserves one of a few ranks.
    if rank > LORA_RANKS[-1]:
        raise ValueError(f"adapter {name} has rank {rank}; vLLM serves at most {LORA_RANKS[-1]}: merge it instead")
    return next(size for size in LORA_RANKS if size >= rank)
