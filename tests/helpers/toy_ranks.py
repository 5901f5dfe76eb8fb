"""What a rank of the toy world does in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import toy_world
from PIL import Image
from recorded import recorded_epochs

from pacorl.types import Prompt

EPOCH = ["epochs=1", "rewards=[{name: drawing}]"]


def command(words: Sequence[str], errors: Path) -> None:
    """A command line, each rank with its own file for what it says."""
    from pacorl import cli

    toy_world.install()
    said = os.open(f"{errors}-{os.environ.get('RANK', '0')}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    sys.argv = ["pacorl", *words]
    cli.main()


def brightness(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
    """A reward without a judge."""
    return [sum(image.resize((1, 1)).getpixel((0, 0))) / 765 for image in images]  # type: ignore[arg-type,misc]


def stop_and_train(out: Path) -> None:
    """What ranks must not mix up: a stop flag, and the scores of both."""
    from pacorl.grpo.trainer import PolicyTrainer
    from pacorl.runtime.processes import Runtime, destroy_process_group
    from pacorl.runtime.stopping import Interrupted

    toy_world.install()
    met: dict[str, Any] = {}
    machine = Runtime()
    machine.check_stop()  # nobody is told
    with machine.signals:
        if machine.rank == machine.world - 1:
            signal.raise_signal(signal.SIGTERM)
        try:
            machine.check_stop()
        except Interrupted as stop:
            met["stop"] = str(stop)

    config = toy_world.toy_config(out / "run", *EPOCH)
    with recorded_epochs() as met["epochs"]:
        PolicyTrainer(config, rewards={"drawing": brightness}).train()
    # gloo's threads may hold tensors, which abort the process if the interpreter ends before them.
    destroy_process_group()
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    met["native threads"] = [name for name in names if "gloo" in name]
    (out / f"rank-{machine.rank}.json").write_text(json.dumps(met))
