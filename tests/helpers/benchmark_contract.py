"""The contract of a benchmark: its example rows are measured, and a correct judge has better figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pacorl.core.ranking import Interval
from pacorl.judge.paco_reward import PacoReward
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from pacorl.bench.benchmarks import BenchmarkSpec
    from pacorl.bench.suite import Row

EXAMPLE_ROWS = 3
"""Minimum number of items of an example."""


class ColourJudge:
    """Judge by the distance of mean colours: close ones are consistent, or inconsistent if `contrary`."""

    def __init__(self, *, contrary: bool = False) -> None:
        self.contrary = contrary

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        return [Verdict(self._p_yes(question)) for question in questions]

    def explain(self, question: Question) -> str:
        score = round(10 * self._p_yes(question), 2)
        return json.dumps({"reasoning": "The mean colours were compared.", "score": [score, score]})

    def _p_yes(self, question: Question) -> float:
        first, *colours = [_mean_colour(image) for image in question.images]
        distance = 0.0
        for other in colours:
            distance = max(distance, float(np.abs(first - other).max()))
        likeness = 0.05 + 0.9 * math.exp(-6 * distance)
        return 1 - likeness if self.contrary else likeness


def _mean_colour(image: Image) -> NDArray[np.float64]:
    """Compute the mean colour, (3,) in 0..1."""
    mean: NDArray[np.float64] = (np.asarray(image.convert("RGB"), dtype=np.float64) / 255).mean((0, 1))
    return mean


def check_benchmark(spec: BenchmarkSpec[Any, Any], folder: Path) -> None:
    """Check that a benchmark's example can be read and measured, and favours a correct judge.

    Args:
        folder: an empty folder for the example.

    Raises:
        AssertionError: with the fault, if the benchmark breaks the contract.
    """
    assert spec.example is not None, "the spec has no example rows"
    data, options = spec.example(folder)
    items = spec.read(data, options)

    # A correct judge, and one that prefers the opposite.
    right = _figures(spec, items, options, folder, ColourJudge())
    wrong = _figures(spec, items, options, folder, ColourJudge(contrary=True))

    compared = []
    for column in right:
        if math.isfinite(right[column]) and math.isfinite(wrong[column]):
            compared.append(column)

    assert compared, "no figure of the example is a number"

    # No figure may be worse with the correct judge, and one has to be better.
    worse = [column for column in compared if right[column] < wrong[column]]
    assert not worse, f"a wrong judge has the better {worse[0]}: {wrong[worse[0]]:g} and {right[worse[0]]:g}"
    assert any(right[column] > wrong[column] for column in compared), (
        "every figure is equal for a right and a wrong judge"
    )


def _figures(
    spec: BenchmarkSpec[Any, Any], items: Any, options: Any, folder: Path, judge: ColourJudge
) -> dict[str, float]:
    """Compute column → figure of the example by a judge."""
    benchmark = spec.build(items, options, PacoReward(judge), folder)
    keys = list(benchmark.texts())
    assert len(keys) >= EXAMPLE_ROWS, f"the example has {len(keys)} items; give at least {EXAMPLE_ROWS}"

    rows: list[Row] = benchmark.measure(keys)
    assert [row["key"] for row in rows] == keys, "the rows of a measurement are not the requested items"
    faults = [row["error"] for row in rows if "error" in row]
    assert not faults, f"an item of the example was not measured: {faults[0]}"

    figures: Sequence[Interval] = benchmark.figures(rows)
    assert len(figures) == len(benchmark.columns), f"{len(figures)} figures for {len(benchmark.columns)} columns"
    benchmark.breakdowns(rows)
    return {column: figure.mean for column, figure in zip(benchmark.columns, figures, strict=True)}
