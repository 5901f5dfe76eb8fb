"""Oracle's measures of a generator's sheets: `python -m research.tiny.measure FLUX SIZE ROWSxCOLS COUNT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pacorl.core.contrast import kappa
from pacorl.core.grid import join, parse_layout, split
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.models.policies.flux import FLUX
from pacorl.tiny.oracle import Oracle, agreement
from pacorl.tiny.words import asked_in
from pacorl.tiny.world import LOOKS, Panel, set_prompts
from pacorl.types import Grid, Prompt, Size


def measures(prompts: Sequence[Prompt], sets: Sequence[Sequence[Panel | None]]) -> str:
    """Write validity, match per attribute, and agreement and κ of the sets whose theme names no look.

    A look that themes name agrees across sets by chance of the theme.
    """
    matches: dict[str, list[bool]] = {"pose": [], "prop": [], "place": []}
    free = []
    for prompt, panels in zip(prompts, sets, strict=True):
        asked = asked_in(prompt)
        for wanted, panel in zip(asked, panels, strict=True):
            for name, values in matches.items():
                values.append(getattr(panel, name, None) == wanted[name])
        if not set(LOOKS) & set(asked[0]):
            free.append(panels)
    measured = agreement(free)
    within, across = (float(np.mean([shares[side] for shares in measured.values()])) for side in (0, 1))
    valid = float(np.mean([panel is not None for panels in sets for panel in panels]))
    matched = " ".join(f"{name} {np.mean(values):.3f}" for name, values in matches.items())
    kappas = " ".join(f"{name} {kappa(*measured[name]):.2f}" for name in LOOKS)
    return f"valid {valid:.3f} {matched} | {len(free)} free sets: within {within:.3f} across {across:.3f} κ {kappas}"


def measure(folder: Path, *, size: int, grid: Grid, count: int, steps: int = 8) -> None:
    """Print the measures of a generator's sheets, and save a contact sheet."""
    policy = FLUX.from_pretrained(folder, dtype="float32", guidance_scale=3.5, max_sequence_length=48)
    prompts = set_prompts("test", count, grid=grid)
    sampler = Sampler(size=Size(size * grid.rows, size * grid.cols), steps=steps)
    seeds = [seed_of("measure", prompt.id) for prompt in prompts]
    images = sample_images(policy, prompts, sampler=sampler, cache=ConditioningCache(policy), seeds=seeds, batch=12)
    oracle = Oracle()
    sets = [oracle.read(split(image, grid)) for image in images]
    print(f"{folder.name} {grid} of {size} px: {measures(prompts, sets)}", flush=True)
    join(images[:12], Grid(2, 6)).save(folder.parent / f"{folder.name}-{grid}-{size}.png")


if __name__ == "__main__":
    folder, size, grid, count = sys.argv[1:5]
    measure(Path(folder), size=int(size), grid=parse_layout(grid), count=int(count))
