"""Files of rankings: images ordered by people, the source of comparisons.

    rankings = load_rankings("examples/rankings/rankings.csv")

A CSV has one ranking a line under a header, best candidate first. Candidates are separated by `|`, tied ones by ` = `:

    reference,candidates,theme,annotator
    fox/1.png,fox/2.png | fox/3.png = fox/4.png | owl/1.png,A fox with a green scarf,ann

One column per rank (`reference,1,2,3` or `reference,best,second,worst`) may replace `candidates`. A JSONL has one
object a line, in which a list within `candidates` is a tie:

    {"reference": "fox/1.png", "candidates": ["fox/2.png", ["fox/3.png", "fox/4.png"], "owl/1.png"]}

Paths are relative to the file. Other columns and keys are ignored, unless they look like a misspelt one.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pacorl.io.documents import JsonObject, blamed_on, check_keys, parse_object, read_text, text_field, text_lines

Criteria = Mapping[str, Mapping[str, str]]
"""dimension → name → text, as in the records of prompts."""

TEXTS = ("theme", "annotator", "group", "category")
KEYS = ("reference", "candidates", "criteria", *TEXTS)
EXAMPLE = "reference,candidates,theme"
SEPARATORS = ("|", ">", ";", ",")
"""Separators of the candidates in one cell; the first that occurs counts."""
TIE = re.compile(r"(?<=\s)=(?=\s)")
"""Requires spaces: file names such as seed=3.png are common."""
RANK_COLUMN = re.compile(r"(?:(?:rank|candidate|image)[ _-]?)?(\d+)")
DIMENSION = "Consistency"
"""Dimension of criteria that name none."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """One person's order of the candidates by their consistency with the reference."""

    line: int
    """Line in the file, from 1."""
    reference: str
    tiers: tuple[tuple[str, ...], ...]
    """Best first; the candidates of one tier are tied."""
    theme: str = ""
    criteria: Criteria = field(default_factory=dict)
    annotator: str = ""
    group: str = ""
    """Rankings of one group are never divided between training and test; empty if the file has no groups."""
    category: str = ""

    @property
    def candidates(self) -> tuple[str, ...]:
        """All candidates, best first."""
        return tuple(name for tier in self.tiers for name in tier)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The candidates' ranks, (1, 2, 2, 4) for a | b = c | d."""
        return ranks_of(self.tiers)


def ranks_of(tiers: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Rank every candidate from 1, best first; the candidates of one tier share a rank."""
    ranks: list[int] = []
    for tier in tiers:
        ranks += [len(ranks) + 1] * len(tier)
    return tuple(ranks)


def load_rankings(path: str | Path) -> list[Ranking]:
    """Read every ranking of a CSV or JSONL file; images are not opened.

    Raises:
        ValueError: naming file, line, fault and fix.

    Example:
        for ranking in load_rankings("examples/rankings/rankings.csv"):
            print(ranking.reference, ranking.candidates)
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".csv":
        records = _csv_records(path)
    elif suffix == ".jsonl":
        records = _jsonl_records(path)
    else:
        raise ValueError(f"{path}: rankings are read from .csv and .jsonl files; save a spreadsheet as CSV (UTF-8)")

    rankings = []
    for line, record in records:
        with blamed_on(f"{path}:{line}"):
            rankings.append(_ranking(record, line))
    if not rankings:
        raise ValueError(f"{path}: holds no rankings; give one a line, below a header such as {EXAMPLE} in a CSV")
    return rankings


def _ranking(record: JsonObject, line: int) -> Ranking:
    # The fields.
    check_keys(record, KEYS, foreign=True)
    ranking = Ranking(
        line=line,
        reference=text_field(record, "reference").strip(),
        tiers=_tiers(record.get("candidates")),
        criteria=_criteria(record.get("criteria")),
        **{name: text_field(record, name).strip() for name in TEXTS},
    )

    # A ranking from which nothing, or the wrong thing, would be learnt.
    candidates = ranking.candidates
    repeated = [name for name in candidates if candidates.count(name) > 1]
    if not ranking.reference:
        raise ValueError("'reference' is empty; name the image that the candidates are compared with")
    if len(candidates) < 2:
        raise ValueError(
            f"a ranking needs two candidates or more, this has {list(candidates)}; separate them by {SEPARATORS[0]!r}"
        )
    if repeated:
        raise ValueError(f"candidate {repeated[0]!r} is ranked twice; name each once")
    if ranking.reference in candidates:
        raise ValueError(f"{ranking.reference!r} is the reference and a candidate; take it out of the candidates")
    if len(ranking.tiers) < 2:
        raise ValueError("all candidates are tied, so there is nothing to learn; remove the line")
    return ranking


def _tiers(value: Any) -> tuple[tuple[str, ...], ...]:
    fault = f"'candidates' must be a list of paths, best first, got {value!r}; put tied candidates into a nested list"
    if not isinstance(value, list):
        raise ValueError(fault)
    tiers = []
    for entry in value:
        tier = entry if isinstance(entry, list) else [entry]
        if not tier or not all(isinstance(name, str) and name for name in tier):
            raise ValueError(fault)
        tiers.append(tuple(tier))
    return tuple(tiers)


def _criteria(value: Any) -> Criteria:
    """Convert a text, a list of texts, names with texts, or dimensions of names with texts to the last form."""
    if value in (None, "", [], {}):
        return {}
    criteria = [value] if isinstance(value, str) else value
    if isinstance(criteria, list):
        criteria = {f"Criterion {number}": text for number, text in enumerate(criteria, 1)}
    if _are_texts(criteria):
        return {DIMENSION: criteria}
    if isinstance(criteria, dict) and all(_are_texts(texts) for texts in criteria.values()):
        return criteria
    raise ValueError(f"'criteria' must be a text, texts by name, or dimensions of these, got {value!r}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(text, str) and text for text in value.values())


# --- the two forms ---------------------------------------------------------------------------------------------


def _jsonl_records(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in text_lines(path):
        with blamed_on(f"{path}:{number}"):
            record = parse_object(line, kind="ranking")
        yield number, record


def _csv_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the records under the header in the form of the JSONL's."""
    text = read_text(path)
    # The commonest in the header, whose names contain none of these: spreadsheets of some countries write ";".
    first_line = text.lstrip().partition("\n")[0]
    delimiter = max((",", ";", "\t"), key=first_line.count)

    lines = _csv_lines(path, text, delimiter)
    _, first = next(lines, (1, [""]))
    header = [name.lower() for name in first]
    with blamed_on(f"{path}:1"):
        ranks = _rank_columns(header)
    for line, cells in lines:
        with blamed_on(f"{path}:{line}"):
            record = _csv_record(header, cells, ranks, delimiter)
        yield line, record


def _csv_lines(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the stripped cells of each row, except blank rows."""
    # newline="": the reader must see the line breaks within quoted cells as they are.
    # strict: a stray quote is a fault and no part of a path.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    start = 1
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                yield start, cells
            start = reader.line_num + 1  # a quoted cell may run over several lines; a row is named by its first
    except csv.Error as error:
        raise ValueError(f"{path}:{start}: not valid CSV ({error})") from None


def _csv_record(header: Sequence[str], cells: Sequence[str], ranks: Sequence[str], delimiter: str) -> JsonObject:
    row: JsonObject = {}
    # Spreadsheets leave out the last empty cells of a row, or add some.
    for name, cell in zip_longest(header, cells, fillvalue=""):
        if cell and not name:
            raise ValueError(
                f"{cell!r} has no column name; name its column (ranks are 1, 2, 3 …), or put quotes around a cell "
                f"with {delimiter!r}"
            )
        row[name] = cell
    row.pop("", None)

    if ranks:
        # Best first; of numbered columns only the last may be empty.
        ranked = [row.pop(name) for name in ranks]
        tiers = [tier for tier in ranked if tier]
        required = (0, -1) if "best" in ranks else range(len(tiers))
        for index in required:
            if not ranked[index]:
                raise ValueError(f"column {ranks[index]!r} is empty; move the worse candidates up")
    else:
        cell = row["candidates"]
        separators = [mark for mark in SEPARATORS if mark in cell] or SEPARATORS
        tiers = _split(cell, separators[0])

    # Ties within a rank.
    candidates = []
    for tier in tiers:
        candidates.append([name.strip() for name in TIE.split(tier)])
    return {**row, "criteria": _split(row.get("criteria", ""), "|"), "candidates": candidates}


def _split(cell: str, separator: str) -> list[str]:
    """Split a cell into its parts, without blanks around them and without empty parts."""
    return [entry.strip() for entry in cell.split(separator) if entry.strip()]


def _rank_columns(header: Sequence[str]) -> list[str]:
    """Return the columns of one rank each, best first; none if there is a column `candidates`.

    Raises:
        ValueError: if candidates or references have no column.
    """
    # One column for the reference, and no name twice.
    fix = f"the first line names the columns, e.g. {EXAMPLE}"
    for name, count in Counter(header).items():
        if name and count > 1:
            raise ValueError(f"two columns are called {name!r}; {fix}")
    if "reference" not in header:
        raise ValueError(f"no column is called 'reference', there are {', '.join(header)}; {fix}")

    # The three forms: one column `candidates`, numbered columns, or all columns from `best` to `worst`.
    numbered = []
    order = []
    for name in header:
        match = RANK_COLUMN.fullmatch(name)
        if match:
            numbered.append(name)
            order.append(int(match[1]))
    between: list[str] = []
    if "best" in header and "worst" in header:
        span = header[header.index("best") : header.index("worst") + 1]
        between = [name for name in span if name and name not in KEYS]
    single = [name for name in header if name == "candidates"]

    # Exactly one of the forms.
    forms = [", ".join(form) for form in (single, numbered, between) if form]
    if len(forms) != 1:
        fault = f"candidates are in {' and in '.join(forms)}" if forms else "no candidates"
        raise ValueError(f"{fault}; give one column 'candidates', or columns 1, 2, 3 …, or best … worst; {fix}")
    if numbered and order != list(range(1, len(order) + 1)):
        raise ValueError(f"the rank columns are {', '.join(numbered)}; number them 1, 2, 3 … from left to right")
    return numbered or between
