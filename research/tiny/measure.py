"""Oracle's measures of a generator's sheets: `python -m research.tiny.measure FLUX SIZE ROWSxCOLS COUNT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pacorl.core.grid import join, parse_layout
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.models.policies.flux import FLUX
from pacorl.tiny.grading import grades_of, read_sets
from pacorl.tiny.words import asked_in
from pacorl.tiny.world import LOOKS, Panel, set_prompts
from pacorl.types import Grid, Prompt, Size


def measures(prompts: Sequence[Prompt], sets: Sequence[Sequence[Panel | None]]) -> dict[str, float]:
    """Grade sets: `grades_of`, the least κ of a look, and the share of poses, props, places and named looks that panels
    show as they were asked for."""
    matches: dict[str, list[bool]] = {"pose": [], "prop": [], "place": [], "named": []}
    for prompt, panels in zip(prompts, sets, strict=True):
        for wanted, panel in zip(asked_in(prompt), panels, strict=True):
            for name, value in wanted.items():
                matches["named" if name in LOOKS else name].append(getattr(panel, name, None) == value)
    grades = grades_of(prompts, sets)
    grades["least_kappa"] = min(grades[f"kappa/{name}"] for name in LOOKS)
    return {**grades, **{name: float(np.mean(values)) for name, values in matches.items() if values}}


def measure(folder: Path, *, size: int, grid: Grid, count: int, steps: int = 8) -> None:
    """Print the measures of a generator's sheets, and save a contact sheet."""
    policy = FLUX.load(FLUX.options_for(str(folder), dtype="float32", guidance_scale=3.5, max_sequence_length=48))
    prompts = set_prompts("test", count, grid=grid)
    sampler = Sampler(size=Size(size * grid.rows, size * grid.cols), steps=steps)
    seeds = [seed_of("measure", prompt.id) for prompt in prompts]
    images = sample_images(policy, prompts, sampler=sampler, cache=ConditioningCache(policy), seeds=seeds, batch=12)
    graded = ", ".join(f"{name} {value:.3f}" for name, value in measures(prompts, read_sets(prompts, images)).items())
    print(f"{folder.name} {grid} of {size} px: {graded}", flush=True)
    join(images[:12], Grid(2, 6)).save(folder.parent / f"{folder.name}-{grid}-{size}.png")


if __name__ == "__main__":
    folder, size, grid, count = sys.argv[1:5]
    measure(Path(folder), size=int(size), grid=parse_layout(grid), count=int(count))
