"""Recipes by name: `pacorl recipes`, and a recipe in place of a config's path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.recipes import config_file, read_header, recipe, recipe_names
from pacorl.grpo.policy_config import PolicyConfig


def test_the_list_has_every_recipe_under_its_card() -> None:
    assert set(recipe_names()) >= {"flux_t2is_24gb", "klein_t2is_16gb", "reward/tiny"}
    lines = CliRunner().invoke(app, ["recipes"]).stdout.splitlines()
    for name in recipe_names():
        (line,) = (number for number, line in enumerate(lines) if line.split()[:1] == [name])
        cards = [text for text in lines[:line] if not text.startswith(" ")]
        assert cards[-1] == read_header(recipe(name))[0]


def test_a_file_wins_over_a_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_text("epochs: 7")
    assert PolicyConfig.from_yaml("tiny").epochs == 7
    Path("flux_t2is").mkdir()
    assert config_file(Path("flux_t2is")) == recipe("flux_t2is")


def test_next_steps_can_be_pasted_after_python_m() -> None:
    command = [sys.executable, "-m", "pacorl", "recipes"]
    environment = os.environ | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "`pacorl train-policy NAME --dry-run`" in done.stdout
