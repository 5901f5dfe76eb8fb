"""What a benchmark is: items with keys, raw results of them, and tables of figures beside the paper's rows.

A row of a table that was measured here has intervals; a row that was copied from the paper says so, in every form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from pacorl.bench.items import Dataset
from pacorl.core.ranking import Interval
from pacorl.io.documents import read_object

Row = dict[str, Any]
"""One item's raw result: `key`, and what was judged, or `error` with the reason why nothing was."""
PUBLISHED = Path(__file__).with_name("published.json")
MARK = "†"
MINUS = "\N{MINUS SIGN}"

Member = TypeVar("Member")


class PaperTable(NamedTuple):
    """A table that a paper prints."""

    source: str
    """What it stands in, e.g. `arXiv 2512.04784, Tab. 2`."""
    rows: Mapping[str, Sequence[float | None]]
    """Name → one figure per column, or fewer if the last columns are ours alone."""


def paper_table(name: str) -> PaperTable:
    """A table of published.json."""
    table = read_object(PUBLISHED)[name]
    return PaperTable(table["source"], {row: tuple(figures) for row, figures in table["rows"].items()})


class Benchmark(Protocol):
    """Items with keys, a measurement per item, figures of many; title, columns and paper are the class's own."""

    # Properties, so that an entry may be a frozen dataclass and its constants need no annotations.
    @property
    def title(self) -> str:
        """The heading of the tables."""

    @property
    def columns(self) -> Sequence[str]:
        """The names of the figures."""

    @property
    def paper(self) -> PaperTable | None:
        """Published rows to stand beside the measured one, if there are any."""

    @property
    def data(self) -> Dataset[Any, Any]:
        """The items, and the records that were left out."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines under the main table."""

    def settings(self) -> Mapping[str, Any]:
        """What the results depend on, as JSON: the data, who judges, what is asked."""

    def texts(self) -> Mapping[str, Sequence[str]]:
        """Every wanted item, in order → the texts and ids by which a model that was trained on it would know it."""

    def measure(self, keys: Sequence[str]) -> list[Row]:
        """One row per item, in order. Raises BadItemError if the data of one cannot be used."""

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """The columns from the rows of measured items."""

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        """Tables by category, task or language."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table."""

    name: str
    cells: tuple[Interval | float | None, ...]
    """None if there is no figure; a bare number has no interval."""
    published: bool = False
    """Copied from the paper, not measured here."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    title: str
    columns: Sequence[str]
    lines: tuple[Line, ...]
    source: str = ""
    """What the published rows stand in, e.g. `arXiv 2512.04784, Tab. 2`."""
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for line in self.lines:
            # A row that is too short would stand under the heads of other columns.
            assert len(line.cells) == len(self.columns), f"{self.title}: {line.name} has {len(line.cells)} cells"

    @property
    def footnotes(self) -> tuple[str, ...]:
        """The notes, and what the mark of published rows means."""
        copied = any(line.published for line in self.lines)
        return (*self.notes, *([f"{MARK} Published in {self.source}; not measured here."] if copied else []))

    @property
    def markdown(self) -> str:
        """A heading, a GitHub-flavoured table and its notes."""
        rows = [["", "source", *self.columns], ["---"] * (2 + len(self.columns))]
        rows += [
            [line.name, f"published {MARK}" if line.published else "measured", *self.texts(line)] for line in self.lines
        ]
        # A bar or a line break in a name would end its cell.
        escaped = []
        for row in rows:
            escaped.append([text.replace("|", "\\|").replace("\n", " ") for text in row])

        return "\n\n".join(
            [f"## {self.title}", "\n".join(f"| {' | '.join(row)} |" for row in escaped), *self.footnotes]
        )

    def texts(self, line: Line) -> list[str]:
        """The cells of a line as they are printed."""
        return [cell_text(cell) for cell in line.cells]

    def to_dict(self) -> dict[str, Any]:
        """The table for programs."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": [
                {
                    "name": line.name,
                    "source": "published, not measured here" if line.published else "measured",
                    "values": {column: _plain(cell) for column, cell in zip(self.columns, line.cells, strict=True)},
                }
                for line in self.lines
            ],
            "published_in": self.source,
            "notes": list(self.notes),
        }


def cell_text(cell: Interval | float | None) -> str:
    """`0.449 [0.431, 0.467]`; – if there is no figure."""
    interval = cell if isinstance(cell, Interval) else Interval(float("nan") if cell is None else cell)
    # NaN is the mean of nothing.
    if isnan(interval.mean):
        return "–"
    ends = [end for end in (interval.low, interval.high) if end is not None]
    mean, *bounds = (f"{number:.3f}".replace("-", MINUS) for number in (interval.mean, *ends))
    return f"{mean} [{', '.join(bounds)}]" if bounds else mean


def _plain(cell: Interval | float | None) -> Any:
    if not isinstance(cell, Interval):
        return cell
    # JSON has no NaN.
    return None if isnan(cell.mean) else {"mean": cell.mean, "low": cell.low, "high": cell.high}


def grouped(
    title: str,
    columns: Sequence[str],
    members: Iterable[Member],
    group_of: Callable[[Member], str],
    figures: Callable[[Sequence[Member]], Sequence[Interval]],
) -> list[Table]:
    """A table with a line per group, in the order of their names; no table of no groups."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(group_of(member), []).append(member)
    lines = []
    for name, group in sorted(groups.items()):
        lines.append(Line(f"{name or 'no category'} ({len(group)})", tuple(figures(group))))

    return [Table(title, columns, tuple(lines))] if lines else []
