"""The pages are true: every block runs as it stands, on the tiny world, and leaves what it promises."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from page_blocks import ROOT, Block, blocks, run_page
from tiny_runs import SMALL_QUICKSTART, tiny_run

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.judge_training.judge_config import JudgeConfig

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
OF_THEIR_OWN = {"README.md", "characters.md", "train.md", "label.md", "python.md"}
"""Pages that a test of their own runs, here or in tests/test_python_page.py."""
SEEN_FIRST = {"judge", "train-judge"}
"""Pages that `make test` runs, beside README.md, train.md and python.md; `make nightly` runs all."""

RUN = {"bash", "python"}
NOT_RUN = {"sh", "text", "bibtex", "csv", "json", "jsonl", "toml", "yaml"}
pytestmark = [pytest.mark.filterwarnings("ignore:.*(reads 48 tokens|of 3 prompts):UserWarning")]


@pytest.mark.slow
def test_the_commands_of_the_front_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "README.md", tmp_path, monkeypatch, more={"pacorl quickstart": SMALL_QUICKSTART})
    assert (tmp_path / "runs/quickstart/report.html").is_file()
    assert len(list(tmp_path.rglob("set-1*.png"))) == 5


@pytest.mark.nightly
def test_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs" / "characters.md", tmp_path, monkeypatch)
    assert (tmp_path / "ComfyUI/models/loras/hero.safetensors").stat().st_size > 10_000
    assert (tmp_path / "page/set-1-repaired.png").is_file()
    assert len(list((tmp_path / "taught").glob("*.png"))) == 5


@pytest.mark.slow
def test_a_generator_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs" / "train.md", tmp_path, monkeypatch)
    for run in ("warm", "two"):
        assert (tmp_path / "runs" / run / "adapter" / "adapter_model.safetensors").is_file()
    assert "PaCo-GRPO" in (tmp_path / "runs/warm/adapter/README.md").read_text()


@pytest.mark.nightly
def test_people_rank_by_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs" / "label.md", tmp_path, monkeypatch)
    assert "https://rank.example.org/join#" in (tmp_path / "links.txt").read_text()


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages call runs/tiny or runs/quickstart."""
    folder = tmp_path_factory.mktemp("pages") / "run"
    PolicyTrainer(tiny_run([*SMALL_QUICKSTART, f"out={folder}"])).train()
    return folder


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.stem in SEEN_FIRST else pytest.mark.nightly, id=page.stem)
        for page in PAGES
        if page.name not in OF_THEIR_OWN and blocks(page, *RUN)
    ],
)
def test_the_blocks_of_a_page_run(page: Path, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/quickstart").symlink_to(small_run)
    smaller = {
        "pacorl train-policy configs/tiny.yaml": SMALL_QUICKSTART,
        "pacorl train-reward configs/reward/tiny.yaml": [
            "max_steps=2",
            "data.train=[tiny:train:16]",
            "data.evaluation=[tiny:dev:4]",
        ],
    }
    run_page(page, tmp_path, monkeypatch, more=smaller)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_whether_it_is_run(page: Path) -> None:
    fences = re.findall(r"^ *```(.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page))  # all that there are, no indented one and none of another form
    assert {block.language for block in blocks(page)} <= RUN | NOT_RUN
    unmarked = [block.text for block in blocks(page, *NOT_RUN - {"sh"}) if re.search(r"^pacorl ", block.text, re.M)]
    assert unmarked == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_for_real_models_name_configs_and_keys_that_exist(page: Path) -> None:
    kinds = {"train-reward": JudgeConfig, "train-policy": PolicyConfig}
    for line in (line for block in blocks(page, "sh") for line in block.lines):
        words = shlex.split(line, comments=True)
        for command in kinds.keys() & set(words):
            config, *rest = words[words.index(command) + 1 :]
            if f"pacorl init {config} " in page.read_text("utf-8"):
                continue  # the reader's own
            # What the shell fills in is a path like any other.
            overrides = [word.replace("$", "") for word in rest if re.match(r"[a-z_.]+=", word)]
            source = ROOT / config if Path(config).suffix else Path(config)
            load(kinds[command], source, overrides)


SCRIPTS = [(page, block) for page in DOCS for block in blocks(page, "sh") if block.title.endswith(".slurm")]


@pytest.mark.parametrize(("page", "block"), SCRIPTS, ids=lambda value: getattr(value, "stem", ""))
def test_a_job_script_is_bash_and_trains(page: Path, block: Block) -> None:
    assert block.text.startswith("#!/bin/bash\n#SBATCH ")
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert checked.stderr == ""
    assert "train-policy" in block.text
