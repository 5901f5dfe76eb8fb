"""The dry run of a judge's training: all that is absent is listed, and what is no data is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from pacorl import cli
from pacorl.config.base import load
from pacorl.judge.local import TINY_JUDGE
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.plan.judge_plan import plan_reward

CONFIGS = Path(__file__).parents[2] / "configs" / "reward"
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def pair(consistent: bool, **more: Any) -> dict[str, Any]:
    return {"images": ["a.png", "a.png"], "question": "Same?", "consistent": consistent} | more


def dry_run(recipe: str, *overrides: str) -> Result:
    return CliRunner().invoke(cli.app, ["train-reward", str(CONFIGS / recipe), "--dry-run", *overrides])


def tiny(tmp_path: Path, *overrides: str) -> list[str]:
    data = ["data.train=[tiny:train:20]", "data.evaluation=[tiny:dev:4]"]
    return [*data, f"out={tmp_path / 'run'}", *overrides]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "base", "trained"),
    [
        ("paco_reward_7b.yaml", "Qwen/Qwen2.5-VL-7B-Instruct", 80_740_352),  # as in the released adapter
        ("qwen3_5_9b.yaml", "Qwen/Qwen3.5-9B", 86_556_672),
    ],
)
def test_a_recipe_is_planned_without_data_and_weights(
    recipe: str, base: str, trained: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dry_run(recipe, "--json")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    absences = document["absences"]
    assert [absence["key"] for absence in absences] == [*["data.train"] * 2, "data.evaluation", "model.checkpoint"]
    assert all("`pacorl data paco-dataset`" in absence["remedy"] for absence in absences[:3])
    assert f"`hf download {base}`, 1" in absences[3]["remedy"]  # GB
    assert document["facts"]["trained_parameters"] == trained
    assert document["facts"]["optimizer_steps"] is None


def test_what_is_here_is_counted_beside_what_is_absent(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair(same)) + "\n" for same in (True, False)))
    for file in TINY_JUDGE.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    data = f"data.train=['{tmp_path / 'pairs.jsonl'}', '{tmp_path / 'no.jsonl'}']"
    overrides = tiny(tmp_path, data, "max_steps=7", f"model.checkpoint={tmp_path}", "tuning.start=lab/lora")
    found = plan_reward(load(JudgeConfig, CONFIGS / "tiny.yaml", overrides))
    assert (found.facts["train_pairs"], found.facts["optimizer_steps"]) == (2, 7)
    assert [absence.key for absence in found.absences] == ["data.train", "model.checkpoint", "tuning.start"]
    assert found.absences[2].remedy.endswith("`hf download lab/lora`")


def test_a_faulty_source_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a fox runs\n")
    (tmp_path / "broken.jsonl").write_text("{oops\n")
    (tmp_path / "torn.png").write_bytes(b"no image")
    (tmp_path / "dark.jsonl").write_text(json.dumps(pair(True, images=["torn.png", "torn.png"])) + "\n")
    for name, named in (("notes.txt", "notes.txt"), ("broken.jsonl", "broken.jsonl:1:"), ("dark.jsonl", "torn.png")):
        result = dry_run("tiny.yaml", *tiny(tmp_path, f"data.train=['{tmp_path / name}']"))
        assert result.exit_code == 1
        assert named in str(result.exception)
        assert "data" in str(result.exception)
