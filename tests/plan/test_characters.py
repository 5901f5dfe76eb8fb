"""Plans of the recipes of characters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.plan.test_plan import measured_peak
from tiny_hero import SMALL, hero_config, make_hero
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from pacorl.character_training.character_trainer import CharacterTrainer
from pacorl.cli import app
from pacorl.config.recipes import read_header, recipe, recipe_names
from pacorl.models.int8 import weight_bytes
from pacorl.plan.characters import plan_character
from pacorl.plan.ledger import MemoryLedger
from pacorl.plan.plan import CARD_MARGIN

CHARACTERS = [name for name in recipe_names() if name.startswith("character/") and name != "character/tiny"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if "klein" in name else pytest.mark.nightly) for name in CHARACTERS],
)
def test_a_character_s_recipe_fits_the_card_that_it_names(name: str, tmp_path: Path) -> None:
    gigabytes = int(re.fullmatch(r"One card of (\d+) GB", read_header(recipe(name))[0])[1])  # type: ignore[index]
    assert name.endswith(f"_{gigabytes}gb")
    words = ["train-character", str(make_hero(tmp_path / "zorp")), "--config", name, "--dry-run", "--json"]
    result = CliRunner().invoke(app, [*words, "--card", str(gigabytes)])
    plan = json.loads(result.stdout)
    assert plan["peak_bytes"] + CARD_MARGIN <= gigabytes * 2**30
    (absence,) = plan["absences"]
    assert "hf download" in absence["remedy"]
    assert (result.exit_code, plan["shortage"]) == (2, "")


@pytest.mark.slow
def test_a_character_s_plan_is_what_its_run_takes(tmp_path: Path) -> None:
    config = hero_config(make_hero(tmp_path / "zorp", pictures=4), tmp_path / "run", *SMALL)
    plan = plan_character(config)
    trainer = CharacterTrainer(config)
    with MemoryLedger() as run:
        trainer.train()
    assert plan.memory.flops == pytest.approx(run.flops, rel=0.1)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as step:
        trainer.train_step()
    transformer = trainer.lora.transformer
    adapter = sum(weight.nbytes for weight in trainer.lora.parameters)
    # Weights, moving average, the best adapter, and AdamW's two moments.
    lasting = weight_bytes(transformer) + weight_bytes(trainer.policy.pipeline.vae) + 4 * adapter
    assert plan.memory.phases["train"] - lasting == pytest.approx(measured_peak(step), rel=0.2)
