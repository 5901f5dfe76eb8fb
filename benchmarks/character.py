"""Does a LoRA of six pictures draw the character? Three heroes of the tiny world, graded by the oracle.

    python benchmarks/character.py                     # 100 steps each, two CPU minutes in all
    python benchmarks/character.py --steps 200 --json

Each seed draws a hero in six scenes, trains `character/tiny` on it, and generates the twelve other scenes, by the base
and by the LoRA, from the same noise. The captions name the trigger word and the scene, and no trait. The oracle grades
identity (share of the four kept traits), prompt match (share of pose and prop) and pasting (share of images whose
nearest drawing is a training picture). The base never saw the trigger word, nor a prompt of one panel.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from pacorl.character_training.character_config import CharacterConfig
from pacorl.character_training.character_trainer import CharacterTrainer
from pacorl.io.documents import read_jsonl
from pacorl.io.quiet import quiet_loading
from pacorl.runtime.cores import use_cores
from pacorl.tiny.characters import SCENES, Oracle, Panel, draw, subjects_of

TRIGGER = "zorp"
MEASURES = ("identity", "prompt match", "pasting")


def main() -> None:
    options = arguments()
    quiet_loading()
    use_cores()
    heroes = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            heroes.append(measure(seed, Path(folder), steps=options.steps))

    result: dict[str, object] = {"steps": options.steps, "heroes": heroes}
    for side in ("base", "LoRA"):
        means = {name: sum(hero[side][name] for hero in heroes) / len(heroes) for name in MEASURES}
        result[side] = {name: round(mean, 3) for name, mean in means.items()}
    print(json.dumps(result, indent=2) if options.json else f"base {result['base']}\nLoRA {result['LoRA']}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure(seed: int, folder: Path, *, steps: int) -> dict[str, dict[str, float]]:
    """Train on one hero, and grade base and LoRA on the scenes that were not trained on."""
    rng = random.Random(seed)
    subject = rng.choice(subjects_of("test"))
    scenes = rng.sample(SCENES, len(SCENES))
    panels = [Panel(*subject, *scene) for scene in scenes]  # type: ignore[call-arg]
    trained, asked = panels[:6], panels[6:]

    hero = folder / "hero"
    hero.mkdir()
    (hero / "card.yaml").write_text("description: hero\n")
    for number, panel in enumerate(trained):
        draw(panel, 128).save(hero / f"{number}.png")
        (hero / f"{number}.txt").write_text(prompt_of(panel))
    config = CharacterConfig.from_yaml(
        "character/tiny",
        f"character={hero}",
        f"out={folder / 'run'}",
        f"seed={seed}",
        f"steps={steps}",
        "gallery.seeds=1",
        f"gallery.prompts={json.dumps([prompt_of(panel) for panel in asked])}",
    )
    result = CharacterTrainer(config).train()

    samples = folder / "run" / "samples"
    base, lora = sorted(samples.glob("evaluation-*.jsonl"))
    before, *_ = read_jsonl(folder / "run" / "metrics.jsonl")
    graded = {"held-out loss": {"base": before["held_out_loss"], "LoRA": result.metrics["held_out_loss"]}}
    for side, records in (("base", base), ("LoRA", lora)):
        images = [Image.open(samples / record["image"]) for record in read_jsonl(records)]
        graded[side] = grade([panel for panel, _ in Oracle().nearest(images)], asked, trained)
    return graded


def prompt_of(panel: Panel) -> str:
    return f"{TRIGGER} hero, {panel.pose}, {panel.prop}"


def grade(shown: Sequence[Panel], asked: Sequence[Panel], trained: Sequence[Panel]) -> dict[str, float]:
    """Average MEASURES over images, of which the nearest drawings are `shown`."""
    identity = matched = pasted = 0.0
    for panel, wanted in zip(shown, asked, strict=True):
        identity += sum(trait == kept for trait, kept in zip(panel.kept, wanted.kept, strict=True)) / len(wanted.kept)
        matched += ((panel.pose == wanted.pose) + (panel.prop == wanted.prop)) / 2
        pasted += panel in trained
    values = (identity, matched, pasted)
    return {name: value / len(shown) for name, value in zip(MEASURES, values, strict=True)}


if __name__ == "__main__":
    main()
