"""The dry run of a judge's training: all that is absent is listed, and what is no data is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from pacorl import cli
from pacorl.config.base import load
from pacorl.judge.local import TINY_JUDGE
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.plan.judge_plan import plan_reward

CONFIGS = Path(__file__).parents[2] / "configs" / "reward"
FETCH = "`hf download --repo-type dataset X-GenGroup/PaCo-Dataset --local-dir {}`, then unpack it there"
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Two comparisons as JSONL, and an image of their own."""
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair(consistent)) + "\n" for consistent in (True, False)))
    return path


def pair(consistent: bool, **more: Any) -> dict[str, Any]:
    return {"images": ["a.png", "a.png"], "question": "Same?", "consistent": consistent} | more


def dry_run(recipe: str, *overrides: str) -> Result:
    return CliRunner().invoke(cli.app, ["train-reward", str(CONFIGS / recipe), "--dry-run", *overrides])


def tiny(tmp_path: Path, *overrides: str) -> list[str]:
    data = ["data.train=[tiny:train:20]", "data.evaluation=[tiny:dev:4]"]
    return [*data, f"out={tmp_path / 'run'}", *overrides]


# --- all is here -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dry_run_with_everything_here_ends_with_its_verdict(tmp_path: Path) -> None:
    result = dry_run("tiny.yaml", *tiny(tmp_path))
    assert result.exit_code == 0, result.output
    assert "train: pairs 20, yes 10, no 10, with reasons 20" in result.stdout
    assert result.stdout.splitlines()[0] == "verdict: all that it needs is here"
    document = json.loads(dry_run("tiny.yaml", *tiny(tmp_path), "--json").stdout)
    assert document["facts"]["optimizer_steps"] == 2
    assert document["absences"] == []
    assert document["verdict"] == "verdict: all that it needs is here"


# --- absent ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "base", "trained"),
    [
        ("paco_reward_7b.yaml", "Qwen/Qwen2.5-VL-7B-Instruct", "80,740,352"),  # as in the released adapter
        ("qwen3_5_9b.yaml", "Qwen/Qwen3.5-9B", "86,556,672"),
    ],
)
def test_a_recipe_is_planned_without_data_and_weights(
    recipe: str, base: str, trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dry_run(recipe)
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    absent = [line for line in lines if line.startswith("absent ")]
    assert [line.split(" = ")[0] for line in absent] == [
        *["absent data.train"] * 2,
        "absent data.evaluation",
        "absent model.checkpoint",
    ]
    assert all(FETCH.format("data/PaCo-Dataset") in line for line in absent[:3])
    assert f"`hf download {base}`, 1" in absent[3]  # GB
    assert "optimizer steps: unknown until all its data are here" in lines
    assert f"trained parameters: {trained}" in lines
    assert lines[0] == "verdict: it would not run: 4 absent (data.train, data.evaluation, model.checkpoint)"


def test_what_is_here_is_counted_beside_what_is_absent(tmp_path: Path, pairs: Path) -> None:
    config = load(
        JudgeConfig, CONFIGS / "tiny.yaml", tiny(tmp_path, f"data.train=['{pairs}', '{tmp_path / 'no.jsonl'}']")
    )
    found = plan_reward(config)
    assert found.facts["train"]["pairs"] == 2
    assert found.facts["optimizer_steps"] == "unknown until all its data are here"
    (absence,) = found.absences
    assert (absence.key, absence.source) == ("data.train", str(tmp_path / "no.jsonl"))
    assert absence.remedy.startswith(f"{tmp_path / 'no.jsonl'} is not there; put it there, or name a .jsonl")
    capped = plan_reward(config.model_copy(update={"max_steps": 7}))
    assert capped.facts["optimizer_steps"] == 7


def test_a_faulty_source_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "rankings.csv").write_text("reference,first,second\n")
    (tmp_path / "notes.txt").write_text("a fox runs\n")
    (tmp_path / "broken.jsonl").write_text("{oops\n")
    (tmp_path / "torn.png").write_bytes(b"no image")
    (tmp_path / "dark.jsonl").write_text(json.dumps(pair(True, images=["torn.png", "torn.png"])) + "\n")
    for name, named in (
        ("rankings.csv", "rankings.csv"),
        ("notes.txt", "notes.txt"),
        ("broken.jsonl", "broken.jsonl:1:"),
        ("dark.jsonl", "torn.png"),
    ):
        result = dry_run("tiny.yaml", *tiny(tmp_path, f"data.train=['{tmp_path / name}']"))
        assert result.exit_code == 1
        assert named in str(result.exception)
        assert "data" in str(result.exception)


@pytest.mark.slow
def test_weights_and_an_adapter_that_are_absent_are_listed(tmp_path: Path) -> None:
    for file in TINY_JUDGE.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = load(
        JudgeConfig, CONFIGS / "tiny.yaml", tiny(tmp_path, f"model.checkpoint={tmp_path}", "tuning.start=lab/lora")
    )
    found = plan_reward(config)
    assert [(one.key, one.source) for one in found.absences] == [
        ("model.checkpoint", str(tmp_path)),
        ("tuning.start", "lab/lora"),
    ]
    assert found.absences[1].remedy == "a LoRA adapter: `hf download lab/lora`"
    assert found.notes == ()
    whole = plan_reward(load(JudgeConfig, CONFIGS / "tiny.yaml", tiny(tmp_path)))
    assert found.facts["all_parameters"] == whole.facts["all_parameters"]


# --- at fault --------------------------------------------------------------------------------------------------


def test_answers_that_the_tokenizer_reads_otherwise_are_a_fault(tmp_path: Path, pairs: Path) -> None:
    """A tokenizer with a token for "Yes." would never see the decision that is trained."""
    judge = tmp_path / "judge"
    shutil.copytree(TINY_JUDGE, judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.add_tokens(["Yes."])
    tokenizer.save_pretrained(judge)
    config = load(
        JudgeConfig, CONFIGS / "tiny.yaml", tiny(tmp_path, f"data.train=['{pairs}']", f"model.checkpoint={judge}")
    )
    with pytest.raises(ValueError, match=r"^data: .*does not begin with the token of 'Yes'"):
        plan_reward(config)


def test_a_checkpoint_s_processor_that_cannot_be_used_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model\.checkpoint = tiny: model\.max_pixels 1 is below the least"):
        plan_reward(load(JudgeConfig, CONFIGS / "tiny.yaml", tiny(tmp_path, "model.max_pixels=1")))
