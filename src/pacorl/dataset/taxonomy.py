"""What prompts are to be about: a YAML of categories, subcategories and the dimensions that a set must keep."""

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
class Order:
    """One prompt that is to be written."""

    key: str
    subject: Subject
    grid: Grid
    number: int
    """Counts all orders."""


def read_taxonomy(path: Path = PAPER) -> list[Subject]:
    """Raises ValueError that names the file and the entry which is not `category: {subcategory: [dimensions]}`."""
    document = read_yaml(path)
    subjects = [one for category, named in _items(document, path) for one in _subjects(category, named, path)]
    if not subjects:
        raise ValueError(f"{path}: names no subcategories")
    return subjects


def _subjects(category: str, named: Any, path: Path) -> list[Subject]:
    found = []
    for name, dimensions in _items(named, f"{path}: {category}"):
        if not isinstance(dimensions, list) or not dimensions or not set(dimensions) <= set(DIMENSIONS):
            raise ValueError(f"{path}: {category}: {name}: name some of {', '.join(DIMENSIONS)}, got {dimensions!r}")
        found.append(Subject(category, name, tuple(dimensions)))
    return found


def _items(value: Any, where: object) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a mapping of names, got {value!r}")
    return [(str(name), inner) for name, inner in value.items()]


def orders(subjects: Sequence[Subject], *, count: int, grids: Sequence[Grid]) -> list[Order]:
    """`count` orders: categories share equally, and subcategories within them; layouts take turns."""
    by_category: dict[str, list[Subject]] = {}
    for subject in subjects:
        by_category.setdefault(subject.category, []).append(subject)
    categories = list(by_category.values())
    result: list[Order] = []
    for number in range(count):
        round_, place = divmod(number, len(categories))
        turn, which = divmod(round_, len(categories[place]))
        subject = categories[place][which]
        key = f"{subject.category}/{subject.name}/{turn}"
        result.append(Order(key, subject, grids[(turn + number) % len(grids)], number))
    return result
