"""Every direct dependency has a lowest version, and the tested one is not below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.minima import PROJECT, minima


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def test_tested_versions_are_within_the_declared_range() -> None:
    pins = dict(
        re.findall(r"^([\w.-]+)==([\d.]+)$", (PROJECT.parent / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    )
    lowest = dict(line.split("==") for line in minima())
    assert len(lowest) > 20
    assert [name for name, version in lowest.items() if numbers(pins[name]) < numbers(version)] == []


def test_a_dependency_without_a_lowest_version_is_named(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(PROJECT.read_text("utf-8").replace('"einops>=0.8"', '"einops"'))
    with pytest.raises(ValueError, match="'einops' names no lowest version"):
        list(minima(project))
