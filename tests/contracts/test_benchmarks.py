"""Every benchmark of the table measures its published format, and a right judge has the better figures.

Each example has three items or more, all of which a comparison of mean colours answers correctly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_examples import COLOURS, EXAMPLES, ColourJudge, Example, by_colour

from pacorl.bench.benchmarks import BENCHMARKS
from pacorl.bench.suite import Benchmark


@pytest.mark.slow
@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_a_right_judge_has_the_better_figures(name: str, example: Callable[[Path], Example], tmp_path: Path) -> None:
    data, options = example(tmp_path)
    benchmark = BENCHMARKS[name](data, options)
    assert benchmark.name == name
    right = _figures(benchmark, ColourJudge(by_colour))
    wrong = _figures(benchmark, ColourJudge(lambda question: 1 - by_colour(question)))
    compared = [column for column in right if math.isfinite(right[column]) and math.isfinite(wrong[column])]
    assert right.keys() - compared == ({"Aesthetics", "Average"} if name == "t2is" else set()), "all are numbers"

    # No figure may be worse with the correct judge, and one has to be better.
    worse = [column for column in compared if right[column] < wrong[column]]
    assert not worse, f"a wrong judge has the better {worse[0]}: {wrong[worse[0]]:g} and {right[worse[0]]:g}"
    assert any(right[column] > wrong[column] for column in compared)


def _figures(benchmark: Benchmark[Any], judge: ColourJudge) -> dict[str, float]:
    """Column → figure of the example by a judge."""
    assert benchmark.table.title
    for row, published in benchmark.paper.rows.items():
        assert 0 < len(published) <= len(benchmark.table.columns), row
    keys = list(benchmark.texts())
    assert len(keys) >= len(COLOURS)
    rows = benchmark.measure(keys, judge)
    assert [row["key"] for row in rows] == keys, "the rows of a measurement are not the requested items"
    assert not [row["error"] for row in rows if "error" in row]
    figures = benchmark.figures(rows)
    assert len(figures) == len(benchmark.table.columns), (
        f"{len(figures)} figures for {len(benchmark.table.columns)} columns"
    )
    return {column: figure.mean for column, figure in zip(benchmark.table.columns, figures, strict=True)}


def test_every_benchmark_has_an_example() -> None:
    assert {name for name, _ in EXAMPLES} == set(BENCHMARKS)
