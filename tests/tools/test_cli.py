"""The makers of the tiny world have their commands, and are no part of the wheel."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from tools.tiny.__main__ import app
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


def test_every_stage_has_a_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for stage in (
        "vae",
        "generator",
        "judge",
        "clip",
        "edits",
        "kontext",
        "edit-judge",
        "edit-story",
        "dataset-story",
        "all",
    ):
        assert f" {stage} " in result.output


@pytest.mark.slow
def test_edits_are_drawn_by_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["edits", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "edits").glob("*.jsonl")) == [
        "dev.jsonl",
        "test.jsonl",
        "train.jsonl",
    ]


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_tiny_runs_all_stages() -> None:
    plan = subprocess.run(
        ["make", "-n", "tiny", "ARGS=--share 0.01"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "-m tools.tiny all --share 0.01" in plan.stdout


def test_the_wheel_holds_the_package_alone() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["packages"] == ["src/pacorl"]
    assert not any("tools" in source for source in build["wheel"]["force-include"])
