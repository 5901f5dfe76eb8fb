"""A model of a few weights with adapters, trained for a few steps by a `Runtime`: what engines must agree on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

WIDTH = 7  # divides by nothing, so shards are uneven


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A = nn.Linear(WIDTH, 3, bias=False)
        self.lora_B = nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.lora_B(self.lora_A(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Adapted(), Adapted())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.last = Adapted()  # outside the blocks: FSDP2's root, which stays gathered after a forward

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


def train(out: Path) -> None:
    """Three steps with sampling between them; state is saved, spoilt and put back; one more forward."""
    from pacorl.grpo.lora_training import optimizer_tensors, set_optimizer_tensors
    from pacorl.models.adapters import MovingAverage, adapter_state, full_state, set_adapter_state
    from pacorl.runtime.processes import Runtime

    torch.manual_seed(0)
    machine, model = Runtime(), Model()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    model, optimizer = machine.prepare(model, optimizer)
    average = MovingAverage(machine.unwrap(model), decay=0.5)
    batches, norms = [torch.randn(2, WIDTH) for _ in range(4)], []
    for step in range(3):
        own = [batch for _, batch in machine.shard(batches)]
        with torch.no_grad(), average.swapped_in():
            model(own[0])
        for batch in own:
            last = batch is own[-1]
            with machine.accumulating(model, last=last):
                (model(batch).square().mean() / len(own)).backward()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = full_state({str(n): p.grad for n, p in enumerate(parameters) if p.grad is not None})
        norms.append(machine.step(optimizer, parameters, max_norm=0.5))
        average.follow(step + 1)
    with torch.no_grad():
        model(batches[0])

    kept = {name: value.clone() for name, value in full_state(adapter_state(machine.unwrap(model))).items()}
    moments = {name: value.clone() for name, value in optimizer_tensors(optimizer, machine.unwrap(model)).items()}
    set_adapter_state(machine.unwrap(model), {name: torch.zeros_like(value) for name, value in kept.items()})
    set_adapter_state(machine.unwrap(model), kept)
    set_optimizer_tensors(optimizer, machine.unwrap(model), moments)
    again = optimizer_tensors(optimizer, machine.unwrap(model))
    assert all(torch.equal(again[name], value) for name, value in moments.items())
    with torch.no_grad():
        output = model(batches[0])
    followed = full_state(average.state)
    if machine.is_main:
        parts = {"adapter": kept, "average": followed, "optimizer": moments, "gradients": gradients}
        torch.save(parts | {"norms": torch.tensor(norms), "output": output}, out)


def wait(out: Path) -> None:
    """Writes the seconds that a process of such a patience waits for another, before and after phases."""
    from pacorl.runtime.processes import Runtime

    runtime = Runtime(patience=1234.5)
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    limits = [backend.options._timeout.total_seconds()]
    for phase in (10.0, 1000.0, 20.0):
        runtime.limit_waits(phase)
        limits.append(backend.options._timeout.total_seconds())
    if runtime.is_main:
        torch.save(limits, out)


class Worded(Exception):
    """A fault that pickle cannot make again."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def gather(out: Path) -> None:
    """Each rank's rows on every rank, then a fault of the last one: writes what each rank met."""
    from pacorl.runtime.processes import Runtime, SharedFault

    machine = Runtime()
    rows = machine.gather_rows(lambda: {2 - machine.rank: f"row of rank {machine.rank}"})

    def act() -> dict[int, str]:
        if machine.rank == machine.world - 1:
            raise Worded(code=7)
        return {}

    try:
        machine.gather_rows(act)
    except SharedFault as error:
        met = machine.gather(f"{type(error.fault).__name__}: {error.fault}")
    if machine.is_main:
        torch.save({"rows": list(rows.items()), "met": met}, out)
