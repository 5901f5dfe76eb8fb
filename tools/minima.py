"""The lowest versions that pyproject.toml allows, as constraints of pip (`make test-versions`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("serve", "data")
"""Extras that the tests of both ends need."""


def minima(project: Path = PROJECT) -> Iterator[str]:
    """Yield one line per direct dependency.

    Raises:
        ValueError: if a dependency has no lower bound.
    """
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    requirements = list(table["dependencies"])
    for extra in EXTRAS:
        requirements += table["optional-dependencies"][extra]

    for requirement in requirements:
        bound = re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)(?:,.*)?", requirement)
        if not bound:
            raise ValueError(f"{project}: {requirement!r} names no lowest version; write NAME>=VERSION")
        yield f"{bound[1]}=={bound[2]}"


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(minima())))
