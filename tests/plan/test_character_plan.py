"""The plan of a character's training: images, captions, steps, memory; and each recipe on its card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_hero import hero_config, make_hero

from pacorl.character_training.character_config import CharacterConfig
from pacorl.config.recipes import read_header, recipe, recipe_names
from pacorl.plan.character_plan import plan_character
from pacorl.plan.plan import CARD_MARGIN

RECIPES = [name for name in recipe_names() if name.startswith("character/")]


@pytest.mark.slow
def test_the_plan_counts_images_steps_and_weights(tmp_path: Path) -> None:
    hero = make_hero(tmp_path / "zorp", captions=False)
    plan = plan_character(hero_config(hero, tmp_path / "run", "steps=10", "adapter={rank: 4, alpha: 4}"))
    assert (plan.facts["images"], plan.facts["steps"]) == ({"trained": 5, "held out": 1}, 10)
    assert plan.facts["each_image_seen"] == 10 * 8 / 5
    assert plan.facts["trained_parameters"] == 49_152  # the tiny transformer's layers at rank 4
    assert "0.png zorp, hero" in str(plan)
    assert any("share the card's caption" in note for note in plan.notes)
    assert plan.exit_code == 0
    assert not (tmp_path / "run").exists()

    # A larger image takes more memory.
    large = plan_character(hero_config(hero, tmp_path / "run", "size=[256, 256]"))
    assert large.phase_bytes("train") > 2 * plan.phase_bytes("train")
    assert any("0.png has fewer pixels than size 256x256 (6 such)" in note for note in large.notes)


@pytest.mark.slow
def test_training_at_guidance_takes_one_forward(tmp_path: Path) -> None:
    hero = make_hero(tmp_path / "zorp", pictures=4)
    plain, guided = (
        plan_character(hero_config(hero, tmp_path / "run", f"model.true_cfg_scale={scale}")) for scale in (1, 4)
    )
    assert plain.phase_bytes("train") == guided.phase_bytes("train")
    assert any("no image is held out" in note for note in plain.notes)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "character/klein_12gb" else pytest.mark.nightly)
        for name in RECIPES
        if name != "character/tiny"
    ],
)
def test_a_recipe_fits_the_card_that_it_names(name: str, tmp_path: Path) -> None:
    hero = make_hero(tmp_path / "zorp", pictures=5)
    plan = plan_character(CharacterConfig.from_yaml(name, f"character={hero}"))
    card, _ = read_header(recipe(name))
    gigabytes = int(re.fullmatch(r"One card of (\d+) GB", card)[1])  # type: ignore[index]
    assert name.endswith(f"_{gigabytes}gb")
    assert plan.peak_bytes + CARD_MARGIN <= gigabytes * 2**30


def test_there_are_recipes_for_three_cards() -> None:
    assert {name.rpartition("_")[2] for name in RECIPES} >= {"12gb", "16gb", "24gb"}
