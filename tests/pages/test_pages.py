"""README and the tutorials are true: every block runs as it stands, on the tiny world, and leaves what it promises."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from page_blocks import ROOT, Block, blocks, run_page
from tiny_runs import SMALL_QUICKSTART

from pacorl.config.base import load
from pacorl.config.judge_run import JudgeConfig
from pacorl.config.policy_run import PolicyConfig

TUTORIALS = ROOT / "docs" / "tutorials"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *sorted(TUTORIALS.glob("*.md"))]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*reads 48 tokens:UserWarning"),
]


@pytest.mark.slow
def test_the_commands_of_the_front_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "README.md", tmp_path, monkeypatch, more={"pacorl quickstart": SMALL_QUICKSTART})
    assert (tmp_path / "runs/quickstart/report.html").is_file()
    assert len(list(tmp_path.rglob("set-1*.png"))) == 5


@pytest.mark.slow
def test_a_character_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(TUTORIALS / "character-sheet.md", tmp_path, monkeypatch)
    assert (tmp_path / "ComfyUI/models/loras/hero.safetensors").stat().st_size > 10_000
    assert (tmp_path / "edits/edits.html").is_file()
    assert len(list((tmp_path / "with-lora").glob("*.png"))) == 5


@pytest.mark.slow
def test_your_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(TUTORIALS / "your-reward.md", tmp_path, monkeypatch)
    for run in ("warm", "two"):
        assert (tmp_path / "runs" / run / "adapter" / "adapter_model.safetensors").is_file()
    assert "license: mit" in (tmp_path / "runs/warm/adapter/README.md").read_text()


@pytest.mark.slow
def test_judge_and_data_as_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(TUTORIALS / "judge-service.md", tmp_path, monkeypatch)
    assert (tmp_path / "heroes/export/comparisons_train.jsonl").is_file()
    assert (tmp_path / "heroes-tasks/tasks.json").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_dry_runs_for_real_models_name_configs_and_keys_that_exist(page: Path) -> None:
    kinds = {"train-reward": JudgeConfig, "train-policy": PolicyConfig}
    for line in (line for block in blocks(page, "sh") for line in block.lines):
        words = shlex.split(line)
        for command in kinds.keys() & set(words):
            config, *rest = words[words.index(command) + 1 :]
            load(kinds[command], ROOT / config, [word for word in rest if re.match(r"[a-z_.]+=", word)])


SCRIPTS = [(page, block) for page in DOCS for block in blocks(page, "sh") if block.title.endswith(".slurm")]


@pytest.mark.parametrize(("page", "block"), SCRIPTS, ids=lambda value: getattr(value, "stem", ""))
def test_a_job_script_is_bash_and_names_a_config_and_keys_that_exist(page: Path, block: Block) -> None:
    assert block.text.startswith("#!/bin/bash\n#SBATCH ")
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert checked.stderr == ""
    (line,) = [line.partition("||")[0] for line in block.lines if "train-policy" in line]
    command = shlex.split(line, comments=True)
    config, *others = command[command.index("train-policy") + 1 :]
    # What the shell fills in is a path like any other.
    load(PolicyConfig, ROOT / config, [word.replace("$", "") for word in others if re.match(r"[a-z_.]+=", word)])


def test_there_are_job_scripts_for_one_machine_and_for_several() -> None:
    assert {page.stem for page, _ in SCRIPTS} == {"your-reward", "scaling"}


def test_the_action_runs_the_gate() -> None:
    (block,) = blocks(TUTORIALS / "judge-service.md", "yaml")
    steps = yaml.safe_load(block.text)["jobs"]["score"]["steps"]
    (gate,) = [step["run"] for step in steps if "--min" in step.get("run", "")]
    assert gate.startswith("pacorl score ")
