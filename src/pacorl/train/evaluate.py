"""What a policy has learned: its evaluation prompts at full size, without noise, judged and kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from pacorl.engine.rollout import sample_images, seed_of
from pacorl.rewards.consistency import Consistency
from pacorl.train.training import Grade, Training
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image


@torch.no_grad()
def evaluate(training: Training, grade: Grade | None = None) -> dict[str, float]:
    """Paints the evaluation prompts at full size without noise, judges and logs them."""
    config, runtime = training.config, training.runtime
    repeats = config.evaluation.samples_per_prompt
    jobs = [(prompt, turn) for prompt in training.evaluation_prompts for turn in range(repeats)]
    own = jobs[runtime.rank :: runtime.world]
    spent = training.seconds["evaluation"]
    with (
        training.timed("evaluation"),
        training.average.applied(),
        training.bars.phase("evaluating", total=len(own)) as advance,
    ):
        images = sample_images(
            training.policy,
            [prompt for prompt, _ in own],
            sampler=training.evaluation_sampler,
            cache=training.cache,
            seeds=[seed_of(config.seed, "evaluation", prompt.id, turn) for prompt, turn in own],
            batch=config.evaluation.batch,
            progress=advance,
        )
        lines = [
            line | {"seed": turn, "picture": image}
            for line, (_, turn), image in zip(_judged(training, own, images), own, images, strict=True)
        ]
    gathered = runtime.gather_rows({runtime.rank + runtime.world * i: line for i, line in enumerate(lines)})
    values = _keep_evaluation(training, list(gathered.values()))
    if grade:
        values |= grade([prompt for prompt, _ in jobs], [line["picture"] for line in gathered.values()])
    values["seconds/evaluation"] = training.seconds["evaluation"] - spent
    training.logbook.write("evaluation", epoch=training.epoch, step=training.step, values=values)
    return values


def _judged(training: Training, jobs: Sequence[tuple[Prompt, int]], images: Sequence[Image]) -> list[dict[str, Any]]:
    """A record per picture: its prompt, pair matrix and scores. Every question is asked once."""
    prompts = [prompt for prompt, _ in jobs]
    consistency = next((r for r in training.rewards.values() if isinstance(r, Consistency)), None)
    pairs = (consistency or Consistency(training.judge)).pairs(prompts, images)
    scores = {
        name: consistency.reduce(pairs) if reward is consistency else reward(prompts, images)
        for name, reward in training.rewards.items()
    }
    return [
        {
            "prompt_id": prompt.id,
            "text": prompt.text,
            "theme": prompt.theme,
            "grid": str(prompt.grid),
            "panels": list(prompt.panels),
            "p_yes": _matrix([verdict.p_yes for verdict in pairs[row]], prompt.grid.count),
            "scores": {name: column[row] for name, column in scores.items()},
        }
        for row, prompt in enumerate(prompts)
    ]


def _matrix(values: Sequence[float | None], count: int) -> list[list[float | None]]:
    matrix: list[list[float | None]] = [[None] * count for _ in range(count)]
    for (i, j), value in zip(combinations(range(count), 2), values, strict=True):
        matrix[i][j] = matrix[j][i] = value
    return matrix


def _keep_evaluation(training: Training, lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Writes pictures and records; returns the mean of each score."""
    name = f"evaluation-{training.epoch:06d}"
    for number, line in enumerate(lines):
        training.logbook.picture(f"{name}/{number:04d}", line["picture"])
    kept = [
        {key: value for key, value in line.items() if key != "picture"} | {"image": f"{name}/{number:04d}.png"}
        for number, line in enumerate(lines)
    ]
    training.logbook.records(name, kept)
    columns = {reward: [line["scores"][reward] for line in lines] for reward in training.rewards}
    columns["p_yes"] = [value for line in lines for row in line["p_yes"] for value in row]
    return {
        reward: fmean(known) for reward, column in columns.items() if (known := [v for v in column if v is not None])
    }
