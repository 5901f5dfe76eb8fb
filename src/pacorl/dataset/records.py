"""The records of a dataset folder: prompts in the T2IS form, ranking instances, and their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from pacorl.data.records import load_prompts
from pacorl.io.documents import read_jsonl, write_jsonl
from pacorl.io.files import safe_name
from pacorl.types import Prompt


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One line of prompts.jsonl: the prompt, and the whole T2IS record with the keys that nothing here reads."""

    idx: str
    """Names the prompt's folder of images, and is its group in every split."""
    prompt: Prompt
    row: Mapping[str, Any]


def read_prompts(path: Path) -> list[PromptRecord]:
    """The records of a T2IS JSONL file.

    Raises ValueError as `load_prompts` does, and for an idx that is missing, taken, or cannot name a folder.
    """
    prompts = load_prompts(path)
    records: dict[str, PromptRecord] = {}
    for number, (row, prompt) in enumerate(zip(read_jsonl(path), prompts, strict=True), 1):
        where = f"{path}, record {number}"
        idx = _name(row.get("idx"), where=where)
        if idx in records:
            raise ValueError(f"{where}: idx {idx!r} is already taken by an earlier record; ids must be unique")
        records[idx] = PromptRecord(idx, prompt, row)
    return list(records.values())


def _name(idx: object, *, where: str) -> str:
    if idx is None:
        raise ValueError(f"{where}: 'idx' is missing; it names the prompt's folder of images")
    try:
        return safe_name(str(idx))
    except ValueError as error:
        raise ValueError(f"{where}: idx {error}") from None


def write_prompts(path: Path, records: Sequence[PromptRecord]) -> None:
    write_jsonl(path, [record.row for record in records])


@dataclass(frozen=True, slots=True)
class Instance:
    """One question to a person: rank `candidates` by their consistency with `reference`.

    Paths are relative to the dataset's folder, in POSIX form.
    """

    id: str
    group: str
    """The prompt; no split may cut through it."""
    reference: str
    candidates: tuple[str, ...]
    theme: str = ""
    category: str = ""
    task: str = ""
    criteria: Mapping[str, Mapping[str, str]] | None = None
    must: tuple[tuple[int, int], ...] = ()
    """Only control questions have these: (better, worse) candidates whose order is known."""

    @property
    def is_control(self) -> bool:
        return bool(self.must)


def read_instances(path: Path) -> list[Instance]:
    """Raises ValueError with file and record if one is malformed or its id is taken."""
    instances: dict[str, Instance] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        instance = _instance(row, where=f"{path}, record {number}")
        if instance.id in instances:
            raise ValueError(f"{path}, record {number}: id {instance.id!r} is already taken by an earlier record")
        instances[instance.id] = instance
    return list(instances.values())


def write_instances(path: Path, instances: Sequence[Instance]) -> None:
    write_jsonl(path, [asdict(instance) for instance in instances])


def _instance(row: Mapping[str, Any], *, where: str) -> Instance:
    try:
        instance = Instance(**row)
    except TypeError as error:
        raise ValueError(
            f"{where}: not a ranking instance ({str(error).removeprefix('Instance.__init__() ')})"
        ) from None
    count = len(instance.candidates)
    if count < 2 or len(set(instance.candidates)) < count:
        raise ValueError(
            f"{where}: an instance needs at least two different candidates, got {list(instance.candidates)}"
        )
    must = tuple((int(better), int(worse)) for better, worse in instance.must)
    if any(not 0 <= index < count for pair in must for index in pair):
        raise ValueError(f"{where}: `must` names candidates beyond the {count} that there are: {list(must)}")
    return Instance(**{**row, "candidates": tuple(instance.candidates), "must": must})


@dataclass(frozen=True, slots=True)
class Answer:
    """One person's ranking of one instance."""

    instance: str
    annotator: str
    group: str
    reference: str
    candidates: tuple[str, ...]
    """Best first."""
    theme: str = ""
    category: str = ""
    ranks: tuple[int, ...] = ()
    """The candidates' ranks from 1, e.g. (1, 2, 2, 4) if the second and third are tied; empty if none are."""
    criteria: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """dimension → name → text: what the candidates were ranked by, if that was written down."""
    own_group: bool = False
    """Whether the ranking's file names its group; then a theme that other groups share is no tie between them."""

    @property
    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """Best first; the candidates of one tier are tied."""
        ranks = self.ranks or range(len(self.candidates))
        ranked = zip(ranks, self.candidates, strict=True)
        return tuple(tuple(name for _, name in tier) for _, tier in groupby(ranked, key=lambda entry: entry[0]))


def read_answers(path: Path) -> list[Answer]:
    """Raises ValueError with file and record if one is malformed, or a person answers an instance twice."""
    answers: dict[tuple[str, str], Answer] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}, record {number}"
        try:
            answer = Answer(**{**row, "candidates": tuple(row["candidates"]), "ranks": tuple(row.get("ranks", ()))})
        except (TypeError, KeyError) as error:
            raise ValueError(f"{where}: not a ranking ({error})") from None
        if (answer.annotator, answer.instance) in answers:
            raise ValueError(f"{where}: {answer.annotator} has already ranked {answer.instance}")
        answers[answer.annotator, answer.instance] = answer
    return list(answers.values())


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    write_jsonl(path, [asdict(answer) for answer in answers])


@dataclass(frozen=True, slots=True)
class LabelledPair:
    """Two sub-figures (or an edit's source and result) and whether people found them consistent."""

    key: str
    """Names the pair whatever its order."""
    group: str
    images: tuple[str, ...]
    consistent: bool
    question: str
    category: str = ""
    votes: tuple[int, int] = (0, 0)
    """(Yes, No)"""
    reasons: str = ""


def read_pairs(path: Path) -> list[LabelledPair]:
    """Raises ValueError with file and record if one is malformed or its key is taken."""
    pairs: dict[str, LabelledPair] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}, record {number}"
        try:
            pair = LabelledPair(**{**row, "images": tuple(row["images"]), "votes": tuple(row.get("votes", (0, 0)))})
        except (TypeError, KeyError) as error:
            raise ValueError(f"{where}: not a labelled pair ({error})") from None
        if pair.key in pairs:
            raise ValueError(f"{where}: key {pair.key!r} is already taken by an earlier record")
        pairs[pair.key] = pair
    return list(pairs.values())


def write_pairs(path: Path, pairs: Sequence[LabelledPair]) -> None:
    write_jsonl(path, [asdict(pair) for pair in pairs])
