"""A rank that dies is one line on the others, and the run goes on from its checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import toy_world
import worlds

from pacorl.config.recipes import recipe
from pacorl.grpo.start import checkpoints

pytestmark = pytest.mark.slow


def command(words: Sequence[str], errors: Path) -> None:
    """A command line in the toy world, each rank with its own file for what it says."""
    from pacorl import cli

    toy_world.install()
    said = os.open(f"{errors}-{os.environ.get('RANK', '0')}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)
    sys.argv = ["pacorl", *words]
    cli.main()


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_others_say_in_one_line_which_rank_has_ended(tmp_path: Path, killed: int) -> None:
    run, errors = tmp_path / "run", tmp_path / "errors"
    words = ["train-policy", str(recipe()), *toy_world.SETTINGS, f"out={run}", "--resume", "auto"]
    both = worlds.start(command, [*words, "epochs=1000"], errors, world=2)
    worlds.wait_for(lambda: bool(checkpoints(run / "checkpoints")), both)
    os.kill(both[killed].pid or 0, signal.SIGKILL)
    for process in both:
        process.join(60)
    assert both[1 - killed].exitcode == 1
    *_, line = Path(f"{errors}-{1 - killed}").read_text().splitlines()
    assert line.startswith(f"pacorl: rank {1 - killed} of 2 has lost another rank")
    assert line.endswith("with --resume auto")
    assert "gloo" not in Path(f"{errors}-{1 - killed}").read_text()
    epochs = int(checkpoints(run / "checkpoints")[-1].name.removeprefix("step-")) // 2 + 1
    worlds.run(command, [*words, f"epochs={epochs}"], errors)
