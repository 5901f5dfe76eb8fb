"""Checkpoints that outlive kills and full disks: random generators, an optimizer's state, and folders that are whole
whenever they carry a name."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pacorl.io.documents import read_json, read_object, write_json
from pacorl.io.files import flush_to_disk
from pacorl.io.weights import safetensors_errors
from pacorl.lora.shards import full_tensor, shard_like

CHECKPOINT = re.compile(r"step-(\d{6,})")


# --- states ----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """This process's random generators, as JSON takes them."""
    version, words, spare = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    keys = {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}}
    state = {
        "python": [version, list(words), spare],
        "numpy": keys,
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Undoes what was drawn since `random_state`."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Tensor]:
    """An optimizer's state by the names of its parameters: `exp_avg/NAME`; whole, whatever the sharding.

    Every process must call it.
    """
    state = optimizer.state_dict()["state"]
    return {
        f"{kind}/{name}": full_tensor(value)
        for number, name in enumerate(names)
        for kind, value in state.get(number, {}).items()
    }


def set_optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` gave, cut as the parameters `named` are now.

    Raises ValueError where the state is of other parameters.
    """
    state: dict[int, dict[str, Tensor]] = {}
    numbers = {name: number for number, name in enumerate(named)}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in numbers:
            raise ValueError(f"the optimizer's state is of a weight that this run does not train: {name}")
        fitting = shard_like(named[name], value) if value.dim() else value
        state.setdefault(numbers[name], {})[kind] = fitting
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


# --- checkpoints -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint's folder holds."""

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    generators: list[dict[str, Any]]
    """The random state of each rank."""


def aside_of(target: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return target.with_name(f".{target.name}.partial")


def open_aside(target: Path) -> Path:
    """An empty folder to write `target` into."""
    aside = aside_of(target)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def put_in_place(target: Path) -> None:
    """Gives what lies aside its name, so that a folder that has the name is whole, whatever happens meanwhile."""
    aside, replaced = aside_of(target), target.with_name(f".{target.name}.replaced")
    _reach_the_disk(aside)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    aside.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _reach_the_disk(folder: Path) -> None:
    """Waits until files and names are on the disk: a rename may otherwise outlive what it names (a power cut)."""
    for path in [*folder.rglob("*"), folder]:
        flush_to_disk(path)


def write_checkpoint(
    target: Path,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    generators: Sequence[Mapping[str, Any]],
    export: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes a checkpoint into its folder aside (`open_aside`) and gives it its name.

    `export` writes what else belongs to it. Raises OSError with the fix where the disk is full; earlier checkpoints
    stay as they were.
    """
    aside = aside_of(target)
    try:
        for name, part in tensors.items():
            save_file({key: value.contiguous().cpu() for key, value in part.items()}, aside / f"{name}.safetensors")
        write_json(aside / "generators.json", list(generators), indent=None)
        write_json(aside / "state.json", state)
        export(aside)
        put_in_place(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(
            f"checkpoint {target} could not be written ({reason}); earlier checkpoints are untouched, "
            "make room and go on with --resume auto"
        ) from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises ValueError where the folder is none, or damaged.
    """
    if not (path / "state.json").is_file():
        raise ValueError(f"{path} is not a checkpoint (no state.json)")
    with safetensors_errors(path):
        tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return Checkpoint(
        path=path,
        tensors=tensors,
        state=read_object(path / "state.json"),
        generators=read_json(path / "generators.json"),
    )


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted((path for path in folder.glob("step-*") if CHECKPOINT.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def recover(folder: Path) -> None:
    """Puts back a checkpoint that a kill found between two names, and clears what was left half done."""
    for replaced in folder.glob(".step-*.replaced"):
        target = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not target.exists():
            replaced.rename(target)
    for rest in folder.glob(".step-*"):
        shutil.rmtree(rest, ignore_errors=True)


def prune(folder: Path, *, keep: int, newest: int, best: Path | None = None) -> None:
    """Deletes all but the newest `keep` and the `best`, and those beyond step `newest`, which a run that went back
    has given up."""
    past = [path for path in checkpoints(folder) if _step_of(path) <= newest]
    for path in checkpoints(folder):
        if path not in past[-keep:] and path != best:
            # Half a checkpoint must not carry the name of one.
            doomed = path.with_name(f".{path.name}.deleted")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
