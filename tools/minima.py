"""The lowest versions that pyproject.toml allows, as constraints of pip (`make test-versions`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("serve", "data")
"""What the tests of both ends install beside the dependencies."""


def minima(project: Path = PROJECT) -> Iterator[str]:
    """One line per direct dependency.

    Raises:
        ValueError: a dependency has no lower bound, so nothing says which version is the least that works.
    """
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    for need in table["dependencies"] + [need for extra in EXTRAS for need in table["optional-dependencies"][extra]]:
        bound = re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)(?:,.*)?", need)
        if not bound:
            raise ValueError(f"{project}: {need!r} names no lowest version; write NAME>=VERSION")
        yield f"{bound[1]}=={bound[2]}"


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(minima())))
