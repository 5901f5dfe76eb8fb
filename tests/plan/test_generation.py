"""Plans of generating."""

from __future__ import annotations

import json

import pytest
from stories import SET
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.options import UsageError
from pacorl.generate.generator import Generator
from pacorl.models.int8 import streamed_bytes
from pacorl.types import Prompt


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
    words = ["generate", "a hero in town", *SET, "--dry-run", "--card", "18", *flux]
    assert "it fits with --memory low\n" in CliRunner().invoke(app, words).stderr
    assert peak("--memory", "low") <= peak()


def test_a_plan_for_another_card_compares_with_that_card() -> None:
    words = ["generate", "a hero in town", *SET, "--json", "--card"]
    document = json.loads(CliRunner().invoke(app, [*words, "12", "--dry-run"]).stdout)
    assert (document["device_bytes"], document["main_bytes"]) == (12 * 2**30, None)
    document = json.loads(CliRunner().invoke(app, [*words, "1", "--dry-run"]).stdout)
    assert "does not fit a card of 1 GB" in document["shortage"]
    assert isinstance(CliRunner().invoke(app, [*words, "12"]).exception, UsageError)


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
