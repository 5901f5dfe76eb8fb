"""Rankings in files: images of one's own, ordered by people, before they become comparisons.

    rankings = load_rankings("examples/rankings/rankings.csv")

A CSV has one ranking a line under a header, best candidate first. Candidates are separated by `|`, tied ones by ` = `:

    reference,candidates,theme,annotator
    fox/1.png,fox/2.png | fox/3.png = fox/4.png | owl/1.png,A fox with a green scarf,ann

A column for each rank (`reference,1,2,3` or `reference,best,second,worst`) does as well as `candidates`. A JSONL has
one object a line, in which a list within `candidates` is a tie:

    {"reference": "fox/1.png", "candidates": ["fox/2.png", ["fox/3.png", "fox/4.png"], "owl/1.png"]}

Paths are relative to the file. Other columns and keys are left alone, unless they look like a misspelt one.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pacorl.io.documents import blamed_on, check_keys, parse_object, read_text, text_field, text_lines

Criteria = Mapping[str, Mapping[str, str]]
"""dimension → name → text, as in the records of prompts."""

TEXTS = ("theme", "annotator", "group", "category")
KEYS = ("reference", "candidates", "criteria", *TEXTS)
EXAMPLE = "reference,candidates,theme"
SEPARATORS = ("|", ">", ";", ",")
"""What may stand between the candidates of one cell; the first that occurs counts."""
TIE = re.compile(r"(?<=\s)=(?=\s)")
"""Spaces belong to it: file names such as seed=3.png are common."""
RANK_COLUMN = re.compile(r"(?:(?:rank|candidate|image)[ _-]?)?(\d+)")
DIMENSION = "Consistency"
"""Holds criteria that name no dimension."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """One person's order of the candidates by their consistency with the reference."""

    line: int
    """Its line in the file, from 1."""
    reference: str
    tiers: tuple[tuple[str, ...], ...]
    """Best first; the candidates of one tier are tied."""
    theme: str = ""
    criteria: Criteria = field(default_factory=dict)
    annotator: str = ""
    group: str = ""
    """Rankings of one group are never divided between training and test; empty if the file says none."""
    category: str = ""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Best first."""
        return tuple(name for tier in self.tiers for name in tier)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The candidates' ranks, (1, 2, 2, 4) for a | b = c | d; empty if none are tied."""
        counts = [len(tier) for tier in self.tiers]
        ranks = tuple(1 + sum(counts[:index]) for index, count in enumerate(counts) for _ in range(count))
        return ranks if max(counts) > 1 else ()


def load_rankings(path: str | Path) -> list[Ranking]:
    """Reads every ranking of a CSV or JSONL file; images are not opened.

    Raises:
        ValueError: that names file, line, fault and fix.

    Example:
        for ranking in load_rankings("examples/rankings/rankings.csv"):
            print(ranking.reference, ranking.candidates)
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {".csv": _csv_records, ".jsonl": _jsonl_records}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: rankings are read from .csv and .jsonl files; save a spreadsheet as CSV (UTF-8)")
    rankings = []
    for line, record in readers[path.suffix.lower()](path):
        with blamed_on(f"{path}:{line}"):
            rankings.append(_ranking(record, line))
    if not rankings:
        raise ValueError(f"{path}: holds no rankings; give one a line, below a header such as {EXAMPLE} in a CSV")
    return rankings


def _ranking(record: Mapping[str, Any], line: int) -> Ranking:
    check_keys(record, KEYS, foreign=True)
    ranking = Ranking(
        line=line,
        reference=text_field(record, "reference").strip(),
        tiers=_tiers(record.get("candidates")),
        criteria=_criteria(record.get("criteria")),
        **{name: text_field(record, name).strip() for name in TEXTS},
    )
    candidates = ranking.candidates
    repeated = [name for name in dict.fromkeys(candidates) if candidates.count(name) > 1]
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
        raise ValueError("all candidates are tied, which says nothing; take the line out")
    return ranking


def _tiers(value: Any) -> tuple[tuple[str, ...], ...]:
    tiers = [entry if isinstance(entry, list) else [entry] for entry in value] if isinstance(value, list) else [[]]
    if not all(tier and all(isinstance(name, str) and name for name in tier) for tier in tiers):
        raise ValueError(
            f"'candidates' must be a list of paths, best first, got {value!r}; put tied ones into a list of their own"
        )
    return tuple(map(tuple, tiers))


def _criteria(value: Any) -> Criteria:
    """A text, a list of texts, names with texts, or dimensions of names with texts → dimensions."""
    if value in (None, "", [], {}):
        return {}
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list):
        texts = {f"Criterion {number}": text for number, text in enumerate(texts, 1)}
    if _are_texts(texts):
        return {DIMENSION: texts}
    if isinstance(texts, dict) and all(_are_texts(entries) for entries in texts.values()):
        return texts
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
    """The records under the header, in the form of the JSONL's."""
    text = read_text(path)
    # Whatever occurs most in the header, whose names hold none of these: spreadsheets of some countries write ";".
    delimiter = max((",", ";", "\t"), key=text.lstrip().partition("\n")[0].count)
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
    """(line, stripped cells) of each row that is not blank."""
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


def _csv_record(header: Sequence[str], cells: Sequence[str], ranks: Sequence[str], delimiter: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    # Spreadsheets leave out the last empty cells of a row, or add some.
    for name, cell in zip_longest(header, cells, fillvalue=""):
        if cell and not name:
            raise ValueError(
                f"{cell!r} stands under no column name; name its column (those of ranks 1, 2, 3 …), or put "
                f"quotes around a cell that holds {delimiter!r}"
            )
        row[name] = cell
    if ranks:
        tiers = _in_columns({name: row.pop(name) for name in ranks})
    else:
        separator = next((mark for mark in SEPARATORS if mark in row["candidates"]), SEPARATORS[0])
        tiers = [tier.strip() for tier in row["candidates"].split(separator) if tier.strip()]
    criteria = []
    for criterion in row.get("criteria", "").split("|"):
        if criterion.strip():
            criteria.append(criterion.strip())

    row.pop("", None)
    return {**row, "criteria": criteria, "candidates": [[name.strip() for name in TIE.split(tier)] for tier in tiers]}


def _in_columns(row: Mapping[str, str]) -> list[str]:
    """The cells of columns that hold one rank each, best first; of numbered ones only the last may be empty."""
    filled = [cell for cell in row.values() if cell]
    required = {"best", "worst"} if "best" in row else {*list(row)[: len(filled)]}
    empty = [name for name in row if name in required and not row[name]]
    if empty:
        raise ValueError(f"column {empty[0]!r} is empty; move the worse ones up")
    return filled


def _rank_columns(header: Sequence[str]) -> list[str]:
    """The columns that hold one rank each, best first; none if there is a column of candidates.

    Raises ValueError if candidates or references have no column.
    """
    fix = f"the first line names the columns, e.g. {EXAMPLE}"
    repeated = [name for name in dict.fromkeys(header) if name and header.count(name) > 1]
    if repeated:
        raise ValueError(f"two columns are called {repeated[0]!r}; {fix}")
    if "reference" not in header:
        raise ValueError(f"no column is called 'reference', there are {', '.join(header)}; {fix}")
    numbered = [name for name in header if RANK_COLUMN.fullmatch(name)]
    span = header[header.index("best") : header.index("worst") + 1] if {"best", "worst"} <= {*header} else []
    between = [name for name in span if name and name not in KEYS]
    forms = [form for form in (["candidates"] if "candidates" in header else [], numbered, between) if form]
    if len(forms) != 1:
        fault = (
            f"candidates stand in {' and in '.join(', '.join(form) for form in forms)}" if forms else "no candidates"
        )
        raise ValueError(f"{fault}; give one column 'candidates', or columns 1, 2, 3 …, or best … worst; {fix}")
    order = [int(match[1]) for name in numbered if (match := RANK_COLUMN.fullmatch(name))]
    if numbered and order != list(range(1, len(order) + 1)):
        raise ValueError(f"the rank columns are {', '.join(numbered)}; number them 1, 2, 3 … from left to right")
    return numbered or between
