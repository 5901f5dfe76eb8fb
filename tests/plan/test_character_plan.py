"""The plan of a character's training: images, captions, steps, memory; and each recipe on its card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_hero import hero_config, make_hero

from pacorl.character_training.character_config import CharacterConfig
from pacorl.config.recipes import read_header, recipe, recipe_names
from pacorl.plan.character_plan import plan_character
from pacorl.plan.plan import CARD_MARGIN, Plan

RECIPES = [name for name in recipe_names() if name.startswith("character/")]


@pytest.mark.slow
def test_the_plan_counts_images_steps_and_weights(tmp_path: Path) -> None:
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
