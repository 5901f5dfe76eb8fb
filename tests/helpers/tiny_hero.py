"""A hero of the tiny world as a character's folder: six drawn pictures, a card and captions."""

from __future__ import annotations

from pathlib import Path

from pacorl.character_training.character_config import CharacterConfig
from pacorl.tiny.world import LOOKS, Panel, draw

HERO = {"colour": "red", "shape": "round", "hat": "crown", "palette": "night"}
PLACE = "town"
SCENES = (
    *(("waving", "flag"), ("jumping", "house"), ("standing", "ball")),
    *(("waving", "tree"), ("jumping", "lamp"), ("standing", "boat")),
)
SMALL = ["steps=4", "evaluate_every=2", "optimizer.batch=2", "optimizer.micro_batch=2", "gallery.steps=2"]
"""What makes a run take seconds."""


def make_hero(folder: Path, *, pictures: int = 6, captions: bool = True) -> Path:
    """Draw the hero into `folder`; captions name the trigger word and the scene, and no trait of the hero."""
    folder.mkdir(parents=True)
    (folder / "card.yaml").write_text("description: hero\n", encoding="utf-8")
    for number, (pose, prop) in enumerate(SCENES[:pictures]):
        draw(Panel(**HERO, place=PLACE, pose=pose, prop=prop), 64).save(folder / f"{number}.png")
        if captions:
            (folder / f"{number}.txt").write_text(f"zorp hero in town, {pose}, {prop}\n", encoding="utf-8")
    return folder


def hero_config(hero: Path, out: Path, *overrides: str) -> CharacterConfig:
    """The recipe character/tiny for a hero's folder."""
    gallery = 'gallery.prompts=["zorp hero in town, waving, boat"]'
    return CharacterConfig.from_yaml(
        "character/tiny", f"character={hero}", f"out={out}", gallery, "gallery.seeds=1", *overrides
    )


def likeness(panels: list[Panel]) -> float:
    """Share of the hero's traits that panels show."""
    matches = [getattr(panel, name) == HERO[name] for panel in panels for name in LOOKS]
    return sum(matches) / len(matches)
