"""A judge of random weights, and the built-in server over it on a free port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from judges import serving
from tests.twins.parts import tiny_judge

from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import vocabulary


@pytest.fixture(scope="session")
def local_judge() -> LocalJudge:
    torch.manual_seed(0)
    return LocalJudge(*tiny_judge(vocabulary()), batch_tokens=600)


@pytest.fixture(scope="session")
def url(local_judge: LocalJudge) -> Iterator[str]:
    with serving({"judge": local_judge}) as url:
        yield url
