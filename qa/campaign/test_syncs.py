"""What it costs that nothing is lost: the time for which a run waits for its disk."""

from __future__ import annotations

import os
import posix
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import tiny_run

from pacorl.grpo.trainer import PolicyTrainer


@pytest.mark.campaign
def test_syncs_cost_less_than_a_fiftieth_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Callable[[str], None]
) -> None:
    """Three epochs of the quickstart, small evaluations and a checkpoint at their end, on the disk of the tests."""
    seconds: list[float] = []

    def timed(handle: int) -> None:
        started = time.perf_counter()
        posix.fsync(handle)  # os.fsync does nothing in tests
        seconds.append(time.perf_counter() - started)

    trainer = PolicyTrainer(
        tiny_run(
            [
                "epochs=3",
                "save_every=3",
                "prompts.train=tiny:train:18",
                "prompts.evaluation_limit=4",
                f"out={tmp_path / 'run'}",
            ]
        )
    )
    monkeypatch.setattr(os, "fsync", timed)
    started = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - started
    share = sum(seconds) / whole
    measured(f"{len(seconds)} syncs in 3 epochs take {sum(seconds):.2f} s of {whole:.1f} ({share:.2%})")
    assert share < 0.02
