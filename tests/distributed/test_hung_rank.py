"""A rank that stands still ends the run within the time limit of collectives, and is named."""

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


def freeze(frozen: int, trainer: PolicyTrainer, line: Mapping[str, Any]) -> None:
    """Stop one rank's process after the second epoch."""
    if line["epoch"] == 2 and trainer.runtime.rank == frozen:
        os.kill(os.getpid(), signal.SIGSTOP)


def train(settings: Sequence[str], errors: Path, frozen: int | None, resume: bool) -> None:
    """A run as a script makes it, each rank with its own file for what it says."""
    from pacorl.cli import exit_code
    from pacorl.config import base as configs
    from pacorl.grpo.policy_config import PolicyConfig

    processes.LONGEST_WAIT = LIMIT
    toy_world.install()
    toy_world.ToyTransformer._no_split_modules = ("Linear",)  # type: ignore[attr-defined]  # FSDP2's blocks
    said = os.open(f"{errors}-{os.environ.get('RANK', '0')}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    config = configs.load(PolicyConfig, recipe(), [*toy_world.SETTINGS, *settings])
    listeners = [] if frozen is None else [partial(freeze, frozen)]
    trainer = PolicyTrainer(config, listeners=listeners, resume=resume)
    sys.exit(exit_code(lambda: trainer.train() and 0))


@pytest.mark.parametrize(
    ("frozen", "engine"),
    [
        pytest.param(0, {}, id="0"),
        pytest.param(1, {}, id="1"),
        pytest.param(1, worlds.fsdp2(), id="1, sharded", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_stands_still_ends_the_run_and_is_named(
    tmp_path: Path, frozen: int, engine: dict[str, str]
) -> None:
    settings = [f"out={tmp_path / 'run'}", "save_every=1", "evaluation.every=0", "epochs=4", "reward_timeout=1"]
    ranks = worlds.start(train, settings, tmp_path / "errors", frozen, False, world=2, extra=engine)
    try:
        worlds.wait_for(lambda: len(checkpoints(tmp_path / "run" / "checkpoints")) == 1, ranks)
        began = time.monotonic()
        ranks[1 - frozen].join(120)
        assert ranks[1 - frozen].exitcode == 1
        assert time.monotonic() - began < 60
    finally:
        for process in ranks:
            process.kill()
            process.join()
    *_, line = Path(f"{tmp_path / 'errors'}-{1 - frozen}").read_text().splitlines()
    assert line.startswith(f"pacorl: rank {1 - frozen} of 2 has lost another rank")
    # It goes on from its newest checkpoint.
    worlds.run(train, settings, tmp_path / "errors", None, True, world=2, extra=engine)
