"""A rank that stands still is reported, and a signal then saves the last finished epoch and ends the run."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import toy_world
import worlds
from tiny_runs import metrics, weights
from toy_ranks import command

from pacorl.config.recipes import recipe
from pacorl.grpo.start import checkpoints
from pacorl.io.files import digests

pytestmark = pytest.mark.slow

SHORT = {"BEAT_SECONDS": 0.2, "HUNG_SECONDS": 4.0, "GRACE_SECONDS": 3.0, "HANDOVER_SECONDS": 1.0}
SETTINGS = [*toy_world.SETTINGS, "save_every=100000", "evaluation.every=0"]
REWARD = """
from toy_ranks import brightness as score, hang_if_told

def brightness(prompts, images):
    hang_if_told("reward")
    return score(prompts, images)
"""

Start = Callable[..., list[BaseProcess]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command line in two ranks; none of them outlives the test."""
    started: list[BaseProcess] = []

    def begin(*words: str, **extra: str) -> list[BaseProcess]:
        words = ("train-policy", str(recipe()), *SETTINGS, f"out={tmp_path / 'run'}", "--resume", "auto", *words)
        ranks = worlds.start(command, words, tmp_path / "errors", SHORT, world=2, extra=extra)
        started.extend(ranks)
        return ranks

    yield begin
    for process in started:
        process.kill()
        process.join()


def said(folder: Path, rank: int) -> str:
    path = Path(f"{folder / 'errors'}-{rank}")
    return path.read_text() if path.exists() else ""


def finished(run: Path) -> int:
    """Epochs of the log."""
    log = run / "metrics.jsonl"
    return log.read_text().count('"kind": "epoch"') if log.exists() else 0


def check_resumed(folder: Path, start: Start, *settings: str, engine: Mapping[str, str] = {}) -> None:
    """The resumed run equals, bit for bit, one that was never stopped."""
    (checkpoint,) = checkpoints(folder / "run" / "checkpoints")
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["epoch"] in (finished(folder / "run"), finished(folder / "run") - 1)
    last = f"epochs={state['epoch'] + 1}"
    for words in ((last, *settings), (last, *settings, f"out={folder / 'whole'}")):
        for process in start(*words, **engine):
            process.join(300)
            assert process.exitcode == 0, said(folder, 0)
    assert weights(folder / "run") == weights(folder / "whole")
    assert digests(folder / "run/samples") == digests(folder / "whole/samples")
    for kind in ("epoch", "evaluation"):  # not that `epochs` changed
        assert metrics(folder / "run", kind) == metrics(folder / "whole", kind)


def tell(ranks: Sequence[BaseProcess]) -> None:
    """Signal every rank, as a launcher does."""
    for process in ranks:
        process.terminate()


@pytest.mark.parametrize(
    ("frozen", "engine"),
    [
        pytest.param(0, {}, id="0"),
        pytest.param(1, {}, id="1", marks=pytest.mark.campaign),
        pytest.param(0, worlds.fsdp2(), id="0, sharded", marks=pytest.mark.campaign),
    ],
)
def test_a_frozen_rank_is_reported_and_a_signal_saves(
    tmp_path: Path, start: Start, frozen: int, engine: dict[str, str]
) -> None:
    ranks = start("epochs=100000", **engine)
    worlds.wait_for(lambda: finished(tmp_path / "run") >= 3, ranks)
    os.kill(ranks[frozen].pid or 0, signal.SIGSTOP)
    line = rf"rank {frozen} of 2 \(process {ranks[frozen].pid} on \S+\) has sent no heartbeat for \d+ s: .*, epoch \d+"
    other = 1 - frozen
    worlds.wait_for(lambda: bool(re.search(line, said(tmp_path, other))), ranks)
    tell(ranks)
    ranks[other].join(60)
    assert ranks[other].exitcode == 75, said(tmp_path, other)
    assert re.search(
        rf"told to stop \d+ s ago, and {line}; stopped after epoch \d+, and saved; go on with --resume auto\n$",
        said(tmp_path, other),
    )
    ranks[frozen].kill()
    ranks[frozen].join()
    check_resumed(tmp_path, start, engine=engine)


def test_a_frozen_rank_of_a_judges_training_is_reported_and_a_signal_ends_it(tmp_path: Path) -> None:
    settings = ["max_steps=100000", "save_every=2", "optimizer.batch=4", "data.train=['tiny:train:16']"]
    words = ["train-reward", "reward/tiny", *settings, "data.evaluation=[]", f"out={tmp_path / 'run'}"]
    ranks = worlds.start(command, words, tmp_path / "errors", SHORT, world=2)
    try:
        worlds.wait_for(lambda: any((tmp_path / "run" / "checkpoints").glob("*/complete.json")), ranks)
        os.kill(ranks[1].pid or 0, signal.SIGSTOP)
        line = rf"rank 1 of 2 \(process {ranks[1].pid} on \S+\) has sent no heartbeat for \d+ s: .* phase training, .*"
        worlds.wait_for(lambda: bool(re.search(line, said(tmp_path, 0))), ranks)
        tell(ranks)
        ranks[0].join(60)
        assert ranks[0].exitcode == 75, said(tmp_path, 0)
        assert re.search(
            rf"told to stop \d+ s ago, and {line}; .* go on from it with --resume auto\n$", said(tmp_path, 0)
        )
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.campaign
@pytest.mark.parametrize("place", ["decode", "reward"])
def test_a_rank_that_others_wait_for_is_reported_and_a_signal_saves(tmp_path: Path, start: Start, place: str) -> None:
    """Its main thread is stuck, or waits for a thread that is; its heartbeats go on."""
    (tmp_path / "reward.py").write_text(REWARD)
    reward, pipe = f"rewards=[{{name: '{tmp_path / 'reward.py'}:brightness'}}]", tmp_path / "pipe"
    ranks = start("epochs=100000", reward, **{f"HANGS_IN_{place}": str(pipe)})
    worlds.wait_for(lambda: finished(tmp_path / "run") >= 3, ranks)
    os.mkfifo(pipe)
    phase = {"decode": "rollout", "reward": "reward"}[place]
    line = rf"rank 1 of 2 \(process \d+ on \S+\) has not moved for \d+ s, .* it is in phase {phase}, batch \d, epoch \d"
    worlds.wait_for(lambda: bool(re.search(line, said(tmp_path, 0))), ranks)
    tell(ranks)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [75, 75], said(tmp_path, 0)
    assert said(tmp_path, 0).endswith(", and saved; go on with --resume auto\n")
    check_resumed(tmp_path, start, reward)
