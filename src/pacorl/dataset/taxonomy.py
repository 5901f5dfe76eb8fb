"""The subjects of prompts: a YAML of categories, subcategories and the dimensions that a set must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pacorl.io.documents import read_yaml
from pacorl.types import Grid

DIMENSIONS = ("Style", "Identity", "Logic")
PAPER = Path(__file__).with_name("taxonomy.yaml")
TINY = Path(__file__).with_name("taxonomy_tiny.yaml")


@dataclass(frozen=True, slots=True)
class Subject:
    """One subcategory."""

    category: str
    name: str
    dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """One prompt to be written."""

    key: str
    subject: Subject
    grid: Grid
    number: int
    """Its position among all orders."""


def read_taxonomy(path: Path = PAPER) -> list[Subject]:
    """The subjects of a taxonomy.

    Raises:
        ValueError: that names the file and the entry which is not `category: {subcategory: [dimensions]}`.
    """
    document = read_yaml(path)
    subjects = [
        subject for category, entries in _items(document, path) for subject in _subjects(category, entries, path)
    ]
    if not subjects:
        raise ValueError(f"{path}: names no subcategories")
    return subjects


def _subjects(category: str, entries: Any, path: Path) -> list[Subject]:
    subjects = []
    for name, dimensions in _items(entries, f"{path}: {category}"):
        if not isinstance(dimensions, list) or not dimensions or not set(dimensions) <= set(DIMENSIONS):
            raise ValueError(f"{path}: {category}: {name}: name some of {', '.join(DIMENSIONS)}, got {dimensions!r}")
        subjects.append(Subject(category, name, tuple(dimensions)))
    return subjects


def _items(value: Any, where: object) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a mapping of names, got {value!r}")
    return [(str(name), inner) for name, inner in value.items()]


def orders(subjects: Sequence[Subject], *, count: int, grids: Sequence[Grid]) -> list[PromptOrder]:
    """`count` orders: categories share equally, and subcategories within them; layouts take turns."""
    by_category: dict[str, list[Subject]] = {}
    for subject in subjects:
        by_category.setdefault(subject.category, []).append(subject)
    categories = list(by_category.values())
    planned: list[PromptOrder] = []
    for number in range(count):
        round_, category_index = divmod(number, len(categories))
        turn, which = divmod(round_, len(categories[category_index]))
        subject = categories[category_index][which]
        key = f"{subject.category}/{subject.name}/{turn}"
        planned.append(PromptOrder(key, subject, grids[(turn + number) % len(grids)], number))
    return planned
