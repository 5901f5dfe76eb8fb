"""What processes of a `Runtime` say to each other."""

from __future__ import annotations

import signal
from pathlib import Path

import torch


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


def stop(out: Path) -> None:
    """Tell the last rank alone to stop: writes what each rank met, and gloo's threads after the group has ended."""
    from pacorl.runtime.processes import Runtime, destroy_process_group
    from pacorl.runtime.stopping import Interrupted

    machine, met = Runtime(), "nothing"
    machine.check_stop()  # nobody is told
    with machine.signals:
        if machine.rank == machine.world - 1:
            signal.raise_signal(signal.SIGTERM)
        try:
            machine.check_stop()
        except Interrupted as told:
            met = str(told)
    found = machine.gather(met)
    # gloo's threads may hold tensors, which abort the process if the interpreter ends before them.
    destroy_process_group()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    if machine.is_main:
        torch.save({"met": found, "threads": [name for name in names if "gloo" in name]}, out)
