"""Runs a function in several processes that talk over gloo, as a launcher would start them.

A server imports the heavy libraries once and forks every process from there, so that a world costs seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml
from ports import free_port

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "pacorl.grpo.trainer",
        "tests.twins",
        "accelerate",
        "peft",
        "diffusers.pipelines.flux.pipeline_flux",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    ]
)


def fsdp2() -> dict[str, str]:
    """What `accelerate launch --config_file configs/launch/fsdp2.yaml` hands to its processes."""
    document = yaml.safe_load((Path(__file__).parents[2] / "configs" / "launch" / "fsdp2.yaml").read_text())
    return {"ACCELERATE_USE_FSDP": "true"} | {
        name.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in document["fsdp_config"].items()
    }


def start(
    function: Callable[..., None], *args: Any, world: int = 1, extra: Mapping[str, str] = {}
) -> list[BaseProcess]:
    """Starts `function(*args)` in `world` processes."""
    port = free_port()
    processes = []
    for rank in range(world):
        variables = {"OMP_NUM_THREADS": "1", **(extra or {})}
        if world > 1:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            variables |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process = SERVER.Process(target=_enter, args=(function, args, variables))
        process.start()
        processes.append(process)
    return processes


def run(function: Callable[..., None], *args: Any, world: int = 1, extra: Mapping[str, str] | None = None) -> None:
    """Runs `function(*args)` in `world` processes to their end. Raises AssertionError where one of them failed."""
    processes = start(function, *args, world=world, extra=extra)
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world, f"exit codes {codes}"


def wait_for(event: Callable[[], bool], processes: Sequence[BaseProcess], *, seconds: float = 300) -> None:
    """Waits until the event has come. Raises AssertionError where the processes end before, or it takes too long."""
    started = time.monotonic()
    while not event():
        assert all(process.is_alive() for process in processes), "a process ended too early"
        assert time.monotonic() - started < seconds, "it took too long"
        time.sleep(0.05)


def _enter(function: Callable[..., None], args: tuple[Any, ...], variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    if "ACCELERATE_USE_FSDP" in variables:
        _let_accelerate_shard_on_cpus()
    function(*args)


def _let_accelerate_shard_on_cpus() -> None:
    """accelerate reads its FSDP settings on accelerators only; torch shards over gloo as well. All else is its own."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    initialise = AcceleratorState.__init__

    def and_shard(state, *args, **rest):  # type: ignore[no-untyped-def]
        fresh = not AcceleratorState._shared_state
        initialise(state, *args, **rest)
        if fresh:
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin()

    AcceleratorState.__init__ = and_shard
