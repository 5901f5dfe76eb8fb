"""Processes: accelerate's devices and ranks, gradients and steps across them, signals.

One process, DDP, FSDP2 and DeepSpeed ZeRO-1/2 serve alike (configs/launch, docs/scaling.md): a loop asks a `Runtime`
and never learns which it is.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pacorl.lora.shards import full_tensor, materialize

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
