"""Read a run's folder into plain records; only metrics.jsonl must be there.

A last line without its line break is still being written and is left for the next time; every other line that
cannot be read is an error with file and line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pacorl.core.grid import parse_layout
from pacorl.core.metric_names import current_name
from pacorl.io.documents import blamed_on, parse_object, read_object, read_text
from pacorl.types import Grid

Record = dict[str, Any]
Matrix = tuple[tuple[float | None, ...], ...]
"""P(Yes) of each pair of panels, symmetric; None on the diagonal and for a failed question."""

SINGLE = Grid(1, 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """One image that an evaluation made: a grid image, or an edit."""

    prompt_id: int
    seed: int
    image: Path
    """Absolute; inside the run's samples folder."""
    text: str = ""
    theme: str = ""
    grid: Grid = SINGLE
    p_yes: Matrix = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    reward: float | None = None
    """The weighted sum of the rewards; None if one is missing, or if the run did not write it."""
    held_out: Mapping[str, float] = field(default_factory=dict)
    """Measures that nobody rewards."""

    @property
    def key(self) -> tuple[int, int]:
        """What an image is matched by across evaluations."""
        return self.prompt_id, self.seed

    @property
    def consistency(self) -> float | None:
        """Mean P(Yes) over the judged pairs of panels; the score of that name if there is no matrix."""
        judged = [value for row in self.p_yes for value in row if value is not None]
        return sum(judged) / len(judged) if judged else self.scores.get("consistency")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What a run has written so far."""

    path: Path
    epochs: list[Record]
    """Lines of metrics.jsonl of kind `epoch`, in the order written."""
    evaluations: list[Record]
    summary: Record
    """summary.json; empty until the run has ended."""
    config: str
    """config.yaml as it stands."""
    samples: dict[int, list[Sample]]
    """Evaluation images by epoch, ascending."""
    training_images: dict[int, Path]
    """Joined training samples by epoch, ascending."""


def read_run(run: Path) -> RunFolder:
    """Read a run's folder.

    Raises:
        ValueError: `run` is no run's folder, or a file in it cannot be understood.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{run} has no metrics.jsonl, so it is not a run's folder; name the folder that a run wrote")
    records = list(_metrics(metrics))
    return RunFolder(
        path=run,
        epochs=[record for record in records if record.get("kind") == "epoch"],
        evaluations=[record for record in records if record.get("kind") == "evaluation"],
        summary=read_object(run / "summary.json") if (run / "summary.json").is_file() else {},
        config=_text(run / "config.yaml"),
        samples={epoch: _samples(path) for epoch, path in _by_epoch(run, "evaluation-*.jsonl").items()},
        training_images=_by_epoch(run, "epoch-*.png"),
    )


def number(value: object) -> float | None:
    """The finite float that `value` is, None for anything else (a bool is no number)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _metrics(path: Path) -> Iterator[Record]:
    for location, record in _lines(path):
        if record.get("kind") in {"epoch", "evaluation"} and number(record.get("epoch")) is None:
            raise ValueError(f"{location}: 'epoch' is {record.get('epoch')!r}; a metrics line needs its number")
        yield {current_name(key): value for key, value in record.items()}


def _samples(path: Path) -> list[Sample]:
    return [_sample(record, path.parent, location) for location, record in _lines(path)]


def _sample(record: Record, folder: Path, location: str) -> Sample:
    missing = [key for key in ("prompt_id", "seed", "image") if key not in record]
    if missing:
        raise ValueError(f"{location}: {missing[0]!r} is missing; a sample needs prompt_id, seed and image")
    return Sample(
        prompt_id=int(record["prompt_id"]),
        seed=int(record["seed"]),
        image=_inside(folder, str(record["image"]), location),
        text=str(record.get("text", "")),
        theme=str(record.get("theme", "")),
        grid=parse_layout(str(record["grid"])) if record.get("grid") else SINGLE,
        p_yes=tuple(tuple(number(value) for value in row) for row in record.get("p_yes") or ()),
        scores=dict(_numbers(record.get("scores") or {})),
        reward=number(record.get("reward")),
        held_out=dict(_numbers(record.get("held_out") or {})),
    )


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if (finite := number(value)) is not None:
            yield name, finite


def _inside(folder: Path, image: str, location: str) -> Path:
    """A page carries its images along, so a record must not be able to name any other file of the machine."""
    path = (folder / image).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{location}: image {image!r} lies outside {folder}; name it relative to that folder")
    return path


def _by_epoch(run: Path, pattern: str) -> dict[int, Path]:
    paths = {path.stem.rpartition("-")[2]: path for path in (run / "samples").glob(pattern)}
    return {int(epoch): paths[epoch] for epoch in sorted(paths, key=lambda text: text.zfill(20)) if epoch.isdecimal()}


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    """(file and line, object) of every line that ends; the last one may still be being written."""
    whole, _, _unfinished = read_text(path).rpartition("\n")
    for number_of_line, line in enumerate(whole.split("\n"), start=1):
        if line.strip():
            location = f"{path}:{number_of_line}"
            with blamed_on(location):
                record = parse_object(line, kind="line")
            yield location, record


def _text(path: Path) -> str:
    return read_text(path) if path.is_file() else ""
