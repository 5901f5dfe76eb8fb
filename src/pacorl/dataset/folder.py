"""Records of a dataset folder: prompts in the T2IS form, instances to rank, and rankings.

Rankings come from the log of the annotation page (`answer_log`), which may be read while it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import StrictInt, ValidationError
from pydantic.dataclasses import dataclass

from pacorl.io.documents import JsonObject, blamed_on, faults_of, read_jsonl, write_jsonl
from pacorl.io.files import SHARED, safe_name
from pacorl.records.fields import Criteria
from pacorl.records.prompts import load_prompts
from pacorl.records.rankings import RECORD, Ranking, ranks_of
from pacorl.types import Prompt

Record = TypeVar("Record")


class PromptRecord(NamedTuple):
    """One line of prompts.jsonl: the prompt, and the whole T2IS record with its unused keys."""

    idx: str
    """Folder name of the prompt's images, and its group in every split."""
    prompt: Prompt
    row: JsonObject


OWN_QUESTION = "Which of these belong to the same set as the reference?"
"""The page's own question."""

Order = Sequence[int | Sequence[int]]
"""Candidates or slots, best first; a nested sequence is a tie."""


@dataclass(frozen=True, slots=True, config=RECORD)
class Instance:
    """One question to a person: rank `candidates` by their consistency with `reference`.

    Paths are relative to the dataset's folder, in POSIX form.
    """

    id: str
    group: str
    """Prompt of the instance; all instances of a group belong to one split."""
    reference: str
    candidates: tuple[str, ...]
    theme: str = ""
    category: str = ""
    task: str = ""
    criteria: Criteria | None = None
    must: tuple[tuple[StrictInt, StrictInt], ...] = ()
    """(better, worse) indices of candidates with a known order; only for control questions."""

    def __post_init__(self) -> None:
        count = len(self.candidates)
        if count < 2 or len(set(self.candidates)) < count:
            raise ValueError(f"an instance needs at least two different candidates, got {list(self.candidates)}")
        if any(not 0 <= min(pair) <= max(pair) < count for pair in self.must):
            raise ValueError(f"`must` names candidates beyond the {count} that there are: {list(self.must)}")

    @property
    def is_control(self) -> bool:
        return bool(self.must)


def ranking_of(
    shown: Instance, tiers: Sequence[Sequence[str]], *, annotator: str, adjudicated: bool = False, question: str = ""
) -> Ranking:
    """Ranking of an instance by one person; the candidates of one tier are tied."""
    return Ranking(
        shown.id,
        annotator,
        shown.group,
        shown.reference,
        tuple(chain.from_iterable(tiers)),
        shown.theme,
        shown.category,
        ranks_of(tiers),
        criteria=shown.criteria or {},
        adjudicated=adjudicated,
        question=question,
    )


def read_prompts(path: Path) -> list[PromptRecord]:
    """Read prompts. Raises ValueError as `load_prompts`, and if an idx is missing, repeated or no file name."""
    prompts = iter(load_prompts(path))

    def parse(**row: Any) -> PromptRecord:
        if row.get("idx") is None:
            raise ValueError("'idx' is missing; it names the prompt's folder of images")
        with blamed_on("idx"):
            return PromptRecord(safe_name(str(row["idx"])), next(prompts), row)

    repeated = "idx {0.idx!r} is already taken by an earlier record; ids must be unique"
    return _read(path, parse, "a prompt", repeated)


def read_instances(path: Path) -> list[Instance]:
    """Read instances. Raises ValueError with file and record if one is malformed or repeats an id."""
    return _read(path, Instance, "a ranking instance", "id {0.id!r} is already taken by an earlier record")


def read_answers(path: Path) -> list[Ranking]:
    """Read rankings. Raises ValueError with file and record if one is malformed or a person's second of an instance."""
    return _read(path, Ranking, "a ranking", "{0.annotator} has already ranked {0.instance}")


def write_records(path: Path, records: Iterable[Instance | Ranking], *, mode: int = SHARED) -> None:
    write_jsonl(path, map(asdict, records), mode=mode)


def _read(path: Path, kind: Callable[..., Record], name: str, repeated: str) -> list[Record]:
    """Read the records of a JSONL file; `repeated` is the message of the fault that two records share an id."""
    records: dict[str, Record] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        with blamed_on(f"{path}, record {number}"):
            try:
                record = kind(**row)
            except ValidationError as error:
                raise ValueError(f"not {name} ({faults_of(error)})") from None
            # The fault names the identifying fields, so it serves as their key.
            fault = repeated.format(record)
            if records.setdefault(fault, record) is not record:
                raise ValueError(fault)
    return list(records.values())


# --- the rankings of people --------------------------------------------------------------------------------------


def final_answers(answers: Sequence[Ranking]) -> list[Ranking]:
    """Rankings that count: only the decision for an adjudicated instance, otherwise every ranking."""
    decided = {answer.instance for answer in answers if answer.adjudicated}
    return [answer for answer in answers if answer.adjudicated or answer.instance not in decided]


def tiers_of(order: Order) -> list[list[int]]:
    """Turn an order into tiers: [2, [0, 3], 1] has three, the second with a tie."""
    return [list(entry) if isinstance(entry, Sequence) else [entry] for entry in order]


def order_of(tiers: Sequence[Sequence[int]], new: Sequence[int]) -> tuple[int | tuple[int, ...], ...]:
    """Turn tiers into an order, with `new[index]` in the place of each index."""
    order: list[int | tuple[int, ...]] = []
    for tier in tiers:
        renamed = tuple(new[index] for index in tier)
        order.append(renamed if len(tier) > 1 else renamed[0])
    return tuple(order)
