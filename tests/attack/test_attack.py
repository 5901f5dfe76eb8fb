"""A few inputs of each kind; `make attack` tries tens of thousands."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.attack import documents, images, tables, weights
from tests.attack.harness import FAULTS, Target, attempt

TARGETS = {target.name: target for room in (documents, images, tables, weights) for target in room.targets()}
INPUTS = {"documents": 8, "images": 60, "tables": 15, "weights": 8}


def good(target: Target, folder: Path) -> Path:
    path = folder / "good"
    path.mkdir()
    target.prepare(path)
    return path


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")  # of Pillow and PEFT, about what is wrong; a command prints them
def test_an_input_is_fine_or_refused_in_a_line_that_names_the_file(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    path, work = good(target, tmp_path), tmp_path / "work"
    assert attempt(target, path, work, seed=0, number=-1) == ("fine", "good")
    outcomes = [attempt(target, path, work, seed=1, number=number) for number in range(INPUTS[name.partition("/")[0]])]
    assert [outcome for outcome in outcomes if outcome[0] in FAULTS] == []
    assert any(kind == "refused" for kind, _ in outcomes)
