"""What a benchmark prints: figures beside the paper's rows, as Markdown, HTML and JSON.

A row that was measured here has intervals; a row that was copied from the paper says so, in every form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pacorl.core.ranking import Interval

MARK = "†"
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table."""

    name: str
    cells: tuple[Interval | float | None, ...]
    """None where there is no figure; a bare number has no interval."""
    published: bool = False
    """Copied from the paper, not measured here."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    source: str = ""
    """Where the published rows stand, e.g. `arXiv 2512.04784, Tab. 2`."""
    notes: tuple[str, ...] = ()
    digits: int = 3

    def __post_init__(self) -> None:
        for line in self.lines:
            assert len(line.cells) == len(self.columns), f"{self.title}: {line.name} has {len(line.cells)} cells"

    @property
    def footnotes(self) -> tuple[str, ...]:
        """The notes, and what the mark of published rows means."""
        copied = any(line.published for line in self.lines)
        return (*self.notes, *([f"{MARK} Published in {self.source}; not measured here."] if copied else []))


def cell(value: Interval | float | None, *, digits: int) -> str:
    """`0.449 [0.431, 0.467]`; – where there is no figure."""
    if value is None:
        return "–"
    if not isinstance(value, Interval):
        return _number(value, digits)
    if value.mean != value.mean:  # NaN: nothing to average
        return "–"
    mean = _number(value.mean, digits)
    if value.low is None or value.high is None:
        return mean
    return f"{mean} [{_number(value.low, digits)}, {_number(value.high, digits)}]"


def markdown(table: Table) -> str:
    """A heading, a GitHub-flavoured table and its notes."""
    rows = [["", "source", *table.columns], ["---"] * (2 + len(table.columns))]
    rows += [_cells(line, table.digits) for line in table.lines]
    text = "\n".join("| " + " | ".join(_escaped(text) for text in row) + " |" for row in rows)
    return "\n\n".join([f"## {table.title}", text, *table.footnotes])


def as_dict(table: Table) -> dict[str, Any]:
    """The table for programs."""
    return {
        "title": table.title,
        "columns": list(table.columns),
        "rows": [
            {
                "name": line.name,
                "source": "published, not measured here" if line.published else "measured",
                "values": {column: _plain(value) for column, value in zip(table.columns, line.cells, strict=True)},
            }
            for line in table.lines
        ],
        "published_in": table.source,
        "notes": list(table.notes),
    }


def html_rows(table: Table) -> list[dict[str, Any]]:
    """The lines as the page's template takes them."""
    return [
        {"name": line.name, "published": line.published, "cells": _cells(line, table.digits)[2:]}
        for line in table.lines
    ]


def _cells(line: Line, digits: int) -> list[str]:
    source = f"published {MARK}" if line.published else "measured"
    return [line.name, source, *(cell(value, digits=digits) for value in line.cells)]


def _plain(value: Interval | float | None) -> Any:
    if not isinstance(value, Interval):
        return value
    if value.mean != value.mean:
        return None
    return {"mean": value.mean, "low": value.low, "high": value.high}


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", MINUS)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
