"""Sets of separate images: each panel is generated at full size, with the references of its own characters.

The images of a set are joined to its grid image, which `core.grid.split` cuts into the same pixels. So judges, rewards,
benchmarks, pages and files need no second form.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from pacorl.core.batches import in_batches
from pacorl.core.grid import join
from pacorl.io.terminal import excerpt
from pacorl.records.characters import characters_of, in_turn
from pacorl.tiny.words import tiny_scene
from pacorl.types import TINY, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.generate.generator import Generator

SEEDS = 2**63
"""Seeds of a set's panels are below it, as torch needs them."""


def sample_separately(generator: Generator, prompt: Prompt, seeds: Sequence[int], **options: Any) -> list[Image]:
    """Generate each panel as an image, and return one grid image per seed.

    Args:
        prompt: Prompt of a set, with one text per panel.
        seeds: `panel_seeds` derives the panels' seeds.
        options: Of `Generator.sample`; `size` is that of a panel.

    Raises:
        ValueError: if the prompt has no texts of panels, or the generator takes fewer references.
    """
    panels = panel_prompts(prompt, generator.model, generator.policy.max_references)
    of_panels = [*chain.from_iterable(panel_seeds(seed, len(panels)) for seed in seeds)]
    images = generator.sample(panels * len(seeds), of_panels, **options)
    return [join(of_set, prompt.grid) for of_set in in_batches(images, len(panels))]


def panel_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of a set's `count` panels: `seed · count + p`."""
    return [(seed * count + position) % SEEDS for position in range(count)]


def panel_prompts(prompt: Prompt, model: str, max_references: int) -> list[Prompt]:
    """Compose the prompt of each panel: the set's theme and the panel's text, with the references of its characters.

    Args:
        max_references: Maximum number of reference images that the generator takes.

    Returns:
        One prompt per panel; a single image's own.

    Raises:
        ValueError: if there is not one text per panel, or the references leave no room.
    """
    if prompt.grid.count == 1 and not prompt.panels:
        return [prompt]
    if len(prompt.panels) != prompt.grid.count:
        raise ValueError(
            f"separate panels need a text each, and {prompt.place} has {len(prompt.panels)} for a {prompt.grid} "
            "grid; describe every panel"
        )
    if model == TINY and not max_references:
        raise ValueError(
            "the tiny generator draws whole sets; leave out separate, or take the kind kontext, which draws a "
            "character from its images"
        )
    # A panel's share of the set's size.
    size = prompt.size and Size(prompt.size.height // prompt.grid.rows, prompt.size.width // prompt.grid.cols)
    characters = characters_of(prompt)
    composed = []
    for text, shown in zip(prompt.panels, characters, strict=True):
        # The images of its own characters, or the set's references if no character has images.
        references = prompt.references
        if references and any(characters):
            references = in_turn(shown)
        # The cut below must leave each character at least one image.
        if max_references < min(len(references), len(shown)):
            raise ValueError(
                f"panel {excerpt(text)} shows {len(shown)} characters with images, and {model} takes {max_references}; "
                "name fewer"
            )
        # Not the set's own text, which asks for a grid.
        whole = f"{prompt.theme.rstrip('.')}. {text}" if prompt.theme else text
        composed.append(
            Prompt(
                id=prompt.id,
                text=tiny_scene(text) if model == TINY else whole,
                theme=prompt.theme,
                characters=tuple(shown),
                references=references[:max_references],
                size=size,
            )
        )
    return composed
