"""A rank that stands still or dies ends the run within the time limit of collectives, in one line."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import toy_world
import worlds

from pacorl import PolicyTrainer
from pacorl.config.recipes import recipe
from pacorl.grpo.start import checkpoints
from pacorl.runtime import processes

pytestmark = pytest.mark.slow

LIMIT = 6.0


def end(lost: int, number: signal.Signals, trainer: PolicyTrainer, line: Mapping[str, Any]) -> None:
    """Send one rank a signal after the second epoch."""
    if line["epoch"] == 2 and trainer.runtime.rank == lost:
        os.kill(os.getpid(), number)


def train(settings: Sequence[str], errors: Path, lost: tuple[int, signal.Signals] | None, resume: bool) -> None:
    """A run as a script makes it, each rank with its own file for what it says."""
    from pacorl.cli import exit_code
    from pacorl.config import base as configs
    from pacorl.grpo import trainer as trainer_module
    from pacorl.grpo.policy_config import PolicyConfig

    processes.LONGEST_WAIT = LIMIT
    trainer_module.OUTAGE_SECONDS = 0.0
    toy_world.install()
    toy_world.ToyTransformer._no_split_modules = ("Linear",)  # type: ignore[attr-defined]  # FSDP2's blocks
    said = os.open(f"{errors}-{os.environ.get('RANK', '0')}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    config = configs.load(PolicyConfig, recipe(), [*toy_world.SETTINGS, *settings])
    listeners = [partial(end, *lost)] if lost else []
    trainer = PolicyTrainer(config, listeners=listeners, resume=resume)
    sys.exit(exit_code(lambda: trainer.train() and 0))


@pytest.mark.parametrize(
    ("lost", "number", "engine"),
    [
        pytest.param(0, signal.SIGSTOP, {}, id="0 stands still"),
        pytest.param(1, signal.SIGKILL, {}, id="1 dies"),
        pytest.param(1, signal.SIGSTOP, worlds.fsdp2(), id="1 stands still, sharded", marks=pytest.mark.nightly),
    ],
)
def test_a_lost_rank_ends_the_run_in_one_line(
    tmp_path: Path, lost: int, number: signal.Signals, engine: dict[str, str]
) -> None:
    settings = [f"out={tmp_path / 'run'}", "save_every=1", "evaluation.every=0", "epochs=4", "reward_timeout=1"]
    ranks = worlds.start(train, settings, tmp_path / "errors", (lost, number), False, world=2, extra=engine)
    try:
        worlds.wait_for(lambda: len(checkpoints(tmp_path / "run" / "checkpoints")) == 1, ranks)
        began = time.monotonic()
        ranks[1 - lost].join(120)
        assert ranks[1 - lost].exitcode == 1
        assert time.monotonic() - began < 60
    finally:
        for process in ranks:
            process.kill()
            process.join()
    said = Path(f"{tmp_path / 'errors'}-{1 - lost}").read_text()
    assert said.splitlines()[-1].startswith(f"pacorl: rank {1 - lost} of 2 has lost another rank")
    assert "gloo" not in said
    # It goes on from its newest checkpoint.
    worlds.run(train, settings, tmp_path / "errors", None, True, world=2, extra=engine)
