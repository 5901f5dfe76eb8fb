"""docs/your-domain.md is true: its commands run, its files are read, its configs load."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks, run_page

from pacorl.config.base import load
from pacorl.dataset.importing import import_folder
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import read_jsonl
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.records.comparisons import load_comparisons
from pacorl.records.rankings import load_rankings
from pacorl.studio.annotate.routes import plan

PAGE = ROOT / "docs" / "your-domain.md"
RANKINGS = ROOT / "examples" / "rankings"


def commands(language: str) -> list[list[str]]:
    """The words of every command of the page, as a shell would split them."""
    return [shlex.split(line) for block in blocks(PAGE, language) for line in block.lines]


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.filterwarnings("ignore:.*their ends are not read:UserWarning")  # as the page says
def test_the_commands_of_the_page_lead_from_images_to_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one folder, by the command line's own entry point."""
    assert [words[:2] for words in commands("bash")] == [
        ["pacorl", name] for name in ("dataset", "dataset", "train-reward", "benchmark", "prompts", "train-policy")
    ]
    run_page(PAGE, tmp_path, monkeypatch)
    runs = tmp_path / "runs"
    assert len(load_comparisons(runs / "animals/export/comparisons_test.jsonl")) == 4
    assert json.loads((runs / "animal-judge/summary.json").read_text())["steps"] == 2
    assert "animal-judge/merged" in (runs / "animal-bench/table.html").read_text()
    assert (runs / "animal-policy/adapter").is_dir()
    epochs = [row for row in read_jsonl(runs / "animal-policy/metrics.jsonl") if row["kind"] == "epoch"]
    assert len(epochs) == 1
    assert epochs[0]["samples/missing"] == 0
    assert "animal-judge/merged" in (runs / "animal-policy/config.yaml").read_text()


def test_the_commands_for_real_models_name_configs_and_keys_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    kinds = {"train-reward": JudgeConfig, "train-policy": PolicyConfig}
    called = [words for words in commands("sh") if "--dry-run" in words]
    assert [words[1] for words in called] == list(kinds)
    for _, command, config, dry_run, *overrides in called:
        assert dry_run == "--dry-run"
        load(kinds[command], Path(config), overrides)


@pytest.mark.parametrize(("language", "name"), [("csv", "mine.csv"), ("json", "mine.jsonl")])
def test_the_rankings_of_the_page_are_read(tmp_path: Path, language: str, name: str) -> None:
    (block,) = blocks(PAGE, language)
    shutil.copytree(RANKINGS / "images", tmp_path / "images")
    (tmp_path / name).write_text(block.text, encoding="utf-8")
    assert any(len(tier) == 2 for one in load_rankings(tmp_path / name) for tier in one.tiers)
    assert import_folder(tmp_path / "set", tmp_path / name, kind="rankings", dry_run=True)["rankings"] > 0


def test_the_instances_of_the_page_can_be_ranked_in_the_browser(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    (block,) = blocks(PAGE, "jsonl")
    shutil.copytree(RANKINGS / "images", tmp_path / "images")
    (tmp_path / "instances.jsonl").write_text(block.text, encoding="utf-8")
    assert set(plan(tmp_path, ["ann", "ben"])) == {"ann", "ben"}
