"""Runs that are killed, told to stop, doubled or out of disk space, begun again, equal one that nothing stopped."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from safetensors import safe_open
from tests.nightly.forks import Forks, Outcome

pytestmark = pytest.mark.nightly
RESUMED = ("train-policy", "train-reward", "dataset", "export")
"""The stories that go on from where they were stopped."""
UNEQUAL = {".lock", "report.html", "training_args.bin", "set.pdf"}
"""What two equal runs may differ in: a process's number, seconds on a page, the day."""
CLOCKS = ("seconds", "runtime", "per_second", "should_training_stop")
"""Entries that differ: times, and in a stopped run's last checkpoint that it stopped."""
UNDIGESTED = ("trainer_state.json", "training_args.bin", "pytorch_lora_weights.safetensors")
"""Files with seconds, or with entries in any order: they are compared by content, and not by their digests."""
TRIALS = 40


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    if sys.platform != "linux" or not shutil.which("cc"):
        pytest.skip("needs Linux and a C compiler")
    with Forks(tmp_path_factory.mktemp("c")) as warm:
        yield warm


def outputs(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without what clocks say."""
    files = (path for path in folder.rglob("*") if path.name not in UNEQUAL and path.is_file())
    return {path.relative_to(folder).as_posix(): _content(path, folder.parent) for path in files}


def _content(path: Path, root: Path) -> Any:
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    if path.suffix == ".json":
        content = _timeless(json.loads(path.read_text().replace(str(root), ".")))  # manifests name what was imported
        return {**content, "sha256": ""} if path.name == "state.json" else content
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        # A journal's lines come as answers did.
        return [_timeless(json.loads(line)) for line in (sorted(lines) if "journal" in path.name else lines)]
    return path.read_bytes()


def _timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [_timeless(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    clocked = {name for name in value if any(clock in name for clock in CLOCKS) or name.endswith(UNDIGESTED)}
    return {name: _timeless(entry) for name, entry in value.items() if name not in clocked}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name, ...) != other.get(name, ...))


@cache
def whole(forks: Forks, story: str) -> tuple[Outcome, dict[str, Any]]:
    """A run that nothing stops, made twice: the second shows that runs can be compared."""
    with TemporaryDirectory() as folder:
        runs = [Path(folder, name) for name in ("whole", "again")]
        done = [(forks.run(story, run), outputs(run / "run")) for run in runs]
    assert [outcome.code for outcome, _ in done] == [0, 0], done[0][0].output
    assert differences(done[0][1], done[1][1]) == []
    return done[0]


def trials(
    forks: Forks, story: str, folder: Path, how: str, judged: Callable[[Outcome], bool], *, twice: bool = False
) -> None:
    """Stop runs at drawn changes of the disk, resume them, and compare what they leave; the seed is the day."""
    outcome, expected = whole(forks, story)
    draw, wrong = random.Random(time.strftime("%Y%m%d")), {}
    places = [
        at for at, operation in enumerate(outcome.operations) if how != "full" or operation[:5] in ("write", "mkdir")
    ]
    for at in draw.sample(places, min(TRIALS, len(places))):
        run, written = folder / str(at), draw.choice([0.0, 0.5, 1.0]) if how == "SIGKILL" else 0.0
        stopped = forks.run(story, run, at=at, how=how, written=written)
        if twice:
            forks.run(story, run, at=draw.randrange(len(outcome.operations)), how=how)
        resumed = forks.run(story, run)
        found = differences(outputs(run / "run"), expected)
        if resumed.code or found or not judged(stopped):
            wrong[f"{at} {outcome.operations[at]} {written}"] = (stopped, resumed, found)
        shutil.rmtree(run)
    assert not wrong


@pytest.mark.parametrize("story", RESUMED)
def test_a_kill_before_any_change_of_the_disk(forks: Forks, tmp_path: Path, story: str) -> None:
    trials(forks, story, tmp_path, "SIGKILL", lambda stopped: stopped.code == -9, twice=True)


@pytest.mark.parametrize("story", [*RESUMED, "generate", "check"])
def test_a_full_disk_is_one_line_that_names_the_file(forks: Forks, tmp_path: Path, story: str) -> None:
    def told(stopped: Outcome) -> bool:
        *_, line = stopped.output.splitlines()
        named = re.fullmatch(r"pacorl: .*\brun\b.*(No space left on device|writ).*", line)
        return stopped.code == 1 and bool(named) and "Traceback" not in stopped.output

    trials(forks, story, tmp_path, "full", told)


@pytest.mark.parametrize("story", ["train-policy", "train-reward"])
def test_a_signal_is_a_stop_that_saves(forks: Forks, tmp_path: Path, story: str) -> None:
    trials(forks, story, tmp_path, "SIGTERM", lambda stopped: stopped.code in (0, 75))


@pytest.mark.parametrize("story", RESUMED)
def test_of_two_at_once_the_second_is_refused(forks: Forks, tmp_path: Path, story: str) -> None:
    def refused(first: Outcome) -> bool:
        assert first.second
        # Between the commands of a story, or before the first took its lock, the second may run to its end.
        return first.code == 0 and (first.second["code"] == 0 or "run" in first.second["output"])

    trials(forks, story, tmp_path, "SIGSTOP", refused)
