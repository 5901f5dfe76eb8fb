"""Every command of `pacorl` says what it does, refuses what it does not know, and keeps its flags."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from pacorl.cli import app

ROOT = typer.main.get_command(app)


def commands(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, groups of commands gone into."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def command_at(path: tuple[str, ...]) -> Any:
    command = ROOT
    for name in path:
        command = command.get_command(None, name)
    return command


def run(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, list(words))


COMMANDS = sorted(commands())
each = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


def test_the_commands_are_found() -> None:
    assert {("generate",), ("score",), ("benchmark", "t2is"), ("config", "schema"), ("dataset", "export")} <= {
        *COMMANDS
    }


@each
def test_the_help_works(path: tuple[str, ...]) -> None:
    shown = run(*path, "--help")
    assert shown.exit_code == 0, shown.output
    assert "Usage:" in shown.stdout


@each
def test_the_command_and_its_flags_have_texts(path: tuple[str, ...]) -> None:
    command = command_at(path)
    assert command.help
    silent = [
        parameter.name
        for parameter in command.params
        if not getattr(parameter, "help", "") and not getattr(parameter, "hidden", False)
    ]
    assert silent == []


@each
def test_no_flag_stands_twice(path: tuple[str, ...]) -> None:
    flags = [flag for parameter in command_at(path).params for flag in parameter.opts if flag.startswith("--")]
    assert len(flags) == len(set(flags))


@each
def test_a_flag_that_is_none_is_refused(path: tuple[str, ...]) -> None:
    if path == ("serve",):
        pytest.skip("what it does not know is vLLM's")
    refused = run(*path, "--no-such-flag")
    assert refused.exit_code == 2
    assert "--no-such-flag" in refused.output


FLAGS = {
    ("generate",): (
        "--prompt --panel --layout --record --storyboard --image --instruction --model --kind --adapter "
        "--lora-scale --size --steps --guidance-scale --true-cfg-scale --negative-prompt "
        "--max-sequence-length --seed --count --best-of --keep-all --judge --ask --judge-model "
        "--judge-adapter --api-key-env --out --report --pdf --json"
    ),
    ("score",): (
        "--judge --model --adapter --api-key-env --theme --criteria --grid --rank --symmetric --reasons "
        "--temperature --report --json --keep-going"
    ),
    ("studio",): (
        "--model --kind --adapter --judge --judge-model --judge-adapter --api-key-env --host --port --history --open"
    ),
    ("benchmark", "t2is"): (
        "--out --model --kind --adapter --images --prompts --size --panel-size --steps --guidance-scale "
        "--seed --image-batch --generate-only --judge --judge-model --judge-adapter --api-key-env --alignment "
        "--alignment-arg --aesthetics --aesthetics-arg --aesthetics-scale --limit --shard --trained "
        "--skip-bad --name --json"
    ),
    ("benchmark", "gedit"): (
        "--out --model --kind --adapter --images --size --steps --guidance-scale --seed --image-batch "
        "--generate-only --language --rubric --judge --judge-model --judge-adapter --api-key-env --workers "
        "--limit --batch --shard --trained --skip-bad --name --json"
    ),
    ("benchmark", "consistency-rank"): (
        "--out --scorer --scorer-arg --scores --wording --judge --judge-model --judge-adapter --api-key-env "
        "--limit --batch --shard --trained --skip-bad --name --json"
    ),
    ("dataset", "generate"): (
        "--checkpoint --adapter --grids --size --steps --guidance-scale --max-sequence-length --dtype --batch "
        "--shard --prompts --seed --dry-run --json"
    ),
}
"""Flags that scripts and tutorials use."""


@pytest.mark.parametrize("path", FLAGS, ids=" ".join)
def test_flags_that_users_know_stay(path: tuple[str, ...]) -> None:
    flags = {flag for parameter in command_at(path).params for flag in parameter.opts}
    assert set(FLAGS[path].split()) <= flags


@pytest.mark.slow
def test_shells_can_complete() -> None:
    """bash asks for the words that may follow `pacorl benchmark `."""
    code = "from pacorl.cli import main; main()"
    asked = {"_PACORL_COMPLETE": "complete_bash", "COMP_WORDS": "pacorl benchmark ", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | asked,
    )
    assert {"t2is", "gedit", "consistency-rank", "edit-reward-bench"} <= set(done.stdout.split())
    # The shell that a command was typed in is looked up among its parents.
    typed = ["bash", "-c", f"'{sys.executable}' -m pacorl --show-completion; exit $?"]
    shown = subprocess.run(typed, capture_output=True, text=True, check=True)
    assert "_COMPLETE=complete_bash" in shown.stdout
