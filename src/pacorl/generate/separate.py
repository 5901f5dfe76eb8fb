"""Panels of a set as images of their own: generated at full size, with the references of their characters.

The images of a set are joined to its grid image, which `core.grid.split` cuts into the same pixels. So judges, rewards,
benchmarks, pages and files need no second form.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.core.batches import in_batches
from pacorl.core.grid import join
from pacorl.io.terminal import excerpt
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.policy import check_images
from pacorl.records.characters import characters_of, in_turn
from pacorl.tiny.words import tiny_panel, tiny_scene
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
        ValueError: if the generator draws whole sets alone, or for the prompt (`panel_prompts`).
    """
    panels = panel_prompts(prompt, generator.model, kind=generator.kind)
    if panels[0].grid.count > 1:
        raise ValueError(
            "the tiny generator draws whole sets; leave out separate, or take the kind kontext, which draws a "
            "character from its images"
        )
    of_panels: list[int] = []
    for seed in seeds:
        of_panels += panel_seeds(seed, len(panels))
    images = generator.sample(panels * len(seeds), of_panels, **options)
    return [join(of_set, prompt.grid) for of_set in in_batches(images, len(panels))]


def panel_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of a set's `count` panels: `seed · count + p`."""
    return [(seed * count + position) % SEEDS for position in range(count)]


def panel_prompts(prompt: Prompt, model: str, *, kind: str = "") -> list[Prompt]:
    """Compose the prompt of each panel of a set: the set's theme and the panel's text, with images of its characters.

    The images are references, or what an editor without references edits. The tiny generator, which makes sets only,
    draws the panel in every cell.

    Args:
        kind: Kind of the generator; by default the checkpoint's.

    Raises:
        ValueError: There is not one text per panel, the generator takes fewer images, an editor has none, or a tiny
            model does not know a word.
    """
    if len(prompt.panels) != prompt.grid.count:
        raise ValueError(
            f"{prompt.place}: {prompt.grid.count} panels have {len(prompt.panels)} texts; describe every panel, as by "
            "--panel"
        )
    spec = POLICIES.named(kind or kind_of(model))
    if model == TINY and spec.sets:
        return [tiny_panel(prompt.theme, text) for text in prompt.panels]

    # A panel's share of the set's size.
    size = prompt.size and Size(prompt.size.height // prompt.grid.rows, prompt.size.width // prompt.grid.cols)
    characters = characters_of(prompt)
    composed = []
    for text, shown in zip(prompt.panels, characters, strict=True):
        # The images of its own characters, or the set's references if no character has images.
        images = in_turn(shown) if any(characters) else prompt.references
        references = images[: spec.policy.max_references]
        sources: tuple[Path, ...] = ()
        if not (spec.sets or spec.policy.max_references):
            sources = images[: spec.policy.max_sources]
        # The cut must leave each character at least one image.
        taken = len(references) + len(sources)
        if 0 < taken < len(shown):
            raise ValueError(
                f"panel {excerpt(text)} shows {len(shown)} characters with images, and {model} takes {taken}; name "
                "fewer"
            )
        # Not the set's own text, which asks for a grid.
        whole = text if prompt.theme in text else f"{prompt.theme.rstrip('.')}. {text}"
        panel = Prompt(
            id=prompt.id,
            text=tiny_scene(text) if model == TINY else whole,
            theme=prompt.theme,
            panels=(text,),
            sources=sources,
            characters=tuple(shown),
            references=references,
            size=size,
        )
        check_images(spec.policy, panel, model)
        composed.append(panel)
    return composed
