"""Makers of the tiny world's checkpoints, and prompts for the examples.

    python -m research.tiny                   # every checkpoint, one after the other, in runs/tiny: hours of one core
    python -m research.tiny judge edit-judge  # some, from those that are there already
    python -m research.tiny edits heroes      # prompts of examples/tiny_edit.yaml and examples/tiny_hero.yaml

A stopped maker goes on where it was saved.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from research.tiny.clip import pretrain_clip
from research.tiny.editor import pretrain_editor, train_steady
from research.tiny.edits import world_edits, write_edits
from research.tiny.generator import make_unreliable, pretrain_generator
from research.tiny.heroes import hero_tasks, write_heroes
from research.tiny.judge import pretrain_edit_judge, pretrain_judge
from research.tiny.vae import pretrain_vae

CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "vae": lambda out: pretrain_vae(out / "vae"),
    "clip": lambda out: pretrain_clip(out / "clip", vae=out / "vae"),
    "judge": lambda out: pretrain_judge(out / "judge", vae=out / "vae"),
    "faultless": lambda out: pretrain_generator(out / "faultless", vae=out / "vae"),
    "flux": lambda out: make_unreliable(out / "flux", start=out / "faultless"),
    "kontext": lambda out: pretrain_editor(out / "kontext", start=out / "faultless"),
    "steady": lambda out: train_steady(out / "steady", start=out / "kontext"),
    "edit-judge": lambda out: pretrain_edit_judge(out / "edit-judge", vae=out / "vae", start=out / "judge"),
}
"""Name → maker, each after those that it starts from. src/pacorl/tiny/checkpoints has all but vae and faultless."""
COUNTS = {"train": 288, "dev": 96, "test": 96}
"""Prompts of a split."""


def write_edit_prompts(out: Path) -> None:
    for split, count in COUNTS.items():
        write_edits(out / "edits", world_edits(split, count), name=split)  # type: ignore[arg-type]


def write_hero_prompts(out: Path) -> None:
    for split, count in COUNTS.items():
        write_heroes(out / "heroes", hero_tasks(split, count), name=split)  # type: ignore[arg-type]


def main() -> None:
    makers = {**CHECKPOINTS, "edits": write_edit_prompts, "heroes": write_hero_prompts}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(makers))
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"))
    options = parser.parse_args()
    if unknown := set(options.names) - set(makers):
        parser.error(f"there is no {', '.join(sorted(unknown))}; name some of {', '.join(makers)}")
    for name in options.names or CHECKPOINTS:
        makers[name](options.out)


if __name__ == "__main__":
    main()
