"""A config's text in today's keys: comments stay, and the result loads as the old file does."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import load
from pacorl.config.policy_run import PolicyRun
from pacorl.config.rewrite import rewrite
from pacorl.config.upgrade import upgrade

SAME_BITS = Path(__file__).parents[2] / "tools" / "same_bits"

OLD = """\
# My run.
model:
  kind: flux  # the generator
  text_tokens: 64  # T5's
adapter: {rank: 4, dropout: 0.0}
sampling: {size: 64x64, noise_steps: 3}  # of ten
# Watch it.
report_every: 5
seed: 1
"""
NEW = """\
# My run.
model:
  kind: flux  # the generator
  max_sequence_length: 64  # T5's
adapter: {rank: 4}
sampling: {size: 64x64, sde_steps: 3}  # of ten
# Watch it.
seed: 1
"""


def test_keys_change_where_they_stand_and_comments_stay() -> None:
    text, notices = rewrite(OLD, name="run.yaml")
    assert text == NEW
    assert "model.text_tokens is now called model.max_sequence_length" in notices
    assert len(notices) == 4
    assert rewrite(text, name="run.yaml") == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "adapter:\n  dropout: 0.0\nseed: 1\n",  # a section that is empty afterwards
        "seed: 1\nadvantages:\n  clip: 3.0\n  min_valid: 4",  # no newline at the end
        "adapter: {dropout: 0.0, rank: 4}\n",
        "adapter: {dropout: 0.0}\n",
        "model: &m {text_tokens: 3}\n",
    ],
)
def test_whatever_the_style_the_document_is_the_upgraded_one(text: str) -> None:
    document = yaml.safe_load(text)
    upgrade(document, "PolicyRun")
    assert yaml.safe_load(rewrite(text, name="run.yaml")[0]) == document


@pytest.mark.parametrize("name", ["tiny.yaml", "tiny_edit.yaml"])
def test_configs_of_the_first_edition_are_the_same_run_afterwards(name: str, tmp_path: Path) -> None:
    old, path = SAME_BITS / name, tmp_path / name
    path.write_text(old.read_text())
    done = CliRunner().invoke(app, ["config", "upgrade", str(path)], catch_exceptions=False)
    assert (done.exit_code, "is now called" in done.stdout) == (0, True)
    assert load(PolicyRun, path) == load(PolicyRun, old)
    assert path.read_text().count("#") == old.read_text().count("#")
    again = CliRunner().invoke(app, ["config", "upgrade", str(path)], catch_exceptions=False)
    assert again.stdout == f"{path}: its keys are today's\n"


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OLD)
    assert "text_tokens" in CliRunner().invoke(app, ["config", "upgrade", str(path), "--dry-run"]).stdout
    assert path.read_text() == OLD


@pytest.mark.parametrize(
    ("text", "fault"),
    [("- a\n", "a config is a mapping of keys"), ("adapter: {dropout: 0.5}\n", "adapter.dropout 0.5 is no longer")],
)
def test_faults_name_the_file(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"run\.yaml: {fault}"):
        rewrite(text, name="run.yaml")
