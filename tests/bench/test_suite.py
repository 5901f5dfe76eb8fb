"""The runner: resumable by item, nothing counted twice, faults named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asked import Asked

from pacorl.bench import running
from pacorl.bench.options import BenchmarkOptions
from pacorl.bench.running import Outcome
from pacorl.bench.suite import INTERVALS, Benchmark, PaperTable, Row, Table
from pacorl.core.ranking import Interval, bootstrap
from pacorl.gate.paco_reward import PacoReward
from pacorl.io.documents import write_jsonl
from pacorl.judge.judge import Judge


class Numbers(Benchmark[Any]):
    """Measures the length of each key, so that what was asked can be counted."""

    name = "numbers"
    table = Table("Numbers", ("Mean", "Twice"), (INTERVALS.format("keys"),))
    paper = PaperTable("nowhere, Tab. 0", {"Somebody": (0.5,)})
    batch = 2
    setting = "one"

    def __init__(self, keys: Sequence[str], out: Path, *, silent: Sequence[str] = (), **options: Any) -> None:
        self.all_keys, self.silent = list(keys), silent
        self.measured: list[str] = []
        super().__init__(out, BenchmarkOptions(**{"judge": "here", "out": out, **options}))

    def read(self, source: Path) -> tuple[Path, list[Any]]:
        return source, [SimpleNamespace(key=key) for key in self.all_keys]

    def settings(self, judge: str) -> dict[str, Any]:
        return super().settings(judge) | {"setting": self.setting}

    def texts(self) -> Mapping[str, Sequence[str]]:
        return {key: [key] for key in self.items}

    def measure(self, keys: Sequence[str], judge: Judge) -> list[Row]:
        self.measured += keys
        return [
            {"key": key, "error": "it fell silent"} if key in self.silent else {"key": key, "value": len(key)}
            for key in keys
        ]

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        values = np.array([[row["value"], 2 * row["value"]] for row in rows], dtype=float)
        return bootstrap([row["key"] for row in rows], lambda drawn: values[drawn].mean(0), draws=50)


KEYS = ["a", "bb", "ccc", "dddd", "eeeee"]


def run(benchmark: Numbers) -> Outcome:
    """Run it by a judge that is not asked."""
    return running.run(benchmark, PacoReward(Asked(lambda question: None)))


def test_every_item_is_measured_once_however_often_it_is_run(tmp_path: Path) -> None:
    bench = Numbers(KEYS, tmp_path, silent=["bb"])
    assert run(bench).missing == {"bb": "it fell silent"}
    bench.silent = ()
    first = run(bench)
    again = run(bench)
    assert bench.measured == [*KEYS, "bb"]
    assert first == again
    assert first.measured == first.total
    (mean, _) = first.table.lines[0].cells
    assert (mean.mean, mean.groups) == (3.0, 5)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 6


def test_processes_share_the_items_and_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In an earlier run of one process the judge had no answer about an item of the second process.
    run(Numbers(KEYS, tmp_path, silent=["bb"], limit=3))
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun numbers the processes
    outcomes, shares = [], []
    for index in range(2):
        monkeypatch.setenv("RANK", str(index))
        share = Numbers(KEYS, tmp_path, image_batch=1)
        outcomes.append(run(share))
        shares.append(share.measured)
    assert shares == [["ccc", "eeeee"], ["bb"]]
    assert [outcome.measured for outcome in outcomes] == [4, 5]


def test_items_that_were_trained_on_are_named_and_the_others_counted_apart(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "BB."}])
    (tmp_path / "config.yaml").write_text(f"prompts:\n  train: {tmp_path / 'train.jsonl'}\n")
    (tmp_path / "adapter").mkdir()
    outcome = run(Numbers(KEYS, tmp_path / "bench", judge=str(tmp_path / "adapter")))
    whole, clean, _ = outcome.table.lines
    assert clean.name == f"{whole.name}, without its training data"
    assert clean.cells[0].mean == 4.0
    assert "Leak: 2 of 5" in outcome.text


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    class Nested(Numbers):
        def measure(self, keys: Sequence[str], judge: Judge) -> list[Row]:
            run(Numbers(KEYS, tmp_path, judge="other"))
            return super().measure(keys, judge)

    with pytest.raises(ValueError, match="wait for its end"):
        run(Nested(KEYS, tmp_path))


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    run(Numbers(KEYS, tmp_path))
    with pytest.raises(ValueError, match="quantize was None and is 'int8'"):
        run(Numbers(KEYS, tmp_path, memory="lowest"))
    other = Numbers(KEYS, tmp_path)
    other.setting = "two"
    with pytest.raises(ValueError, match="setting was 'one' and is 'two'"):
        run(other)


def test_tables_mark_what_was_not_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Numbers([*KEYS, "f", "gg", "hhhhhh"], tmp_path, judge="here | there"))
    text = (tmp_path / "table.md").read_text()
    assert "| Somebody | published † | 0.500 | – |" in text
    assert "† Published in nowhere, Tab. 0, on its own data; not measured here." in text
    assert r"| here \| there | measured | 3.000 (" in text
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["published"] for row in summary["table"]["rows"]] == [False, True]
    assert summary["table"]["rows"][1]["values"]["Twice"]["mean"] is None
    assert text.startswith("## Numbers")
    monkeypatch.setattr(Numbers, "paper", Numbers.paper._replace(items=100))
    few = run(Numbers(KEYS, tmp_path / "own"))
    (line,) = few.table.lines  # rows of other data are no comparison
    assert not line.published
    assert "Somebody" not in few.text
