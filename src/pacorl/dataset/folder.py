"""Records of a dataset folder: prompts in the T2IS form, instances to rank, and rankings.

Rankings come from the log of the annotation page (`answer_log`), which may be read while it serves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from pydantic import StrictInt
from pydantic.dataclasses import dataclass

from pacorl.io.documents import JsonObject, blamed_on, read_jsonl, read_records, typed, write_jsonl
from pacorl.io.files import SHARED, safe_name
from pacorl.records.fields import Criteria, by_key
from pacorl.records.prompts import load_prompts
from pacorl.records.rankings import RECORD, Ranking
from pacorl.types import Prompt


class PromptRecord(NamedTuple):
    """One line of prompts.jsonl: the prompt, and the whole T2IS record with its unused keys."""

    idx: str
    """Folder name of the prompt's images, and its group in every split."""
    prompt: Prompt
    row: JsonObject


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
    criteria: Criteria | None = None
    foreign: StrictInt | None = None
    """Index of a candidate of another prompt, which must be the last; only for control questions."""

    def __post_init__(self) -> None:
        count = len(self.candidates)
        if count < 2 or len(set(self.candidates)) < count:
            raise ValueError(f"an instance needs at least two different candidates, got {list(self.candidates)}")

    @property
    def is_control(self) -> bool:
        return self.foreign is not None


def read_prompts(path: Path) -> list[PromptRecord]:
    """Read prompts. Raises ValueError as `load_prompts`, and if an idx is missing, repeated or no file name."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; run `pacorl dataset prompts`, or put prompts of your own there")
    records = []
    for prompt, row in zip(load_prompts(path), read_jsonl(path), strict=True):
        with blamed_on(f"{prompt.origin}: idx"):
            if row.get("idx") is None:
                raise ValueError("is missing; it names the prompt's folder of images")
            records.append(PromptRecord(safe_name(str(row["idx"])), prompt, row))
    return list(by_key(records, attrgetter("idx"), source=path).values())


def read_instances(path: Path) -> list[Instance]:
    """Read instances. Raises ValueError with file and line if one is malformed or repeats an id."""
    fix = "write it for images of your own, or let `pacorl dataset pair` make it of generated grids"
    instances = read_records(path, partial(typed, kind=Instance), fix=fix)
    return list(by_key(instances, attrgetter("id"), source=path).values())


def read_answers(path: Path) -> list[Ranking]:
    """Read rankings. Raises ValueError with file and line if one is malformed or a person's second of an instance."""
    answers = read_records(path, partial(typed, kind=Ranking))
    return list(by_key(answers, attrgetter("annotator", "instance"), source=path).values())


def write_records(path: Path, records: Iterable[Instance | Ranking], *, mode: int = SHARED) -> None:
    write_jsonl(path, map(asdict, records), mode=mode)


def final_answers(answers: Sequence[Ranking]) -> list[Ranking]:
    """Rankings that count: only the decision for an adjudicated instance, otherwise every ranking."""
    decided = {answer.instance for answer in answers if answer.adjudicated}
    return [answer for answer in answers if answer.adjudicated or answer.instance not in decided]
