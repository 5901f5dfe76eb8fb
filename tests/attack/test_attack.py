"""A few inputs of each kind; `make attack` tries tens of thousands."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from misbehaving import BEHAVIOURS, SCORES, TEXTS
from tests.attack import answers, checkpoints, commands, documents, images, tables, weights
from tests.attack.harness import FAULTS, Target, attempt

ROOMS = (documents, images, tables, weights, commands, checkpoints)
TARGETS = {target.name: target for room in ROOMS for target in room.targets()}
INPUTS = {"documents": 8, "images": 60, "tables": 15, "weights": 8}


def good(target: Target, folder: Path) -> Path:
    path = folder / "good"
    path.mkdir()
    target.prepare(path)
    return path


@pytest.mark.parametrize("name", [name for name in TARGETS if name.partition("/")[0] in INPUTS])
@pytest.mark.filterwarnings("ignore")  # of Pillow and PEFT, about what is wrong; a command prints them
def test_an_input_is_fine_or_refused_in_a_line_that_names_the_file(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    path, work = good(target, tmp_path), tmp_path / "work"
    assert attempt(target, path, work, seed=0, number=-1) == ("fine", "good")
    outcomes = [attempt(target, path, work, seed=1, number=number) for number in range(INPUTS[name.partition("/")[0]])]
    assert [outcome for outcome in outcomes if outcome[0] in FAULTS] == []
    # What is damaged of a history is left out, with a warning.
    assert name == "tables/history" or any(kind == "refused" for kind, _ in outcomes)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")  # of PEFT, while it writes the good files
def test_files_that_are_damaged_can_be_damaged_again(name: str, tmp_path: Path) -> None:
    path = good(TARGETS[name], tmp_path)
    for seed in range(2):
        draw = random.Random(seed)
        assert all(TARGETS[name].mutate(path, draw) for _ in range(40))


def test_answers_are_right_or_missing_and_no_good_one_is_lost() -> None:
    judge = answers.verdicts("a/judge", 60, [*BEHAVIOURS, "reset"], seed=1, timeout=60)
    reward = answers.scores("a/reward", 40, [*SCORES, "reset"], seed=1, timeout=60, together=1)
    model = answers.texts("a/model", 40, [*TEXTS, "reset"], seed=1)
    for tally in (judge, reward, model):
        assert tally.faults == []
        assert tally.kinds["right"] > tally.kinds.total() / 4
        assert tally.kinds["missing"]


@pytest.mark.campaign
def test_tens_of_thousands_of_inputs(tmp_path: Path, measured: Callable[[str], None]) -> None:
    """The whole attack, in a process of its own: its children are forked before anything else runs there."""
    root, counts = Path(__file__).parents[2], tmp_path / "counts.json"
    paths = [str(root / name) for name in (".", "tests/judges", "tests/policies", "tests/toy")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.attack", "--json", str(counts)]
    ended = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    assert counts.exists(), ended.stdout[-20_000:] + ended.stderr[-2000:]
    for family, kinds in by_family(json.loads(counts.read_text())["targets"]).items():
        listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        measured(f"attack on {family}: {kinds.total():,} inputs, {listed}")
    assert ended.returncode == 0, ended.stdout[-20_000:]


def by_family(targets: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """What became of the inputs of each family."""
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for target in targets:
        families[target["name"].partition("/")[0]].update(target["kinds"])
    return families


@pytest.mark.slow
def test_a_child_that_hangs_or_dies_costs_its_input_alone(tmp_path: Path) -> None:
    """And the rest of the harness: what is silent, wrong or nameless is seen."""
    code = (
        "import os, time\n"
        "from tests.attack import harness\n"
        "harness.SECONDS, harness.PATIENCE, harness.BYTES = 2.0, 12.0, 2**26\n"
        "def run(folder):\n"
        "    text = (folder / 'x').read_text()\n"
        "    if text == '1': time.sleep(60)\n"
        "    if text == '2': os._exit(9)\n"
        "    if text == '3': raise KeyError('x')\n"
        "    if text == '4': raise ValueError('no name')\n"
        "    if text == '5': raise harness.WrongError('wrong', 'no')\n"
        "    if text == '6': raise ValueError('x.txt: bad')\n"
        "    if text == '7': b'1' * 2**28\n"
        "def mutate(folder, draw):\n"
        "    number = str(mutate.count)\n"
        "    (folder / 'x').write_text(number)\n"
        "    return 'must' if number == '8' else number\n"
        "def attempt(target, good, work, *, seed, number, usage, plain=harness.attempt):\n"
        "    mutate.count = number\n"
        "    return plain(target, good, work, seed=seed, number=number, usage=usage)\n"
        "harness.attempt = attempt\n"
        "prepare = lambda folder: (folder / 'x').write_text('good')\n"
        "target = harness.Target(name='a/b', prepare=prepare, mutate=mutate, run=run, names=('x.txt',))\n"
        "tally = harness.attack(target, 9, seed=0)\n"
        "print(*(f'{f.number}{f.kind}' for f in tally.faults), *map(tally.kinds.get, ['fine', 'refused']))\n"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True)
    assert ended.stdout == "1slow 2died 3traceback 4nameless 5wrong 7memory 8silent 1 1\n"
