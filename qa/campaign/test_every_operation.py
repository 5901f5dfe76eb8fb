"""Killed before any operation on the disk, or cut from power there: the resumed run is one that was never stopped."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from qa.campaign.faults import AT_THE_END, RUN, Fault, Forks, Outcome
from safetensors import safe_open

UNEQUAL = {".lock", "report.html", "training_args.bin", "set.pdf"}
"""What two equal runs may differ in: a process's number, seconds on a page, the day."""
UNDIGESTED = ("trainer_state.json", "training_args.bin", "pytorch_lora_weights.safetensors")
"""Files with seconds or with entries in any order: those of them that are read are compared by content."""

NO_ROOM = re.compile(r"pacorl: .*\brun\b.*(No space left on device|writ).*")
RESUMED = ("train-policy", "train-reward", "dataset", "export")
"""The stories that go on from where they were stopped."""
QUICK = pytest.param("train-policy", 3, marks=pytest.mark.slow, id="three")
"""Three places of one story; `make nightly` tries each place of all."""
EVERY_PLACE = [pytest.param(story, 0, marks=pytest.mark.campaign, id=story) for story in RESUMED]
ONCE = [pytest.param(story, 0, marks=pytest.mark.campaign, id=story) for story in ("generate", "score")]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    if sys.platform != "linux" or not shutil.which("cc"):
        pytest.skip("the interposer needs Linux and a C compiler")
    root = Path(__file__).parents[2]
    library = tmp_path_factory.mktemp("c") / "interpose.so"
    with Forks("qa.campaign.stories", library=library, paths=[root, root / "tests" / "toy"]) as warm:
        yield warm


def outputs(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without what clocks say."""
    files = (path for path in folder.rglob("*") if path.name not in UNEQUAL)
    return {path.relative_to(folder).as_posix(): _content(path, folder.parent) for path in files}


def _content(path: Path, root: Path) -> Any:
    if path.is_dir():
        return None
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as file:
            return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    if path.suffix == ".json":
        content = _timeless(json.loads(path.read_text().replace(str(root), ".")))  # manifests name what was imported
        return {**content, "sha256": ""} if path.name == "state.json" else content  # of digests that may differ
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
    clocks = ("seconds", "runtime", "per_second")
    kept = {name: entry for name, entry in value.items() if not any(clock in name for clock in clocks)}
    return {name: _timeless(entry) for name, entry in kept.items() if not name.endswith(UNDIGESTED)}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The paths that only one has, or that differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name, ...) != other.get(name, ...))


def stop_and_resume(
    forks: Forks, story: str, folder: Path, faults: list[Fault], whole: dict[str, Any]
) -> tuple[int, list[str]]:
    """How many of the faults ended a process, and what differs from a whole run when all is done."""
    ended = sum(forks.run(story, folder, fault).code != 0 for fault in faults)
    forks.run(story, folder)
    differing = differences(outputs(folder / RUN), whole)
    shutil.rmtree(folder)
    return ended, differing


def every_kill(operations: list[str]) -> Iterator[Fault]:
    """Before each operation, and in the middle of the first write to each file.

    safetensors renames its files by a system call of its own, which no library sees: after the write stands for it.
    """
    for at, (before, operation) in enumerate(pairwise(["", *operations])):
        yield Fault(at)
        if operation.startswith("write ") and operation != before:
            yield Fault(at, written=0.5)
            if "/.tmp" in operation:
                yield Fault(at, written=1.0)


@cache
def whole_run(forks: Forks, story: str) -> tuple[Outcome, dict[str, Any]]:
    """A run that nothing stops, made once for all tests, and twice: the second shows that runs can be compared."""
    with TemporaryDirectory() as folder:
        runs = [Path(folder, name) for name in ("whole", "again")]
        done = [(forks.run(story, run), outputs(run / RUN)) for run in runs]
    assert differences(done[0][1], done[1][1]) == []
    return done[0]


@pytest.mark.parametrize(("story", "sample"), [QUICK, *EVERY_PLACE])
def test_a_kill_before_every_operation(
    forks: Forks, tmp_path: Path, story: str, sample: int, measured: Callable[[str], None]
) -> None:
    draw = random.Random(sample)
    done, whole = whole_run(forks, story)
    kinds = Counter(operation.split()[0] for operation in done.operations)
    assert kinds.keys() >= {"open", "write", "fsync", "rename", "mkdir"}
    kills, ended, wrong = list(every_kill(done.operations)), 0, {}
    for number, kill in enumerate(draw.sample(kills, sample) if sample else kills):
        # Every fourth resumed run is killed as well.
        again = [Fault(draw.randrange(len(done.operations)))] if number % 4 == 0 else []
        count, differing = stop_and_resume(forks, story, tmp_path / str(number), [kill, *again], whole)
        ended += count
        if differing:
            wrong[f"{kill.at} {done.operations[kill.at]} {kill.written}"] = differing
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    measured(f"{story}: {ended} kills at {len(done.operations)} operations ({counts}), {len(wrong)} differ")
    assert not wrong
    assert ended >= (sample or len(kills))


@pytest.mark.campaign
@pytest.mark.parametrize("story", RESUMED)
def test_a_power_cut(forks: Forks, tmp_path: Path, story: str, measured: Callable[[str], None]) -> None:
    draw, cuts = random.Random(60), 60
    done, whole = whole_run(forks, story)
    wrong = {}
    for number in range(cuts):
        # Every fourth resumed run loses its power as well.
        faults = [Fault(draw.randrange(len(done.operations)), cut=seed) for seed in range(1 + (number % 4 == 0))]
        _, differing = stop_and_resume(forks, story, tmp_path / str(number), faults, whole)
        if differing:
            wrong[f"{number}: {[(fault.at, done.operations[fault.at]) for fault in faults]}"] = differing
    measured(f"{story}: {cuts} power cuts, {len(wrong)} differ")
    assert not wrong


@pytest.mark.campaign
@pytest.mark.parametrize("story", [*RESUMED, "generate", "score"])
def test_a_power_cut_after_the_end_takes_nothing(
    forks: Forks, tmp_path: Path, story: str, measured: Callable[[str], None]
) -> None:
    _, whole = whole_run(forks, story)
    for seed in range(5):
        forks.run(story, tmp_path / str(seed), Fault(AT_THE_END, cut=seed))
        # What was deleted may be back.
        assert [name for name in differences(outputs(tmp_path / str(seed) / RUN), whole) if name in whole] == []
    measured(f"{story}: 5 power cuts after its end, nothing is gone")


@pytest.mark.parametrize(("story", "sample"), [QUICK, *EVERY_PLACE, *ONCE])
def test_a_disk_that_is_full_before_any_write(
    forks: Forks, tmp_path: Path, story: str, sample: int, measured: Callable[[str], None]
) -> None:
    """It is one line that names a path and exit code 1, and with room again a run ends as one that always had it."""
    done, whole = whole_run(forks, story)
    writes = [at for at, operation in enumerate(done.operations) if operation.startswith(("write ", "mkdir "))]
    wrong = {}
    for at in random.Random(sample).sample(writes, sample) if sample else writes:
        folder = tmp_path / str(at)
        full = forks.run(story, folder, Fault(at, full=True))
        *_, line = full.output.splitlines()
        faults = [] if full.code == 1 and NO_ROOM.fullmatch(line) else [line]
        forks.run(story, folder)
        faults += ["Traceback"] * ("Traceback" in full.output) + differences(outputs(folder / RUN), whole)
        shutil.rmtree(folder)
        if faults:
            wrong[f"{at} {done.operations[at]}"] = faults
    measured(f"{story}: a full disk at {len(writes)} writes, {len(wrong)} of them badly told or differing")
    assert not wrong
