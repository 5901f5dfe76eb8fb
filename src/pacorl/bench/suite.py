"""Benchmarks in general: items with keys, raw results of them, and tables of figures with the paper's rows.

A measured row of a table has intervals; a row copied from the paper is marked, in every form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from pacorl.bench.items import Dataset
from pacorl.core.ranking import Floats, Indices, Interval
from pacorl.io.documents import JsonObject, read_object

Row = dict[str, Any]
"""Raw result of one item: `key` and the judgements, or `error` with the reason why there are none."""
Texts = Mapping[str, Sequence[str]]
"""Item in order → its texts and ids."""
PUBLISHED = Path(__file__).with_name("published.json")
MARK = "†"


class PaperTable(NamedTuple):
    """Table printed in a paper."""

    source: str
    """Citation, e.g. `arXiv 2512.04784, Tab. 2`."""
    rows: Mapping[str, Sequence[float | None]]
    """Name → one figure per column, or fewer if the last columns are ours alone."""
    items: int = 0
    """Number of items of the published data, of one language if there are two."""


NO_PAPER = PaperTable("", {})


def paper_table(name: str) -> PaperTable:
    """Read a table of published.json."""
    table = read_object(PUBLISHED)[name]
    rows = {row: tuple(figures) for row, figures in table["rows"].items()}
    return PaperTable(table["source"], rows, table["items"])


class Benchmark(Protocol):
    """Items with keys, a measurement per item, figures over many; table and paper belong to the class."""

    # Properties, so that an entry may be a frozen dataclass and its constants need no annotations.
    @property
    def table(self) -> Table:
        """The table, without lines."""

    @property
    def paper(self) -> PaperTable:
        """Published rows for comparison, `NO_PAPER` without any."""

    @property
    def data(self) -> Dataset[Any]:
        """Items, and the records that were left out."""

    def settings(self) -> Mapping[str, Any]:
        """Inputs of the results, as JSON: the data, the judge, the questions."""

    def texts(self) -> Texts:
        """Item in order → its texts and ids, which are looked up in a model's training data."""

    def measure(self, keys: Sequence[str]) -> list[Row]:
        """Measure one row per item, in order. Raises ValueError if the data of one cannot be used."""

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """Compute the columns from the rows of measured items."""


@dataclass(frozen=True, slots=True)
class Line:
    """Row of a table."""

    name: str
    cells: tuple[Interval | float | None, ...]
    """Figures; None if there is none, a bare number if it has no interval."""
    published: bool = False
    """Whether it is copied from the paper."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    title: str
    columns: Sequence[str]
    lines: tuple[Line, ...] = ()
    source: str = ""
    """Citation of the published rows, e.g. `arXiv 2512.04784, Tab. 2`."""
    notes: Sequence[str] = ()
    resampled: str = ""
    """Groups that the intervals draw, such as `folders`."""

    @property
    def footnotes(self) -> list[str]:
        """Notes, and the meaning of intervals and of the mark of published rows, if there are any."""
        notes = [*self.notes]
        # Few items have no intervals.
        if any(isinstance(cell, Interval) and cell.low is not None for line in self.lines for cell in line.cells):
            notes.append(f"Intervals are 95 %, bootstrapped over {self.resampled}.")
        if any(line.published for line in self.lines):
            notes.append(f"{MARK} Published in {self.source}, on its own data; not measured here.")
        return notes

    @property
    def markdown(self) -> str:
        """A heading, a GitHub-flavoured table and its notes."""
        rows = [["", "source", *self.columns], ["---"] * (2 + len(self.columns))]
        for line in self.lines:
            source = f"published {MARK}" if line.published else "measured"
            rows.append([line.name, source, *self.texts(line)])

        # A bar or a line break in a name would end its cell.
        lines = []
        for row in rows:
            cells = [text.replace("|", "\\|").replace("\n", " ") for text in row]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n\n".join([f"## {self.title}", "\n".join(lines), *self.footnotes])

    def texts(self, line: Line) -> list[str]:
        """Printed cells of a line."""
        return [cell_text(cell) for cell in line.cells]

    def to_dict(self) -> JsonObject:
        """Table for programs."""
        # Figures under the columns' names, since a list of numbers could be misread.
        rows = []
        for line in self.lines:
            cells = [cell.document() if isinstance(cell, Interval) else cell for cell in line.cells]
            source = "published, not measured here" if line.published else "measured"
            rows.append({"name": line.name, "source": source, "values": dict(zip(self.columns, cells, strict=True))})
        return {"title": self.title, "rows": rows, "notes": self.footnotes}


def cell_text(cell: Interval | float | None) -> str:
    """`0.449 (0.431 to 0.467)`; – if there is no figure."""
    if cell is None:
        return "–"
    interval = cell if isinstance(cell, Interval) else Interval(cell)
    # NaN is the mean of no values.
    return "–" if isnan(interval.mean) else interval.text()


def macro_means(
    values_NK: Floats, group_N: Indices, column_N: Indices, drawn: Indices, *, shape: tuple[int, int]
) -> Floats:
    """Average values per group and column, then over the groups that have any.

    Args:
        values_NK: K values of each item.
        group_N: Group of each item, such as its task type.
        column_N: Column of each item, such as its dimension.
        drawn: Indices of items, with repetition.
        shape: Number of groups and of columns.

    Returns:
        (K, columns) means; NaN for a column without items.
    """
    cell_D = (group_N * shape[1] + column_N)[drawn]
    size = shape[0] * shape[1]
    count = np.bincount(cell_D, minlength=size).reshape(shape)
    sums = [np.bincount(cell_D, value_D, size).reshape(shape) for value_D in values_NK[drawn].T]
    # A draw may lack a group, and even a column.
    with np.errstate(invalid="ignore"):
        return np.asarray((np.array(sums) / np.maximum(count, 1)).sum(1) / (count > 0).sum(0))
