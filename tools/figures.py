"""Measured figures: JSON in `measured/` and `claims/results`, rendered into the pages between two comments.

    python -m tools.figures                       # render README.md and docs/*.md again

A record `measured/NAME.json` is a table of numbers: `columns` (title and how it is shown), `rows`, and the `command`
and `machine` that measured them. `claims/NAME` is a record too: a row per arm, a column per metric, each with the ends
of its interval; `claims/NAME/predictions` has a row per prediction, by its number, and `claims/NAME/runs` one per run,
ARM-SEED. A cell of several numbers is a list. A page names a record, or one cell of it by its row and column, perhaps
shown in another form:

    <!-- table NAME -->                           up to the next <!-- end -->
    <!--= NAME; row; column; {:.2f} -->0.88<!-- -->

Nothing between the comments is written by hand. In the notes of a claim a figure is `[[NAME; row; column; {:.2f}]]`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pacorl.io.documents import read_json, typed
from pacorl.io.files import write_atomic
from tools.claims.claim import ROOT, Claim, Results, read_claims, read_results
from tools.claims.summary import judged, mean_of, runs_of

RECORDS = Path("measured")
TABLE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", re.DOTALL)
FIGURE = re.compile(r"<!--= ([^;]+); ([^;]+); ([^;]+?)(?:; ([^;]+?))? -->.*?<!-- -->", re.DOTALL)
NOTED = re.compile(r"\[\[([^;\]]+);\s([^;\]]+);\s([^;\]]+?)(?:;\s([^;\]]+?))?\]\]")
BEGUN = re.compile(r"<!-- table |<!--=")

Cell = str | float | list[float] | None


class Record(BaseModel):
    """A table of numbers and how it was measured."""

    model_config = ConfigDict(extra="forbid")
    command: str = ""
    machine: str = ""
    revision: str = ""
    """Commit that was measured, where it was noted."""
    columns: list[tuple[str, str]] = Field(min_length=1)
    """Title and format of each column; a cell's numbers are the format's arguments."""
    rows: list[list[Any]] = Field(min_length=1)

    def cell(self, row: str, column: str) -> tuple[Cell, str]:
        """Find a cell and its column's format.

        Raises:
            ValueError: No such row or column, or several.
        """
        titles = [title for title, _ in self.columns]
        names = [str(cells[0]) for cells in self.rows]
        for name, listed, kind in ((row, names, "row"), (column, titles, "column")):
            if name not in listed:
                raise ValueError(f"no {kind} {name!r}; there are {', '.join(listed)}")
            if listed.count(name) > 1:
                raise ValueError(f"{listed.count(name)} {kind}s are named {name!r}; give one a name of its own")
        number = titles.index(column)
        return self.rows[names.index(row)][number], self.columns[number][1]


def record_of(name: str, root: Path = ROOT) -> Record:
    """Read a record, or make one of a claim's results.

    Raises:
        ValueError: No such record or claim, or a claim with missing runs.
    """
    if not name.startswith("claims/"):
        return typed(read_json(root / RECORDS / f"{name}.json"), Record)

    _, claimed, *words = name.split("/")
    (claim,) = read_claims(root, only=[claimed])
    results = read_results(claim, root)
    missing = len(claim.arms) * len(claim.seeds) - len(results)
    if missing:
        raise ValueError(f"{missing} runs of the claim are missing; run them first: make claims")
    tables = {"": arms_of, "predictions": predictions_of, "runs": runs_table}
    kind = "/".join(words)
    if kind not in tables:
        raise ValueError(f"no table {kind!r} of a claim; there are {', '.join(filter(None, tables))}")
    return tables[kind](claim, results)


def arms_of(claim: Claim, results: Results) -> Record:
    """Tabulate the mean of each metric by arm, with the ends of its interval."""
    rows: list[list[Any]] = []
    for arm in claim.arms:
        runs = runs_of(arm, claim, results)
        cells: list[Any] = [arm]
        for metric in claim.metrics:
            interval = mean_of([run.metrics[metric] for run in runs])
            cells.append([interval.mean, interval.low, interval.high])
        rows.append(cells)
    return Record(columns=[("arm", "{}"), *((metric, "{:.3f}") for metric in claim.metrics)], rows=rows)


def runs_table(claim: Claim, results: Results) -> Record:
    """Tabulate each run by its name, ARM-SEED."""
    rows: list[list[Any]] = []
    for (arm, seed), result in results.items():
        rows.append([f"{arm}-{seed}", *(result.metrics[metric] for metric in claim.metrics)])
    return Record(columns=[("run", "{}"), *((metric, "{:.3f}") for metric in claim.metrics)], rows=rows)


def predictions_of(claim: Claim, results: Results) -> Record:
    """Tabulate the figures of the predictions, with the ends of their intervals, and the verdicts."""
    rows: list[list[Any]] = []
    for number, (_, figure, _, verdict) in enumerate(judged(claim, results), 1):
        cells = [figure.mean, figure.low, figure.high] if figure else None
        rows.append([str(number), cells, verdict])
    return Record(columns=[("number", "{}"), ("figure", "{:.3f}"), ("verdict", "{}")], rows=rows)


def reader(root: Path = ROOT) -> Callable[[str], Record]:
    """Return `record_of` with a memory: the means of a claim take a second."""
    return cache(partial(record_of, root=root))


def noted(text: str, records: Callable[[str], Record]) -> str:
    """Fill in the figures of a claim's notes, by a `reader`.

    Raises:
        ValueError: A figure names no record, row or column.
    """

    def fill(match: re.Match[str]) -> str:
        # YAML and its editors wrap a name over lines.
        record, row, column, form = (" ".join(name.split()) for name in match.groups(default=""))
        try:
            cell, own_form = records(record).cell(row, column)
            return shown(cell, form or own_form)
        except (ValueError, IndexError, TypeError, OSError) as error:
            raise ValueError(f"{match[0]}: {error}") from error

    return NOTED.sub(fill, text)


def shown(cell: Cell, form: str) -> str:
    """Render a cell: nothing for a missing one, text as it stands, a minus sign for negative numbers."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    text = form.format(*cell) if isinstance(cell, list) else form.format(cell)
    return re.sub(r"-(?=\d)", "−", text)


def table(record: Record) -> str:
    """Render a record, with its command below."""
    lines = [f"| {' | '.join(title for title, _ in record.columns)} |", "|---" * len(record.columns) + "|"]
    for row in record.rows:
        cells = [shown(cell, form) for cell, (_, form) in zip(row, record.columns, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")

    source = [f"`{record.command}`"] if record.command else []
    source += [words for words in (record.machine, f"revision {record.revision}" * bool(record.revision)) if words]
    if source:
        lines += ["", f"<small>{', '.join(source)}.</small>"]
    return "\n".join(lines)


def render(page: str, root: Path = ROOT) -> str:
    """Fill in all tables and figures of a page.

    Raises:
        ValueError: A comment names no record, row or column, and the message quotes it; or it has no end.
    """
    begun = len(BEGUN.findall(page))
    unended = begun - len(TABLE.findall(page)) - len(FIGURE.findall(page))
    if unended:
        raise ValueError(f"{unended} of {begun} comments have no end, or not the form of tools/figures.py")

    records = reader(root)

    def fill(match: re.Match[str]) -> str:
        comment = match[0].split("-->")[0] + "-->"
        try:
            record = records(match[1])
            if match.re is TABLE:
                return f"{comment}\n\n{table(record)}\n\n<!-- end -->"
            cell, form = record.cell(match[2], match[3])
            return f"{comment}{shown(cell, match[4] or form)}<!-- -->"
        except (ValueError, IndexError, TypeError, OSError) as error:
            raise ValueError(f"{comment}: {error}") from error

    return FIGURE.sub(fill, TABLE.sub(fill, page))


def pages(root: Path = ROOT) -> list[Path]:
    """Find the pages that may contain figures."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main() -> int:
    try:
        for path in pages():
            before = path.read_text("utf-8")
            after = render(before)
            if after != before:
                write_atomic(path, after)
                print(f"{path.relative_to(ROOT)}: rendered again")
    except ValueError as error:
        print(f"{path.relative_to(ROOT)}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
