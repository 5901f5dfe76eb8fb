"""Every number of every command has limits: what is none, or beyond them, is one line that names the option."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from pacorl import cli

NO_NUMBERS = ("nan", "inf", "-inf", "-1", "1e300", "1" * 40, "two")
LISTS = [
    ("dataset", "prompts", "--price", "nan/1"),
    ("dataset", "prompts", "--price", "1/inf"),
    ("dataset", "prompts", "--price", "-1/1"),
    ("generate", "--size", "nanxinf"),
]


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, and its words after `pacorl`."""
    if not hasattr(command, "list_commands"):
        yield words, command
        return
    context = command.make_context("pacorl", [], resilient_parsing=True)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), (*words, name))


def numbers() -> Iterator[tuple[str, ...]]:
    """The words of each option of a command that is a number."""
    for words, command in commands(typer.main.get_command(cli.app)):
        for parameter in command.params:
            if parameter.type_descriptor.annotation in (int, float):
                yield (*words, parameter.opts[0])


NUMBERS = list(numbers())


def said_of(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["pacorl", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code in (1, 2), words
    assert said.count("\n") == 1, said
    return said


def test_the_options_are_found() -> None:
    assert {("dataset", "annotate", "--days"), ("score", "--min"), ("benchmark", "gedit", "--limit")} < set(NUMBERS)
    assert len(NUMBERS) > 60


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(value, marks=pytest.mark.slow if value in ("two", "nan") else pytest.mark.campaign)
        for value in NO_NUMBERS
    ],
)
def test_every_number_has_limits(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in NUMBERS:
        said = said_of((*words[:-1], f"{words[-1]}={value}"), monkeypatch, capsys)
        assert said.startswith(f"pacorl: Invalid value for '{words[-1]}'"), (words, said)


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_a_number_in_a_list_has_limits(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argument = ["absent"] if words[0] == "dataset" else []
    said = said_of((*words[:-2], *argument, f"{words[-2]}={words[-1]}"), monkeypatch, capsys)
    assert said.startswith(f"pacorl: {words[-2]} {words[-1]!r}"), said
