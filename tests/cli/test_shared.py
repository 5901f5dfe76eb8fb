"""From groups of options to flags: names, defaults, parsed texts, headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import typer
from typer.testing import CliRunner

from pacorl.cli.shared import with_options
from pacorl.config.options import JudgeOptions, inherited, one_of, option
from pacorl.types import Size


@dataclass(frozen=True, kw_only=True)
class SortOptions(JudgeOptions):
    panel: ClassVar[str] = "Sorting"

    judge: str = inherited(JudgeOptions, "judge", default="", help="Who sorts.")
    order: str = option("up", "up or down.", parse=one_of("up", "down"))
    size: Size | None = option(None, "HEIGHTxWIDTH.", flags=("--shape",), parse=Size.parse)
    tags: list[str] = option([], "May be repeated.")
    count: int = option(1, "How many.", least=1, most=9)
    check: bool = option(True, "Check first.")
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
    assert given("--shape", "2x3", "--no-check") == SortOptions(size=Size(2, 3), check=False)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--order", "left"), "--order 'left' is none of up, down"),
        (("--shape", "large"), "--shape 'large' is not of the form HEIGHTxWIDTH, e.g. 1024x1024"),
        (("--shape", "0x4"), "--shape '0x4' is not of the form"),
        (("--shape", "the 2x2 grid"), "is not of the form"),
    ],
)
def test_a_text_that_cannot_be_parsed_is_named_with_its_flag(words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fault)):
        CliRunner().invoke(app, ["things", *words], catch_exceptions=False)


@pytest.mark.parametrize("count", ["0", "10"])
def test_a_number_out_of_range_is_a_wrong_option(count: str) -> None:
    result = CliRunner().invoke(app, ["things", "--count", count])
    assert (result.exit_code, "--count" in result.output) == (2, True)


def test_the_help_names_a_value_in_a_word_and_a_switch_by_itself() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert text.index("Judge") < text.index("--memory") < text.index("Sorting") < text.index("--order")
    assert re.search(r"--tags\s+TEXT", text)
    assert re.search(r"--count\s+N \[1<=x<=9\]", text)
    assert re.search(r"--fast\s+Do not look twice", text)
