"""What a run writes down, and how it forgets."""

import json
from pathlib import Path

from pacorl.engine.logbook import Logbook


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_are_cut_back_to_an_epoch(tmp_path: Path) -> None:
    book = Logbook(tmp_path)
    book.write("evaluation", epoch=0, step=0, values={"a": 1.0})
    for epoch in (1, 2, 3):
        book.write("epoch", epoch=epoch, step=epoch, values={"a": float(epoch)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epo')  # a crash in the middle of a line
    book.cut_back(2)
    assert [line["epoch"] for line in lines(tmp_path)] == [0, 1, 2]
    book.cut_back(-1)
    assert lines(tmp_path) == []


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    Logbook(tmp_path).write("epoch", epoch=1, step=1, values={"good": 0.5, "bad": float("nan")})
    assert lines(tmp_path) == [{"kind": "epoch", "epoch": 1, "step": 1, "good": 0.5, "bad": None}]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    book = Logbook(None)
    book.write("epoch", epoch=1, step=1, values={"a": 1.0})
    book.records("evaluation", [{}])
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_has_the_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    book = Logbook(tmp_path, trackers=["tensorboard"])
    book.write("epoch", epoch=3, step=6, values={"reward/consistency/mean": 0.25})
    book.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("reward/consistency/mean")
    assert (event.step, event.value) == (3, 0.25)
