"""The model zoo's table: all five, each with a line that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from pacorl.cli import app
from pacorl.models.policies import kind_of

ROOT = Path(__file__).parents[2]
RELEASED = {
    "PaCo-Reward-7B": "score",
    "PaCo-Reward-7B-Lora": "score",
    "PaCo-FLUX.1-dev-Lora": "generate",
    "PaCo-FLUX.1-Kontext-Lora": "generate",
    "PaCo-Qwen-Image-Edit-Lora": "generate",
}
BASES = {"FLUX.1-dev": "flux", "FLUX.1-Kontext-dev": "kontext", "Qwen-Image-Edit": "qwen_edit"}


def lines() -> dict[str, list[str]]:
    """Name of a released model → the words of the line that loads it."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `X-GenGroup/([^`]+)` \|.*\| `(pacorl [^`]+)` \|$", page, re.MULTILINE)
    return {name: shlex.split(line)[1:] for name, line in rows}


def test_all_five_are_there() -> None:
    assert list(lines()) == list(RELEASED)


@pytest.mark.parametrize("name", RELEASED)
def test_the_line_is_one_that_the_command_takes(name: str) -> None:
    command, *words = lines()[name]
    assert command == RELEASED[name]
    parsed = typer.main.get_command(app).commands[command].make_context(command, words).params
    assert f"X-GenGroup/{name}" in (parsed["judge"], parsed.get("adapter"))
    if command == "generate":
        assert kind_of(parsed["model"]) == BASES[parsed["model"].rpartition("/")[2]]
        assert bool(parsed["images"]) == (parsed["record"] == "")
