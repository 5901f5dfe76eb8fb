"""The smallest run of the tiny recipe: one epoch, two prompts, four samples each."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_world import toy_world

SMALL = [
    "epochs=1",
    "prompts_per_epoch=2",
    "group_size=4",
    "save_every=1",
    "trackers=[]",
    "prompts.train=tiny:train:3",
    "prompts.evaluation=tiny:dev:2",
    "sampling.steps=3",
    "sampling.suffix={}",
    "sampling.batch=4",
    "evaluation.size=[64,64]",
    "evaluation.steps=2",
    "optimizer.updates_per_epoch=2",
]


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Overrides of configs/tiny.yaml, with a folder of its own."""
    return [*SMALL, f"out={tmp_path / 'run'}"]


@pytest.fixture
def toy() -> Iterator[None]:
    """The test's runs are of the toy world: for what the loop does, whatever the models are."""
    with toy_world():
        yield
