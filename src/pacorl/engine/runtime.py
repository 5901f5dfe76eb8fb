"""Processes and survival: accelerate's devices and ranks, gradients and steps across them, checkpoints, signals.

One process, DDP, FSDP2 and DeepSpeed ZeRO-1/2 serve alike (configs/launch, docs/scaling.md): a loop asks a `Runtime`
and never learns which it is.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pacorl.io.documents import read_json, read_object, write_json
from pacorl.io.files import flush_to_disk
from pacorl.io.weights import safetensors_errors
from pacorl.lora.shards import full_tensor, materialize, shard_like

CHECKPOINT = re.compile(r"step-(\d{6,})")

REPEATED_SIGNAL = 3.0
"""Seconds within which a second signal is a launcher passing on the first, which a terminal sent to everyone."""

Result = TypeVar("Result")
Part = TypeVar("Part")


class Interrupted(RuntimeError):
    """The run was asked to stop."""


class SharedFault(Exception):
    """Some rank raised `fault`, and every rank knows."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(fault)
        self.fault = fault


class Runtime:
    """What a loop needs of the machine, whatever the number of processes.

    Raises ValueError where the launcher asks for what adapters cannot be trained with (FSDP 1, ZeRO-3).
    """

    def __init__(self) -> None:
        # A launcher's processes without an accelerator would each be alone: accelerate has to be told of CPUs, and,
        # for DeepSpeed, which it would leave out then, of how they talk.
        on_cpus = "RANK" in os.environ and not torch.accelerator.is_available()
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        # model.dtype says what the weights are; autocast on top of it would part sampling from training.
        self.accelerator = Accelerator(
            cpu=on_cpus and not deepspeed,
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpus and deepspeed else None,
            mixed_precision="no",
        )
        self._asked_at: float | None = None
        self._refuse_unsupported()

    def _refuse_unsupported(self) -> None:
        if self.accelerator.distributed_type == DistributedType.FSDP and not self.sharded:
            raise ValueError("FSDP 1 cannot hold frozen and trained weights together; set fsdp_version: 2")
        plugin = self.accelerator.state.deepspeed_plugin if self.deepspeed else None
        if plugin is not None and plugin.zero_stage > 2:
            raise ValueError(f"DeepSpeed ZeRO stage {plugin.zero_stage} is not supported; use stage 2, or FSDP2")

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def sharded(self) -> bool:
        """Whether a forward needs every process, since each holds a share of the weights (FSDP2)."""
        return bool(self.accelerator.is_fsdp2)

    @property
    def deepspeed(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    # --- among processes ---------------------------------------------------------------------------------------

    def gather_rows(self, act: Callable[[], Mapping[int, Any]]) -> dict[int, Any]:
        """Every rank acts; global row → value from every rank, on every rank, in the order of rows.

        Raises SharedFault, on every rank, where any of them raised something, so that none waits for ever.
        """
        own: dict[int, Any] = {}
        fault: Exception | None = None
        try:
            own = dict(act())
        except Exception as error:  # raised below, on every rank
            fault = error if self.world == 1 else _portable(error)
        outcomes = self.gather((own, fault))
        if fault := next((fault for _, fault in outcomes if fault is not None), None):
            raise SharedFault(fault)
        return dict(sorted(item for part, _ in outcomes for item in part.items()))

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, on every rank."""
        return list(gather_object([value]))

    def broadcast(self, value: Any) -> Any:
        """The main process's value, on every rank."""
        return broadcast_object_list([value])[0]

    def on_main(self, act: Callable[[], Result]) -> Result:
        """The main process acts; what it returns or raises reaches every rank, so that none waits for ever."""
        if self.world == 1:
            return act()
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_main:
            try:
                outcome = (act(), None)
            except Exception as error:  # raised below, on every rank
                outcome = (None, _portable(error))
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def shard(self, parts: Sequence[Part]) -> list[tuple[int, Part]]:
        """This rank's share of numbered parts, taken in turn; the last round may be uneven.

        Where a forward needs every process, ranks without a part in the last round repeat the first one, under the
        number −1: its results are to be thrown away.
        """
        own = list(enumerate(parts))[self.rank :: self.world]
        if self.sharded and len(own) < self.rounds(len(parts)):
            own.append((-1, parts[0]))
        return own

    def rounds(self, parts: int) -> int:
        """How many parts the busiest rank is dealt."""
        return math.ceil(parts / self.world)

    # --- training ----------------------------------------------------------------------------------------------

    def prepare(
        self, transformer: nn.Module, optimizer: torch.optim.Optimizer, *, batch: int, max_norm: float
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Hands model and optimizer to the launcher's engine. Afterwards weights may be sharded."""
        if self.deepspeed:
            # What accelerate would read from a data loader, of which there is none.
            engine = self.accelerator.state.deepspeed_plugin.deepspeed_config
            engine |= {"train_micro_batch_size_per_gpu": batch, "gradient_clipping": max_norm}
        model, stepper = self.accelerator.prepare(transformer, optimizer)
        if isinstance(model, DistributedDataParallel):
            # Training changes no buffers, and evaluation's last round may be uneven: a forward must wait for nobody.
            model.forward_sync_buffers = False
        return model, stepper

    def unwrap(self, transformer: nn.Module) -> nn.Module:
        """The model without the engine's wrapper, its weights in place."""
        model: nn.Module = self.accelerator.unwrap_model(transformer)
        materialize(model)
        return model

    def accumulating(self, transformer: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward: gradients cross processes once per update, with its last backward."""
        waiting: AbstractContextManager[None] = nullcontext() if last else self.accelerator.no_sync(transformer)
        return waiting

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds to the gradients. With the `last` backward of an update DeepSpeed clips and steps too."""
        if self.deepspeed:
            self.accelerator.deepspeed_engine_wrapped.backward(loss, sync_gradients=last)
        else:
            self.accelerator.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], *, max_norm: float) -> float:
        """Clips, steps and forgets the gradients; returns their norm before clipping.

        Where the norm is not finite nothing is stepped, on all ranks alike.
        """
        norm = self.accelerator.clip_grad_norm_(parameters, max_norm)
        value = float(full_tensor(norm) if isinstance(norm, Tensor) else norm)
        if math.isfinite(value):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    # --- stopping ----------------------------------------------------------------------------------------------

    def check_stop(self) -> None:
        """Raises Interrupted, on all ranks alike, where any of them was told to stop."""
        flag = torch.tensor([self._asked_at is not None], device=self.device, dtype=torch.int32)
        if self.accelerator.reduce(flag, "sum").item():
            raise Interrupted("told to stop")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Within the block SIGTERM and SIGINT ask for a stop instead of dying; another one, later, kills."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self._asked_at is None:
                self._asked_at = time.monotonic()
            elif time.monotonic() - self._asked_at > REPEATED_SIGNAL:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _portable(error: Exception) -> Exception:
    """The error as other processes can read it: not each survives pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def destroy_process_group() -> bool:
    """Part from the other processes, when all is done.

    Returns:
        Whether this is the main one.
    """
    main = int(os.environ.get("RANK", "0")) == 0
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return main


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
