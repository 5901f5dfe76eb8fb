"""A short run of the hero, which several tests read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_hero import SMALL, hero_config, make_hero

from pacorl.character_training.character_trainer import CharacterTrainer


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of four steps; the hero's pictures are beside it."""
    folder = tmp_path_factory.mktemp("run")
    hero = make_hero(folder / "zorp")
    CharacterTrainer(hero_config(hero, folder / "run", *SMALL)).train()
    return folder / "run"
