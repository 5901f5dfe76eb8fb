"""From groups of options to flags: names, defaults, parsed texts, headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Literal
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

from pacorl.cli.shared import asking, fault_line, with_options
from pacorl.config.options import JudgeOptions, inherited, option
from pacorl.types import Size


@dataclass(frozen=True, kw_only=True)
class SortOptions(JudgeOptions):
    panel: ClassVar[str] = "Sorting"

    judge: str = inherited(JudgeOptions, "judge", default="", help="Who sorts.")
    order: Literal["up", "down"] = option("up", "Which way.")
    size: Size | None = option(None, "HEIGHTxWIDTH.", "--shape", parser=Size.parse)
    title: str = option("things", "Its title.")
    tags: list[str] = option([], "May be repeated.")
    count: int = option(1, "How many.", min=1, max=9)
    fast: bool = option(False, "Do not look twice.")


app, heard = typer.Typer(), list[SortOptions]()


@app.command()
@with_options
def sort(name: str = typer.Argument(help="What to sort."), *, options: SortOptions) -> None:
    """Sort."""
    heard.append(options)


def given(*words: str) -> SortOptions:
    result = CliRunner().invoke(app, ["things", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return heard.pop()


def test_flags_fill_the_fields() -> None:
    options = given("--judge", "j", "--order", "down", "--shape", "4x6", "--tags", "a", "--tags", "b", "--fast")
    assert options == SortOptions(judge="j", order="down", size=Size(4, 6), tags=["a", "b"], fast=True)
    assert given() == SortOptions()
    assert given("--shape", "2x3") == SortOptions(size=Size(2, 3))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--order", "left"),
        ("--shape", "large"),
        ("--shape", "0x4"),
        ("--count", "0"),
        ("--count", "10"),
        ("--tags", ""),
        ("--title", ""),
    ],
)
def test_a_value_that_does_not_fit_is_a_fault_of_its_flag(flag: str, value: str) -> None:
    result = CliRunner().invoke(app, ["things", flag, value])
    assert result.exit_code
    assert flag in result.output + str(result.exception)


def test_the_help_names_a_value_in_a_word_and_a_switch_by_itself() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert text.index("Sorting") < text.index("--memory") < text.index("--order")
    assert re.search(r"--fast\s+Do not look twice", text)


def test_many_questions_are_counted_and_timed_by_the_first_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacorl.cli.shared.time", Mock(monotonic=count(step=5).__next__))
    with asking("judge") as advance:
        advance(0, 124_750)
        advance(256, 124_750)
        assert re.search(r"124,750 questions to judge take about (\d+ min|\d+ h)", capsys.readouterr().err)
    with asking("judge") as advance:
        advance(0, 45)
        advance(45, 45)
    assert capsys.readouterr().err == ""


def test_an_import_that_a_library_breaks_names_the_library() -> None:
    fault = ModuleNotFoundError("Could not import module 'Qwen2_5_VLProcessor'. Are this object's requirements …")
    fault.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    assert "torchvision::nms" in fault_line(fault)
