"""Old config keys load under their new names, and say so; a file's text is rewritten and keeps its comments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import load
from pacorl.config.judge_run import JudgeConfig
from pacorl.config.policy_run import PolicyConfig
from pacorl.config.upgrade import DROPPED, RENAMED, RETIRED, rewrite, upgrade

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


def test_old_keys_move_to_their_new_names() -> None:
    document = {"model": {"text_tokens": 64, "kind": "flux"}, "sampling": {"noise_steps": [1]}, "seed": 1}
    notices = upgrade(document, "PolicyConfig")
    assert document == {
        "model": {"max_sequence_length": 64, "kind": "flux"}, "sampling": {"sde_steps": [1]}, "seed": 1
    }  # fmt: skip
    assert notices[0] == "model.text_tokens is now called model.max_sequence_length"
    assert len(notices) == 2
    assert upgrade(document, "PolicyConfig") == []


def test_a_key_under_both_names_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.text_tokens is now called model.max_sequence_length, and both are given"
    ):
        upgrade({"model": {"text_tokens": 1, "max_sequence_length": 2}}, "PolicyConfig")


def test_a_dropped_key_may_only_say_what_it_always_said() -> None:
    document = {"adapter": {"dropout": 0.0, "rank": 4}}
    assert upgrade(document, "PolicyConfig") == []
    assert document == {"adapter": {"rank": 4}}
    with pytest.raises(ValueError, match=r"adapter.dropout 0.1 is no longer a setting"):
        upgrade({"adapter": {"dropout": 0.1}}, "PolicyConfig")


def test_a_retired_key_may_have_any_value_and_says_what_happens_now() -> None:
    document = {"advantages": {"min_valid": 4, "clip": 3.0}, "report_every": 0, "watch": {"average": 1}}
    assert upgrade(document, "PolicyConfig") == [
        "watch is now called monitor",
        "advantages.min_valid is no longer a setting: groups with fewer than 2 judged samples are dropped",
        "monitor.average is no longer a setting: an epoch's signs are averaged over 3 epochs",
        "report_every is no longer a setting: report.html is built with each evaluation and each checkpoint",
    ]
    assert document == {"advantages": {"clip": 3.0}, "monitor": {}}


@pytest.mark.parametrize("document", [{"model": None}, {"model": [1]}, {"adapter": "text"}, {}])
def test_odd_documents_are_left_to_the_config_itself(document: dict[str, object]) -> None:
    before = dict(document)
    assert upgrade(document, "PolicyConfig") == []
    assert document == before


def test_every_new_name_is_a_key_of_its_run() -> None:
    runs = {"PolicyConfig": PolicyConfig, "JudgeConfig": JudgeConfig}
    for run, names in RENAMED.items():
        keys = set(_keys(runs[run]().model_dump()))
        assert set(names.values()) <= keys
        assert not {*names, *DROPPED.get(run, {}), *RETIRED.get(run, {})} & keys


def _keys(document: dict[str, object], prefix: str = "") -> list[str]:
    keys = []
    for name, value in document.items():
        keys.append(prefix + name)
        if isinstance(value, dict):
            keys += _keys(value, f"{prefix}{name}.")
    return keys


def test_the_schema_of_a_run_defines_all_that_it_refers_to() -> None:
    schema = PolicyConfig.model_json_schema()
    references = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))
    assert references
    assert references <= set(schema["$defs"])
    kinds = [one["properties"]["kind"]["const"] for one in schema["properties"]["model"]["oneOf"]]
    assert kinds[:2] == ["flux", "kontext"]


# --- texts ------------------------------------------------------------------------------------------------------


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
    upgrade(document, "PolicyConfig")
    assert yaml.safe_load(rewrite(text, name="run.yaml")[0]) == document


@pytest.mark.parametrize("name", ["tiny.yaml", "tiny_edit.yaml"])
def test_configs_of_the_first_edition_are_the_same_run_afterwards(name: str, tmp_path: Path) -> None:
    old, path = SAME_BITS / name, tmp_path / name
    path.write_text(old.read_text())
    done = CliRunner().invoke(app, ["config", "upgrade", str(path)], catch_exceptions=False)
    assert (done.exit_code, "is now called" in done.stdout) == (0, True)
    assert load(PolicyConfig, path) == load(PolicyConfig, old)
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
