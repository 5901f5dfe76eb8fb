"""Blocks that are compiled, in two processes: the policy that samples is the one that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import worlds
from runs import train
from test_processes import CHEAP, MODES, SETTINGS
from tiny_runs import metrics

from pacorl.core.objectives import RATIO_DEVIATION

pytestmark = pytest.mark.slow


def train_compiled(overrides: Sequence[str]) -> None:
    """The run with blocks whose graphs are traced ahead of time; to write kernels for them would take minutes."""
    import torch

    from pacorl.engine.compiled import compile_blocks
    from pacorl.train import builders

    builders.compile_blocks = partial(compile_blocks, backend="aot_eager")  # type: ignore[assignment]
    train([*overrides, "model.compile=blocks"])
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_ratio_before_the_first_update_is_one(tmp_path: Path, mode: str) -> None:
    world, extra = MODES[mode]
    losses = {}
    for name, run in (("eager", train), ("compiled", train_compiled)):
        folder = tmp_path / name
        worlds.run(run, [*SETTINGS, *CHEAP, "optimizer.updates_per_epoch=1", f"out={folder}"], world=world, extra=extra)
        (line,) = metrics(folder, "epoch")
        deviations = {value for key, value in line.items() if key.startswith(RATIO_DEVIATION)}
        assert deviations == {0.0}, name
        losses[name] = line["grad_norm"]
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-3)
