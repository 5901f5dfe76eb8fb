"""Prints the version of the installed torch if it fits the range in pyproject.toml; exits with 1 if it does not."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def lowest() -> str:
    """The torch that pyproject.toml asks for at least."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [torch] = [need for need in project["dependencies"] if re.match(r"torch\b", need)]
    found = re.search(r">=\s*([\d.]+)", torch)
    assert found, f"{torch!r} names no lower bound"
    return found[1]


def numbers(release: str) -> tuple[int, ...]:
    """2.13.0+cpu → (2, 13, 0)"""
    return tuple(int(part) for part in re.findall(r"\d+", release.partition("+")[0])[:3])


def main() -> int:
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return 1
    print(installed)
    return int(numbers(installed) < numbers(lowest()))


if __name__ == "__main__":
    sys.exit(main())
