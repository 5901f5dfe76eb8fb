"""Characters as folders: read, found, and refused in one line."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from pacorl.records.characters import characters_of, find_character
from pacorl.types import Character, Grid, Prompt

CARD = """
description: a red round hero
keep: {outfit: crown, palette: night}
"""


def make(folder: Path, card: str = CARD, images: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "card.yaml").write_text(card, encoding="utf-8")
    for number in range(images):
        Image.new("RGB", (8, 8)).save(folder / f"{number:02d}.png")
    return folder


def test_a_folder_is_a_character(tmp_path):
    hero = find_character("hero", make(tmp_path / "characters" / "hero", images=14).parents[1])
    assert (hero.name, len(hero.images)) == ("hero", 14)
    assert hero.text == "a red round hero, crown, night"


def test_a_name_within_another_word_names_nobody():
    ann, bo = (Character(name, "", (Path(f"{name}.png"),)) for name in ("ann", "bo_x"))
    texts = ("Joanna plans a channel", "Ann waves", "a box and Bo X's ann")
    prompt = Prompt(0, "", grid=Grid(1, 3), panels=texts, characters=(ann, bo))
    assert characters_of(prompt) == [[], [ann], [ann, bo]]
