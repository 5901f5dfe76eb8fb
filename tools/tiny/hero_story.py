"""RL of the tiny Kontext with the reward `reference`: `python -m tools.tiny hero-story`.

Each seed is a whole run of one config. The judge rewards. The oracle of the tiny world grades each image before and
after the run: held-out heroes, the same noise. Intervals draw the prompts again. The verdict is the worst seed's; an
image shows some heroes of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import train_policy
from pacorl.io.documents import JsonObject, read_jsonl, write_json
from pacorl.io.images import open_image
from pacorl.records.prompts import prompts_from
from pacorl.tiny.characters import Oracle
from tools.tiny.edit_story import draw_edits
from tools.tiny.heroes import HERO_GRADES, grade_heroes

DRAWS = 2000


def run_hero_story(
    config: Path, *, out: Path, seeds: Sequence[int], overrides: Sequence[str] = ()
) -> tuple[Path, list[str]]:
    """Run `config` once per seed into `out`/seed-N and write `out`/summary.json and `out`/heroes.png.

    Finished runs stay, unfinished runs go on.

    Returns:
        The summary's path, and the lines of a verdict.
    """
    rows = []
    for seed in seeds:
        run = configs.load(PolicyConfig, config, [*overrides, f"seed={seed}", f"out={out / f'seed-{seed}'}"])
        train_policy(run, resume="auto")
        evaluations = sorted((run.out / "samples").glob("evaluation-*.jsonl"))
        before, after = (grades_of(path, run) for path in (evaluations[0], evaluations[-1]))
        rows.append({"seed": seed, **changes(before, after)})
        if seed == seeds[0]:
            draw_edits(run).save(out / "heroes.png")
    summary = {"seeds": rows, "reached": all(holds(row) for row in rows)}
    write_json(out / "summary.json", summary)
    return out / "summary.json", verdict(summary)


def grades_of(evaluation: Path, run: PolicyConfig) -> NDArray[np.float64]:
    """Grade the images of an evaluation: (prompts, images of a prompt, HERO_GRADES)."""
    prompts = {prompt.id: prompt for prompt in prompts_from(run.prompts.evaluation)}
    lines = sorted(read_jsonl(evaluation), key=lambda line: (line["prompt_id"], line["seed"]))
    images = [open_image(evaluation.parent / line["image"]) for line in lines]
    shown = [prompts[line["prompt_id"]] for line in lines]
    rows = []
    for grades in grade_heroes(shown, images, oracle=Oracle()):
        rows.append([grades[name] for name in HERO_GRADES])
    table = np.array(rows)
    return table.reshape(-1, run.evaluation.samples_per_prompt, len(HERO_GRADES))


def changes(before_PSG: NDArray[np.float64], after_PSG: NDArray[np.float64]) -> JsonObject:
    """Return before, after and change of each grade, with a 95 % bootstrap interval over prompts."""
    change_PG = (after_PSG - before_PSG).mean(1)
    draws = np.random.default_rng(0).integers(0, len(change_PG), (DRAWS, len(change_PG)))
    low, high = np.quantile(change_PG[draws].mean(1), [0.025, 0.975], axis=0)
    grades = {}
    for number, name in enumerate(HERO_GRADES):
        grades[name] = {
            "before": rounded(before_PSG[..., number].mean()),
            "after": rounded(after_PSG[..., number].mean()),
            "change": rounded(change_PG[:, number].mean()),
            "low": rounded(low[number]),
            "high": rounded(high[number]),
        }
    return grades


def rounded(figure: np.float64) -> float:
    """Round a figure of the summary."""
    return round(float(figure), 4)


def holds(row: JsonObject) -> bool:
    """Return whether identity rose, by its whole interval, and pasting did not."""
    return bool(row["identity"]["low"] > 0 and row["pasted"]["change"] <= 0)


def verdict(summary: JsonObject) -> list[str]:
    """A line per seed, and one for all."""
    lines = []
    for row in summary["seeds"]:
        grades = []
        for name in HERO_GRADES:
            grade = row[name]
            interval = f"{grade['change']:+.3f} [{grade['low']:.3f}, {grade['high']:.3f}]"
            grades.append(f"{name} {grade['before']:.3f} → {grade['after']:.3f}, {interval}")
        lines.append(f"seed {row['seed']}: {'; '.join(grades)}")
    words = "reached" if summary["reached"] else "not reached"
    return [*lines, f"identity rises in each seed, and pasting in none: {words}"]
