"""The documented launchers take a run through an epoch in two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import launched, launched_on_two_machines

from pacorl.grpo.start import checkpoints

pytestmark = pytest.mark.slow


# torchrun also starts the two machines below.
@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.nightly), "accelerate"])
def test_two_processes_train_an_epoch(launcher: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = launched(launcher, out=out)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done: ") == 1, "the main process alone speaks"
    assert_trained_by_two(out)


@pytest.mark.nightly
def test_two_machines_train_an_epoch(tmp_path: Path) -> None:
    out = tmp_path / "run"
    both = launched_on_two_machines(out=out)
    assert [done.returncode for done in both] == [0, 0], [done.stderr[-2000:] for done in both]
    assert sum(done.stdout.count("done: ") for done in both) == 1
    assert_trained_by_two(out)


def assert_trained_by_two(out: Path) -> None:
    (checkpoint,) = checkpoints(out / "checkpoints")
    assert json.loads((checkpoint / "state.json").read_text())["processes"] == 2
    assert len(json.loads((checkpoint / "generators.json").read_text())) == 2
    kinds = [json.loads(line)["kind"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["evaluation", "epoch", "evaluation"]
