"""Kill −9 at random moments: the resumed run ends as one that was never stopped, bit for bit."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import worlds
from runs import train
from tiny_runs import metrics, weights

from pacorl.core.objectives import OBJECTIVES
from pacorl.io.files import digests

SETTINGS = [
    "epochs=3",
    "prompts_per_epoch=2",
    "group_size=2",
    "save_every=1",
    "keep_checkpoints=1",
    "trackers=[]",
    "prompts.train=tiny:train:3",
    "prompts.evaluation=tiny:dev:1",
    "sampling.steps=2",
    "sampling.suffix={}",
    "optimizer.updates_per_epoch=2",
    "sampling.batch=2",
    "evaluation.size=[64,64]",
    "evaluation.steps=1",
    "evaluation.every=2",
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=2",
]


def kill_and_resume(folder: Path, settings: Sequence[str], *, kills: int, seed: int) -> int:
    """Kills runs at random moments, `kills` times in all, and resumes each until it ends; how many runs that were."""
    started = time.monotonic()
    worlds.run(train, [*settings, f"out={folder / 'whole'}"])
    length = time.monotonic() - started
    draw, killed, turn = random.Random(seed), 0, 0
    while killed < kills:
        run = folder / f"run-{turn}"
        finished, before = False, killed
        while not finished:
            started = time.monotonic()
            (process,) = worlds.start(train, [*settings, f"out={run}"], "auto")
            process.join(draw.uniform(0.2, 1.0) * length if killed < kills else None)
            killed += process.is_alive()
            process.kill()
            process.join()
            finished = process.exitcode == 0
            if finished and killed == before:  # a whole run: the machine may have been busy when the first was timed
                length = min(length, time.monotonic() - started)
            assert process.exitcode in (0, -9)
        assert metrics(run) == metrics(folder / "whole")
        assert digests(run / "samples") == digests(folder / "whole" / "samples")
        assert weights(run) == weights(folder / "whole")
        turn += 1
    return turn


@pytest.mark.nightly
def test_three_kills(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, SETTINGS, kills=3, seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_hundred_kills(tmp_path: Path, objective: str, measured: Callable[[str], None]) -> None:
    kills = math.ceil(100 / len(OBJECTIVES))
    # Of the objectives of endpoints, awm branches the tree and diffusion_nft has independent noise.
    tree = ["sampling.tree={}"] if objective == "diffusion_nft" else []
    settings = [*SETTINGS, *tree, f"objective.name={objective}"]
    runs = kill_and_resume(tmp_path, settings, kills=kills, seed=1)
    measured(f"{objective}: {kills} kills at random moments of {runs} runs, all bits equal")
