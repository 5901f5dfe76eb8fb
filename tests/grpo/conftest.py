"""Small runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import SMALL
from toy_world import toy_world


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """Overrides of configs/tiny.yaml, with a folder of its own."""
    return [*SMALL, "sampling.suffix={}", "optimizer.updates_per_epoch=2", f"out={tmp_path / 'run'}"]


@pytest.fixture
def toy() -> Iterator[None]:
    """The test's runs are of the toy world: for what the loop does, whatever the models are."""
    with toy_world():
        yield
