"""Plans of a character's training, of generating and of a judge's training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_hero import hero_config, make_hero
from typer.testing import CliRunner, Result

from pacorl.character_training.character_config import CharacterConfig
from pacorl.cli import app
from pacorl.config.base import load
from pacorl.config.recipes import read_header, recipe, recipe_names
from pacorl.generate.generator import Generator
from pacorl.judge.local import TINY_JUDGE
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.models.int8 import streamed_bytes
from pacorl.plan.character_plan import plan_character
from pacorl.plan.judge_plan import plan_reward
from pacorl.plan.plan import CARD_MARGIN, Plan
from pacorl.types import Prompt

CHARACTERS = [name for name in recipe_names() if name.startswith("character/") and name != "character/tiny"]
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's


@pytest.fixture(autouse=True)
def _empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


# --- a character -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_character_s_plan_counts_images_steps_and_weights(tmp_path: Path) -> None:
    hero = make_hero(tmp_path / "zorp", captions=False)

    def planned(*overrides: str) -> Plan:
        return plan_character(hero_config(hero, tmp_path / "run", *overrides))

    plan = planned("steps=10", "adapter={rank: 4, alpha: 4}")
    assert plan.facts["images"] == {"trained": 5, "held_out": 1}
    assert (plan.facts["steps"], plan.facts["trained_parameters"]) == (10, 49_152)
    assert not (tmp_path / "run").exists()
    assert planned("size=[256, 256]").memory.phases["train"] > 2 * plan.memory.phases["train"]
    # The loss is of the unguided velocity.
    guided, unguided = (planned(f"model.true_cfg_scale={scale}").memory.phases["train"] for scale in (4, 1))
    assert guided == unguided


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "klein" in name else pytest.mark.nightly) for name in CHARACTERS],
)
def test_a_recipe_fits_the_card_that_it_names(name: str, tmp_path: Path) -> None:
    hero = make_hero(tmp_path / "zorp", pictures=5)
    plan = plan_character(CharacterConfig.from_yaml(name, f"character={hero}"))
    gigabytes = int(re.fullmatch(r"One card of (\d+) GB", read_header(recipe(name))[0])[1])  # type: ignore[index]
    assert name.endswith(f"_{gigabytes}gb")
    assert plan.peak_bytes + CARD_MARGIN <= gigabytes * 2**30


# --- generating ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_generating_fits_small_cards() -> None:
    def peak(*flags: str) -> float:
        """GiB of the card."""
        result = CliRunner().invoke(app, ["generate", "--dry-run", "--json", *flags])
        document = json.loads(result.stdout)
        assert result.exit_code == (2 if document["absences"] else 0), result.output
        return float(document["peak_bytes"]) / 2**30

    flux = ["--model", "black-forest-labs/FLUX.1-dev"]
    assert peak(*flux, "--memory", "lowest") <= 2
    assert 12 < peak(*flux, "--memory", "low") <= 14.5
    assert peak(*flux) > 32
    assert peak("--memory", "low") <= peak()


@pytest.mark.slow
def test_with_little_memory_the_image_of_packed_weights_is_generated_in_turns() -> None:
    prompt = Prompt(0, "a red hero with a crown in town | waving, flag | jumping, boat | standing, tree | waving, lamp")
    packed = Generator.from_pretrained("tiny")
    packed.policy.options = packed.policy.options.in_memory("low")
    packed.policy.place_transformer("cpu")
    (image,) = packed.sample([prompt], [0], steps=2)
    for memory in ("low", "lowest"):
        generator = Generator.from_pretrained("tiny", memory=memory)
        assert generator.turns is not None
        assert bool(streamed_bytes(generator.policy.transformer)) == (memory == "lowest")
        assert generator.sample([prompt], [0], steps=2)[0].tobytes() == image.tobytes()


# --- a judge ---------------------------------------------------------------------------------------------------


def pair(consistent: bool, **more: Any) -> dict[str, Any]:
    return {"images": ["a.png", "a.png"], "question": "Same?", "consistent": consistent} | more


def dry_run(name: str, *overrides: str) -> Result:
    return CliRunner().invoke(app, ["train-reward", f"reward/{name}", "--dry-run", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "base", "trained"),
    [
        ("paco_reward_7b", "Qwen/Qwen2.5-VL-7B-Instruct", 80_740_352),  # as in the released adapter
        ("qwen3_5_9b", "Qwen/Qwen3.5-9B", 86_556_672),
    ],
)
def test_a_judge_is_planned_without_data_and_weights(
    name: str, base: str, trained: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = dry_run(name, "--json")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    absences = document["absences"]
    assert [absence["key"] for absence in absences] == [*["data.train"] * 2, "data.evaluation", "model.checkpoint"]
    assert all("`pacorl data paco-dataset`" in absence["remedy"] for absence in absences[:3])
    assert f"`hf download {base}`, 1" in absences[3]["remedy"]  # GB
    assert document["facts"]["trained_parameters"] == trained
    assert document["facts"]["optimizer_steps"] is None


def test_a_judge_s_data_are_counted_or_refused_by_their_key(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    (tmp_path / "torn.png").write_bytes(b"no image")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair(same)) + "\n" for same in (True, False)))
    (tmp_path / "dark.jsonl").write_text(json.dumps(pair(True, images=["torn.png", "torn.png"])) + "\n")
    (tmp_path / "broken.jsonl").write_text("{oops\n")
    for file in TINY_JUDGE.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())

    def settings(*names: str) -> list[str]:
        files = ", ".join(f"'{tmp_path / name}'" for name in names)
        return [f"data.train=[{files}]", "data.evaluation=[tiny:dev:4]", f"out={tmp_path / 'run'}"]

    overrides = [*settings("pairs.jsonl", "no.jsonl"), "max_steps=7", f"model.checkpoint={tmp_path}"]
    found = plan_reward(load(JudgeConfig, recipe("reward/tiny"), [*overrides, "tuning.start=lab/lora"]))
    assert (found.facts["train_pairs"], found.facts["optimizer_steps"]) == (2, 7)
    assert [absence.key for absence in found.absences] == ["data.train", "model.checkpoint", "tuning.start"]
    assert found.absences[2].remedy.endswith("`hf download lab/lora`")
    for name, named in (("broken.jsonl", "broken.jsonl:1:"), ("dark.jsonl", "torn.png")):
        refused = dry_run("tiny", *settings(name))
        assert refused.exit_code == 1
        assert named in str(refused.exception)
        assert "data" in str(refused.exception)
