"""A few inputs of each kind; `make nightly` tries thousands."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from qa.attack import documents, environment, images, links, weights
from qa.attack.harness import FAULTS, Target, WrongError, attempt

TARGETS = {target.name: target for room in (documents, images, weights) for target in room.targets()}
INPUTS = {"documents": 8, "images": 40, "weights": 8}


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


@pytest.mark.campaign
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore")  # of PEFT, while it writes the good files
def test_files_that_are_damaged_can_be_damaged_again(name: str, tmp_path: Path) -> None:
    path = good(TARGETS[name], tmp_path)
    for seed in range(2):
        draw = random.Random(seed)
        assert all(TARGETS[name].mutate(path, draw) for _ in range(40))


QUICK = ("split", "score", "annotate")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.campaign) for name in links.TABLE]
)
@pytest.mark.filterwarnings("ignore")
def test_no_command_writes_through_a_link(name: str, tmp_path: Path) -> None:
    (target,) = (target for target in links.targets() if target.name == f"links/{name}")
    path, work = good(target, tmp_path), tmp_path / "work"
    outcomes = [attempt(target, path, work, seed=3, number=number) for number in range(-1, 8)]
    assert [outcome for outcome in outcomes if outcome[0] in FAULTS] == []


def test_what_is_written_through_a_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def write() -> None:
        with Path(links.OUT, "a.txt").open("a") as file:
            file.write("b")

    monkeypatch.setattr(links, "KINDS", ("link", "copy", "dangling", "temporary"))  # a pipe hangs, and is seen by that
    careless = links.Story(write, prepare=lambda: None)
    target = replace(
        links.targets()[0],
        prepare=lambda folder: links.prepare(folder, careless),
        run=lambda folder: links.run(folder, careless),
    )
    path, work = good(target, tmp_path), tmp_path / "work"
    outcomes = [attempt(target, path, work, seed=0, number=number) for number in range(30)]
    kinds = {detail.partition(" as ")[0]: kind for kind, detail in outcomes}
    assert kinds["link"] == kinds["copy"] == kinds["dangling"] == "wrong"
    assert kinds["temporary"] == "fine"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("traps", marks=pytest.mark.campaign),
        pytest.param("variables", marks=pytest.mark.slow),
        pytest.param("ends", marks=pytest.mark.campaign),
    ],
)
def test_a_command_in_an_odd_environment(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "COMMANDS", environment.LIGHT)
    monkeypatch.setattr(environment, "drawn_command", lambda draw: draw.choice(list(environment.LIGHT)))
    (target,) = (target for target in environment.targets() if target.name == f"environment/{name}")
    path, work = good(target, tmp_path), tmp_path / "work"
    outcomes = [attempt(target, path, work, seed=1, number=number) for number in range(4)]
    assert [outcome for outcome in outcomes if outcome[0] in FAULTS] == []


def test_a_trap_that_runs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python with `-c` looks for modules in the working folder first."""
    monkeypatch.setattr(environment, "CONSOLE", Path(sys.executable))
    monkeypatch.setattr(environment, "COMMANDS", {"c": ("-c", "import yaml"), "isolated": ("-I", "-c", "import json")})
    environment.set_traps(tmp_path, tmp_path / environment.MARKS)
    (tmp_path / environment.CASE).write_text('{"command": "c"}')
    with pytest.raises(WrongError, match=r"\.py of the folder ran"):
        environment.run(tmp_path)
    (tmp_path / environment.MARKS).unlink()
    (tmp_path / "gone").rmdir()
    (tmp_path / environment.CASE).write_text('{"command": "isolated"}')
    assert environment.run(tmp_path) == 0


SMALL = ["--share", "0.005", "--seed", "1", "--only", "documents", "images", "weights", "links"]


@pytest.mark.parametrize(
    "words",
    [pytest.param(SMALL, marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.campaign)],
    ids=["small", "whole"],
)
def test_the_attack_ends_without_a_fault(words: list[str]) -> None:
    """In a process of its own: its children are forked before anything else runs there."""
    root = Path(__file__).parents[2]
    paths = [str(root / name) for name in (".", "src", "tests/helpers", "tests/toy")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "qa.attack", *words]
    ended = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-2000:]


@pytest.mark.slow
def test_a_child_that_hangs_or_dies_costs_its_input_alone(tmp_path: Path) -> None:
    """And the rest of the harness: what is silent, wrong or nameless is seen."""
    code = (
        "import os, time\n"
        "from qa.attack import harness\n"
        "harness.SECONDS, harness.PATIENCE, harness.BYTES = 10.0, 14.0, 2**26\n"
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
        "def attempt(target, good, work, *, seed, number, usage=None, plain=harness.attempt):\n"
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
