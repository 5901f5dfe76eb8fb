"""Oracle's measures of a generator's sheets: `python -m research.world.measure FLUX [panels' size] [grid] [count]`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from pacorl.core.contrast import kappa
from pacorl.core.grid import join, split
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.models.policies.flux import FLUX
from pacorl.types import Grid, Size
from research.world.oracle import Oracle, agreement
from research.world.world import LOOKS, PLACE_WORDS, set_prompts


def measure(folder: Path, *, size: int, grid: Grid, count: int, steps: int = 8) -> None:
    """Print agreement within and across sets, κ per look, match and validity; save a contact sheet."""
    policy = FLUX.from_pretrained(folder, dtype="float32", guidance_scale=3.5, max_sequence_length=48)
    prompts = set_prompts("test", count, grid=grid)
    sampler = Sampler(size=Size(size * grid.rows, size * grid.cols), steps=steps)
    seeds = [seed_of("measure", prompt.id) for prompt in prompts]
    images = sample_images(policy, prompts, sampler=sampler, cache=ConditioningCache(policy), seeds=seeds, batch=12)
    oracle = Oracle()
    sets = [oracle.read(split(image, grid)) for image in images]
    matches: dict[str, list[bool]] = {"pose": [], "prop": [], "place": []}
    for prompt, panels in zip(prompts, sets, strict=True):
        place = next(name for name, words in PLACE_WORDS.items() if words in prompt.theme)
        for text, panel in zip(prompt.panels, panels, strict=True):
            pose, prop = text.split(", ")
            for name, value in (("pose", pose), ("prop", prop), ("place", place)):
                matches[name].append(panel is not None and getattr(panel, name) == value)
    # Only themes without names: a named look agrees across sets, too, by chance of the theme.
    free = [
        s
        for prompt, s in zip(prompts, sets, strict=True)
        if prompt.theme.startswith("a hero ") and prompt.theme.endswith(tuple(PLACE_WORDS.values()))
    ]
    measured = agreement(free)
    valid = float(np.mean([panel is not None for s in sets for panel in s]))
    print(
        f"{folder.name} {grid} of {size} px: valid {valid:.3f}",
        " ".join(f"{name} {np.mean(values):.3f}" for name, values in matches.items()),
        f"| {len(free)} free sets: agreement {np.mean([w for w, _ in measured.values()]):.3f}",
        f"across {np.mean([a for _, a in measured.values()]):.3f} κ",
        " ".join(f"{name} {kappa(*measured[name]):.2f}" for name in LOOKS),
        flush=True,
    )
    join(images[:12], Grid(2, 6)).save(folder.parent / f"{folder.name}-{grid}-{size}.png")


if __name__ == "__main__":
    folder, size, grid, count = sys.argv[1:5]
    rows, cols = grid.split("x")
    measure(Path(folder), size=int(size), grid=Grid(int(rows), int(cols)), count=int(count))
