"""Command lines that write a folder `run`, and do the same however often they begin again in it."""

from __future__ import annotations

from pathlib import Path

import toy_world

from pacorl.tiny.world import all_panels, draw

CONFIGS = Path(__file__).parents[2] / "configs"
# Two epochs of the toy world, each with an evaluation, a page and a checkpoint; by this seed the second is the better
# one, so that the first is deleted.
POLICY = [
    "epochs=2",
    "save_every=1",
    "keep_checkpoints=1",
    "evaluation.every=1",
    "prompts.evaluation=tiny:dev:1",
    "seed=3",
]
# Three steps of the tiny judge on pairs that it draws, each with a checkpoint, of which two are kept.
JUDGE = [
    *("data.train=[tiny:train:4]", "data.evaluation=[tiny:dev:2]", "optimizer.batch=2", "max_steps=3", "trackers=[]"),
    *("log_every=1", "evaluate_every=1", "save_every=1"),
]
SET = ["--panel", "waving, flag", "--panel", "jumping, boat", "--panel", "standing, tree", "--panel", "waving, lamp"]
SMALL = ["--model", "tiny", "--size", "64x64", "--steps", "1"]
STORIES = {
    "train-policy": [
        ["train-policy", f"{CONFIGS}/tiny.yaml", *toy_world.SETTINGS, *POLICY, "out=run", "--resume", "auto"]
    ],
    "train-reward": [["train-reward", f"{CONFIGS}/reward/tiny.yaml", *JUDGE, "out=run", "--resume", "auto"]],
    "dataset": [
        ["dataset", "prompts", "run", "--model", "tiny", "--count", "4"],
        ["dataset", "diversify", "run", "--number", "2"],
        ["dataset", "generate", "run", "--grids", "2", *SMALL],
        ["dataset", "pair", "run"],
    ],
    "export": [["dataset", "export", "run", "--rankings", "rankings.csv", "--test-share", "0.5"]],
    "generate": [["generate", "a red hero with a crown in town", *SET, *SMALL, "--out", "run"]],
    "check": [["check", "a.png", "b.png", "--judge", "tiny", "--min", "0.5", "--report", "run/page.html"]],
}


def draw_images() -> None:
    """Draw what `check` and `dataset export` read into the working folder."""
    for panel, name in zip(all_panels()[:6], "abcdef", strict=True):
        draw(panel, 32).save(f"{name}.png")
    Path("rankings.csv").write_text("reference,candidates\na.png,b.png | c.png\nd.png,e.png | f.png\n")
