"""Files of rankings: images ordered by people, the source of comparisons.

    rankings = load_rankings("examples/rankings/rankings.csv")

A CSV has one ranking a line under a header, best candidate first. `|` separates candidates, ` = ` ties them. Columns
are separated by commas, semicolons or tabs:

    reference,candidates,theme,annotator
    fox/1.png,fox/2.png | fox/3.png = fox/4.png | owl/1.png,A fox with a green scarf,ann

A JSONL has one object a line, in which a list within `candidates` is a tie:

    {"reference": "fox/1.png", "candidates": ["fox/2.png", ["fox/3.png", "fox/4.png"], "owl/1.png"]}

Both may have `theme`, `annotator`, `group` and `category`, a JSONL also `criteria`: dimension → name → text. Paths are
relative to the file. Other columns and keys are ignored, unless they look like a misspelt one.
"""

import csv
import io
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from pacorl.io.documents import JsonObject, blamed_on, numbered_lines, parse_object, read_text
from pacorl.records.fields import Criteria, Name, Text, validated

EXAMPLE = "reference,candidates,theme"
MOST_FAULTS = 20
"""Faults of a file that one message names."""
TIE = re.compile(r"(?<=\s)=(?=\s)")
"""Requires spaces: file names such as seed=3.png are common."""
# People number their groups and ids, and JSON then has numbers.
RECORD = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def _as_tier(entry: Any) -> Any:
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, list):
        return tuple(entry)
    return entry


Tier = Annotated[tuple[Name, ...], Field(min_length=1), BeforeValidator(_as_tier)]
"""Candidates that are tied, or one candidate."""


@dataclass(frozen=True, slots=True, config=RECORD)
class Ranking:
    """One person's ranking of the candidates of one instance."""

    instance: str
    """Id of the question; the line number if `load_rankings` read the ranking."""
    annotator: str
    group: str
    """Rankings of one group are never divided between training and test; empty if a file has no groups."""
    reference: str
    tiers: tuple[Tier, ...]
    """Best first; the candidates of one tier are tied."""
    theme: str = ""
    category: str = ""
    criteria: Criteria = Field(default_factory=dict)
    """Criteria of the ranking, if they were recorded."""
    adjudicated: bool = False
    """Whether it is an adjudicator's decision, which replaces the rankings of its instance."""
    own_group: bool = False
    """Whether the ranking's file names its group; a theme shared with other groups is then no tie."""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Candidates, best first."""
        return tuple(chain.from_iterable(self.tiers))

    @property
    def images(self) -> tuple[str, ...]:
        """The reference and the candidates, best first."""
        return self.reference, *self.candidates


def _of_two_tiers(tiers: list[Tier]) -> list[Tier]:
    if len([*chain.from_iterable(tiers)]) < 2:
        raise ValueError("there are fewer than two; separate candidates by ' | ' in a CSV")
    if len(tiers) < 2:
        raise ValueError("all are tied, and nothing could be learnt; take the ranking out")
    return tiers


class RankingRecord(BaseModel):
    """A ranking in a file of the user's."""

    model_config = ConfigDict(str_strip_whitespace=True)

    reference: Name
    candidates: Annotated[list[Tier], AfterValidator(_of_two_tiers)]
    """Best first; a list is a tie."""
    criteria: Criteria = {}
    theme: Text = ""
    annotator: Text = ""
    group: Text = ""
    category: Text = ""


def load_rankings(path: str | Path) -> list[Ranking]:
    """Read every ranking of a .jsonl, or of a file of any other name as CSV; images are not opened.

    Raises:
        ValueError: naming file, line, fault and fix, with a line for each of the first faults.

    Example:
        for ranking in load_rankings("examples/rankings/rankings.csv"):
            print(ranking.reference, ranking.tiers)
    """
    path = Path(path)
    rankings = []
    faults: list[str] = []
    is_jsonl = path.suffix.lower() == ".jsonl"
    for line, record in numbered_lines(read_text(path)) if is_jsonl else _csv_records(path, faults):
        with blamed_on(f"{path}:{line}", faults):
            row = validated(parse_object(record) if isinstance(record, str) else record, RankingRecord)
            images = [row.reference, *chain.from_iterable(row.candidates)]
            for name in images:
                # A repeated image would be compared with itself.
                if images.count(name) > 1:
                    raise ValueError(f"{name!r} is named twice; name the reference and each candidate once")
            fields = row.model_dump(exclude={"candidates"})
            rankings.append(Ranking(str(line), tiers=tuple(row.candidates), own_group=bool(row.group), **fields))
    if faults:
        raise ValueError("\n  ".join(faults[:MOST_FAULTS]))
    if not rankings:
        raise ValueError(f"{path}: holds no rankings; give one a line, below a header such as {EXAMPLE} in a CSV")
    return rankings


def _csv_records(path: Path, faults: list[str]) -> Iterator[tuple[int, JsonObject]]:
    """Yield the records under the header in the form of the JSONL's; lines that are none become faults."""
    text = read_text(path)
    # Spreadsheets of countries with decimal commas separate columns by semicolons.
    separator = max(",;\t", key=text.partition("\n")[0].count)
    # newline="": the reader must see the line breaks within quoted cells as they are.
    # strict: a stray quote is a fault and no part of a path.
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    try:
        missing = {"reference", "candidates"}.difference(rows.fieldnames or ())
        if missing:
            fix = f"the first line names the columns, e.g. {EXAMPLE}"
            raise ValueError(f"{path}:1: there is no column {max(missing)!r}; {fix}")
        for row in rows:
            # The reader's marks of surplus and of missing cells.
            if None in (*row, *row.values()):
                fix = f"separate them by {separator!r}, quote one that holds it, and separate candidates by ' | '"
                faults.append(f"{path}:{rows.line_num}: a cell for each column is needed; {fix}")
            elif any(row.values()):
                tiers = row["candidates"].split("|") if row["candidates"] else []
                yield rows.line_num, {**row, "candidates": [TIE.split(tier) for tier in tiers]}
    except csv.Error as error:
        faults.append(f"{path}:{rows.line_num + 1}: not valid CSV ({error})")
