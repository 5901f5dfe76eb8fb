"""A reward that never returns: the run saves, ends with exit code 75, and goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image
from tiny_runs import metrics, weights
from toy_world import toy_config

from pacorl.grpo.start import checkpoints
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.files import digests
from pacorl.runtime.stopping import Interrupted
from pacorl.types import Prompt

pytestmark = pytest.mark.usefixtures("toy")

SETTINGS = ["epochs=3", "save_every=10", "evaluation.every=2", "rewards=[{name: brightness}]"]


class Brightness:
    """A function that does not return from its call number `hangs_in`, before which it does `first`."""

    def __init__(self, *, hangs_in: int = 0, first: Callable[[], None] = lambda: None) -> None:
        self.calls, self.hangs_in, self.first, self.over = 0, hangs_in, first, threading.Event()

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
        self.calls += 1
        if self.calls == self.hangs_in:
            self.first()
            self.over.wait()
        return [sum(image.resize((1, 1)).getpixel((0, 0))) / 765 for image in images]  # type: ignore[arg-type,misc]


@pytest.fixture
def hanging() -> Iterator[Callable[..., Brightness]]:
    """Makes rewards that hang until the test is over."""
    made: list[Brightness] = []

    def make(**options: Any) -> Brightness:
        made.append(Brightness(**options))
        return made[-1]

    yield make
    for reward in made:
        reward.over.set()


def run(out: Path, reward: Brightness, *settings: str, resume: bool = False) -> Path:
    config = toy_config(out, *SETTINGS, *settings)
    return PolicyTrainer(config, rewards={"brightness": reward}, resume=resume).train().folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Runs that nothing disturbs, by whether scoring overlaps with sampling."""

    @cache
    def made(overlap: bool) -> Path:
        with overlapping(overlap):
            return run(tmp_path_factory.mktemp("whole"), Brightness())

    return made


def overlapping(does: bool) -> AbstractContextManager[Any]:
    """Score the samples of the block's runs while the next are drawn, or after that."""
    return patch("pacorl.grpo.trainer.overlaps", lambda judge, device: does)


def same(first: Path, second: Path) -> bool:
    """Bit for bit: the log, but for the time limit that changed, the images with their scores, and the weights."""
    return outcome(first) == outcome(second)


def outcome(folder: Path) -> list[Any]:
    return [metrics(folder), digests(folder / "samples"), weights(folder)]


# Calls of the reward: 1 tries it, 2 evaluates the start, and an epoch has 4 batches.
START, EPOCH = 2, 4
WHERE = {
    "later batch": (START + EPOCH + 3, 1, r"batch 3: prompts? \d"),
    "evaluation": (START + 2 * EPOCH + 1, 2, "evaluation of 3 images"),
    "first evaluation": (2, 0, "evaluation of 3 images"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("later batch", True, None), marks=pytest.mark.slow),
        pytest.param(("evaluation", True, None), marks=pytest.mark.slow),
        pytest.param(("first evaluation", True, None), marks=pytest.mark.slow),
        pytest.param(("later batch", False, None), marks=pytest.mark.slow),
        ("later batch", True, signal.SIGTERM),
    ],
)
def test_a_reward_that_hangs_ends_the_run_saved_at_its_limit_or_at_a_signal(
    tmp_path: Path,
    hanging: Callable[..., Brightness],
    whole: Callable[[bool], Path],
    case: tuple[str, bool, signal.Signals | None],
) -> None:
    place, overlap, number = case
    call, finished, batch = WHERE[place]
    reward = hanging(hangs_in=call, first=lambda: number and os.kill(os.getpid(), number))
    limit = [] if number else ["reward_timeout=0.5"]
    cause = rf"reward brightness \({batch}.*\) has not returned for \S+ s; mend it, or raise reward_timeout; "
    said = (
        rf"^{'told to stop; ' if number else cause}stopped after epoch {finished}, and saved; go on with --resume auto$"
    )
    with overlapping(overlap), pytest.raises(Interrupted, match=said) as stop:
        run(tmp_path / "run", reward, *limit)
    assert stop.value.exit_code == 75
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{2 * finished:06d}"
    with overlapping(overlap):
        run(tmp_path / "run", Brightness(), resume=True)
    assert same(tmp_path / "run", whole(overlap))
