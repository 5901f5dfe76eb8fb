"""RL of the tiny editor with the reward √(kept·followed): `python -m tools.tiny edit-story`.

Each seed is a whole run of one config. The judge rewards. The oracle of the tiny world grades *kept* and *followed*
before and after the run, on held-out sources with the same noise. The verdict is the worst seed's; an image shows some
edits of the first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import train_policy
from pacorl.io.documents import JsonObject, read_jsonl, write_json
from pacorl.io.images import open_image
from pacorl.records.prompts import prompts_from
from pacorl.tiny.character_edits import EDIT_GRADES, grade_edits
from pacorl.tiny.characters import Oracle

KEPT_GOAL = 0.10
"""Minimum rise of *kept* in every seed; *followed* must not fall."""


def run_edit_story(
    config: Path, *, out: Path, seeds: Sequence[int], overrides: Sequence[str] = ()
) -> tuple[Path, list[str]]:
    """Run `config` once per seed into `out`/seed-N and write `out`/summary.json and `out`/edits.png.

    Finished runs stay, unfinished runs go on.

    Returns:
        The summary's path, and the lines of a verdict.
    """
    # Each seed is a whole run, graded by the oracle at each evaluation.
    grade = partial(grade_edits, oracle=Oracle())
    rows = []
    for seed in seeds:
        run = configs.load(PolicyConfig, config, [*overrides, f"seed={seed}", f"out={out / f'seed-{seed}'}"])
        train_policy(run, resume="auto", extra_metrics=grade)
        rows.append({"seed": seed, **before_and_after(run.out)})
        if seed == seeds[0]:
            draw_edits(run).save(out / "edits.png")
    summary = summarize(rows)
    write_json(out / "summary.json", summary)
    return out / "summary.json", verdict(summary)


def before_and_after(run: Path) -> dict[str, dict[str, float]]:
    """Return the oracle's grades at the first and at the last evaluation of a run, and their difference."""
    evaluations = []
    for line in read_jsonl(run / "metrics.jsonl"):
        if line["kind"] == "evaluation":
            evaluations.append(line)

    # First and last, and what changed between them.
    grades: dict[str, dict[str, float]] = {"before": {}, "after": {}, "change": {}}
    for name in EDIT_GRADES:
        before = evaluations[0][name]
        after = evaluations[-1][name]
        grades["before"][name] = before
        grades["after"][name] = after
        grades["change"][name] = after - before
    return grades


def summarize(rows: Sequence[JsonObject]) -> JsonObject:
    """Return the seeds, the smallest change of each grade over them, and whether it reaches the goal."""
    worst = {}
    for name in EDIT_GRADES:
        worst[name] = min(row["change"][name] for row in rows)

    return {"seeds": rows, "worst": worst, "reached": worst["kept"] >= KEPT_GOAL and worst["followed"] >= 0}


def verdict(summary: JsonObject) -> list[str]:
    """A line per seed, and one for the worst."""
    lines = []
    for row in summary["seeds"]:
        grades = []
        for name in EDIT_GRADES:
            grades.append(f"{name} {row['before'][name]:.3f} → {row['after'][name]:.3f}")

        lines.append(f"seed {row['seed']}: {', '.join(grades)}")
    # The worst seed decides: a mean would hide a failed run.
    worst = summary["worst"]
    words = "reached" if summary["reached"] else "not reached"
    goals = f"kept {worst['kept']:+.3f} (wanted +{KEPT_GOAL:.2f}), followed {worst['followed']:+.3f} (wanted no fall)"
    return [*lines, f"worst change: {goals}: {words}"]


SHOWN = 8
CELL = 112
MARGIN = 8


def draw_edits(run: PolicyConfig) -> Image.Image:
    """Draw sources, or references, and their images before and after the run, from the same noise."""
    # The rows of images.
    prompts = prompts_from(run.prompts.evaluation, limit=None)[:SHOWN]
    samples = run.out / "samples"
    given = "source" if prompts[0].sources else "reference"
    rows = {given: [open_image((*prompt.sources, *prompt.references)[0]) for prompt in prompts]}
    evaluations = sorted(samples.glob("evaluation-*.jsonl"))
    for name, file in (("before", evaluations[0]), ("after", evaluations[-1])):
        # Each source is edited more than once; reversed, so that the first of a prompt's images stays.
        first = {}
        for line in reversed(read_jsonl(file)):
            first[line["prompt_id"]] = line["image"]
        rows[name] = [open_image(samples / first[prompt.id]) for prompt in prompts]

    # The table.
    step = CELL + MARGIN
    font = ImageFont.load_default(13)
    canvas = Image.new("RGB", (60 + step * len(prompts), 44 + step * len(rows)), "white")
    pen = ImageDraw.Draw(canvas)
    for col, prompt in enumerate(prompts):
        pen.multiline_text((60 + step * col, 6), textwrap.fill(prompt.text, 17), fill="black", font=font)
    for row, (name, images) in enumerate(rows.items()):
        pen.text((MARGIN, 44 + step * row + CELL // 2 - 8), name, fill="black", font=font)
        for col, image in enumerate(images):
            canvas.paste(image.resize((CELL, CELL), Image.Resampling.NEAREST), (60 + step * col, 44 + step * row))
    return canvas
