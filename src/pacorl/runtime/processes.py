"""Processes: accelerate's devices and ranks, gradients and steps across them, signals, threads.

One process, DDP and FSDP2 run the same loop (configs/launch, docs/running.md), through a `Runtime`.
"""

import gc
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object
from torch import nn
from torch.distributed import DistError
from torch.nn.parallel import DistributedDataParallel

from pacorl.core.devices import to_device
from pacorl.models.adapters import full_tensor, materialize
from pacorl.runtime.stopping import Interrupted, StopSignals

LONGEST_WAIT = 3600.0
"""Seconds that a rank waits for another one, besides the wait for its scores: loading and compiling differ."""
MAX_BAD_STEPS = 10
"""Optimizer steps in a row with gradients that are not finite after which a run stops."""

Outcome = TypeVar("Outcome")
Batch = TypeVar("Batch")


class SharedFault(Exception):
    """Fault of any rank, raised on all ranks."""

    def __init__(self, fault: Exception) -> None:
        super().__init__(fault)
        self.fault = fault


class Runtime:
    """Processes and device of a training loop, for every launcher.

    Raises:
        ValueError: if the launcher's mode cannot train adapters (FSDP 1, DeepSpeed).
    """

    def __init__(self, *, patience: float = 0.0) -> None:
        """
        Args:
            patience: Seconds that a rank may wait for its scores, for which the other ranks wait.
        """
        # 1. Process group. Without an accelerator, accelerate needs `cpu` to connect a launcher's processes.
        on_cpus = "RANK" in os.environ and not torch.accelerator.is_available()
        group = InitProcessGroupKwargs(timeout=timedelta(seconds=LONGEST_WAIT + patience))
        # No autocast: the weights have model.dtype, and sampling and training must round alike.
        self.accelerator = Accelerator(cpu=on_cpus, kwargs_handlers=[group], mixed_precision="no")
        self.device = torch.device(self.accelerator.device)
        # cuDNN's attention has different graphs with and without gradients, so training would not replay sampling. The
        # other backends are chosen by shapes, types and masks.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)

        # 2. This rank among all.
        self.world: int = self.accelerator.num_processes
        self.rank: int = self.accelerator.process_index
        self.is_main: bool = self.accelerator.is_main_process
        self.sharded: bool = self.accelerator.is_fsdp2
        """Whether a forward needs every process, since each holds a share of the weights."""
        self.signals = StopSignals()
        """Signals to this rank; a context manager of the main thread."""

        # 3. Modes that cannot train adapters.
        kind = self.accelerator.distributed_type
        if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED) and not self.sharded:
            raise ValueError(f"{kind.value} does not train adapters here; launch with DDP, or with fsdp_version: 2")

    # --- among processes ---------------------------------------------------------------------------------------

    def gather_rows(self, act: Callable[[], Mapping[int, Any]]) -> dict[int, Any]:
        """Call `act` on every rank, and gather global row → value in the order of rows.

        Raises:
            SharedFault: on every rank, if any of them raised something, so that none waits for ever.
        """
        # If a rank raised before the exchange, the other ranks would hang in it.
        rows: dict[int, Any] = {}
        fault: Exception | None = None
        try:
            rows = dict(act())
        except Exception as error:  # raised below, on every rank
            fault = error
            if self.world > 1:
                try:
                    # Both ways: an exception of several arguments may be pickled, and fail only where it is read.
                    pickle.loads(pickle.dumps(error))
                except Exception:
                    fault = RuntimeError(f"{type(error).__name__}: {error}")
        gathered: dict[int, Any] = {}
        for rows_of_rank, fault_of_rank in self.gather((rows, fault)):
            if fault_of_rank is not None:
                raise SharedFault(fault_of_rank)
            gathered |= rows_of_rank
        return dict(sorted(gathered.items()))

    def gather(self, value: Any) -> list[Any]:
        """Gather each rank's value on every rank."""
        return list(gather_object([value]))

    def on_main(self, act: Callable[..., Outcome], *arguments: Any, **options: Any) -> Outcome:
        """Call `act` on the main process, and return or raise its outcome on every rank."""
        if self.world == 1:
            return act(*arguments, **options)
        try:
            rows = self.gather_rows(lambda: {0: act(*arguments, **options)} if self.is_main else {})
            outcome: Outcome = rows[0]
        except SharedFault as error:
            raise error.fault from None
        return outcome

    def shard(self, batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """Select this rank's share of the batches with their numbers, in turn, as many on each rank.

        Ranks without a batch in the last round repeat the first one, under the number −1: its results are to be thrown
        away.
        """
        numbered = list(enumerate(batches))[self.rank :: self.world]
        if len(numbered) < math.ceil(len(batches) / self.world):
            numbered.append((-1, batches[0]))
        return numbered

    # --- training ----------------------------------------------------------------------------------------------

    def prepare(
        self, transformer: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Hand model and optimizer to the launcher's engine. Afterwards weights may be sharded."""
        # One call for both: FSDP2 swaps the optimizer's parameters for its shards.
        model, stepper = self.accelerator.prepare(transformer, optimizer)
        if isinstance(model, DistributedDataParallel):
            # Training changes no buffers: no collective in a forward.
            model.forward_sync_buffers = False
        return model, stepper

    def unwrap(self, transformer: nn.Module) -> nn.Module:
        """Return the model without the engine's wrapper."""
        model: nn.Module = self.accelerator.unwrap_model(transformer)
        materialize(model)
        return model

    def accumulating(self, transformer: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward: gradients cross processes once per update, with its last backward."""
        # no_sync is untyped, so its type has to be said before it is returned.
        unsynchronised: AbstractContextManager[None] = nullcontext() if last else self.accelerator.no_sync(transformer)
        return unsynchronised

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], *, max_norm: float) -> float:
        """Clip the gradients, step and clear them; return their norm. No rank steps if it is not finite."""
        norm = float(full_tensor(self.accelerator.clip_grad_norm_(parameters, max_norm)))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    # --- stopping ----------------------------------------------------------------------------------------------

    def check_signal(self) -> None:
        """Raise Interrupted if this process has received a signal to stop."""
        if self.signals.told:
            raise Interrupted("told to stop")

    def check_stop(self) -> None:
        """Raise Interrupted on all ranks if any has received a signal to stop. Call it after each batch."""
        stopping = self.signals.told
        if self.world > 1:
            # A launcher's signal reaches ranks at different batches; a rank leaving alone would hang the next
            # collective.
            flag = torch.tensor([stopping], dtype=torch.int32)
            stopping = bool(self.accelerator.reduce(to_device(flag, self.device), "sum"))
        if stopping:
            raise Interrupted("told to stop")


def destroy_process_group() -> bool:
    """Part from the other processes, when nothing refers to a trainer; return whether this is the main one."""
    main = int(os.environ.get("RANK", "0")) == 0
    if torch.distributed.is_initialized():
        # A transformer under DDP holds the group, and with it gloo's threads. Such a thread may hold the last tensor of
        # a finished collective, and aborts the process if the interpreter ends before the tensor is freed.
        gc.collect()
        torch.distributed.destroy_process_group()
    return main


def allow_tf32(*, allowed: bool) -> None:
    """Allow or forbid TF32 products of fp32 matrices on a GPU, of 10 bits, at about eight times the rate."""
    # Not by `fp32_precision`, after which torch's older getters raise, for inductor and users' rewards too.
    torch.set_float32_matmul_precision("high" if allowed else "highest")


@contextmanager
def lost_ranks(rank: int, world: int) -> Iterator[None]:
    """Replace the error of a process group, of which a rank has died or hangs, by a RuntimeError of one line."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no kind of error of its own, and gives the line of its source in every message.
        if world == 1 or not (isinstance(error, DistError) or "gloo" in str(error)):
            raise
        raise RuntimeError(
            f"rank {rank} of {world} has lost another rank, which has ended or stands still; its last line, or the "
            "launcher, names the cause. Then start the same command again with --resume auto"
        ) from error
