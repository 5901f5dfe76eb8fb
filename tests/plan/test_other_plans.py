"""Plans of generating, and of the recipes of characters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from stories import SET
from tests.plan.test_plan import measured_peak
from tiny_hero import SMALL, hero_config, make_hero
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from pacorl.character_training.character_trainer import CharacterTrainer
from pacorl.cli import app
from pacorl.config.recipes import read_header, recipe, recipe_names
from pacorl.generate.generator import Generator
from pacorl.models.int8 import streamed_bytes, weight_bytes
from pacorl.plan.characters import plan_character
from pacorl.plan.ledger import MemoryLedger
from pacorl.plan.plan import CARD_MARGIN
from pacorl.types import Prompt

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


@pytest.mark.slow
def test_generating_fits_small_cards() -> None:
    def peak(*flags: str) -> float:
        """GiB of the card."""
        result = CliRunner().invoke(app, ["generate", "a hero in town", *SET, "--dry-run", "--json", *flags])
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
        assert generator.turns.enabled
        assert bool(streamed_bytes(generator.policy.transformer)) == (memory == "lowest")
        assert generator.sample([prompt], [0], steps=2)[0].tobytes() == image.tobytes()
