"""Sets of separate images: each panel is generated at full size, with the references of its own characters.

The images of a set are joined to its grid image, which `core.grid.split` cuts into the same pixels. So judges, rewards,
benchmarks, pages and files need no second form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pacorl.core.grid import join
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.records.characters import characters_of, in_turn
from pacorl.tiny.words import tiny_scene
from pacorl.types import TINY, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.generate.generator import AnySize, Generator

SEEDS = 2**63
"""Seeds of a set's panels are below it, as torch needs them."""


def sample_separately(
    generator: Generator,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    *,
    previous: bool = False,
    size: AnySize = None,
    **options: Any,
) -> list[Image]:
    """Generate each panel as an image, and return one grid image per (prompt, seed), in order.

    Args:
        generator: The generator.
        prompts: Prompts of sets, with one text per panel.
        seeds: One per prompt. See `panel_seeds` for those of the panels.
        previous: Whether each panel after the first has the panel before it as its last reference.
        size: Size of a panel.
        options: Further options of `Generator.sample`.

    Raises:
        ValueError: if a prompt has no texts of panels, or the generator takes fewer references.
    """
    texts = [panel_prompts(prompt, generator.model, generator.max_references, previous=previous) for prompt in prompts]
    for panels in texts:
        # A name stands for the panel before, which does not exist yet.
        later = [replace(panel, references=(*panel.references, Path("previous.png"))) for panel in panels[1:]]
        generator.check([panels[0], *later] if previous else panels, size)

    # Position by position, so that the panel before exists.
    images: list[list[Image]] = [[] for _ in prompts]
    with TemporaryDirectory(prefix="pacorl-") as folder:
        for position in range(max(map(len, texts))):
            rows = [row for row, panels in enumerate(texts) if position < len(panels)]
            batch = []
            for row in rows:
                panel = texts[row][position]
                if previous and position:
                    # Generators read references from files.
                    path = Path(folder, f"{row}-{position}.png")
                    write_atomic(path, png_bytes(images[row][-1]))
                    panel = replace(panel, references=(*panel.references, path))
                batch.append(panel)
            own_seeds = [panel_seeds(seeds[row], len(texts[row]))[position] for row in rows]
            for row, image in zip(rows, generator.sample(batch, own_seeds, size=size, **options), strict=True):
                images[row].append(image)
    return [join(panels, prompt.grid) for panels, prompt in zip(images, prompts, strict=True)]


def panel_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of a set's `count` panels: `seed · count + p`."""
    return [(seed * count + position) % SEEDS for position in range(count)]


def panel_prompts(prompt: Prompt, model: str, max_references: int, *, previous: bool = False) -> list[Prompt]:
    """Compose the prompt of each panel: the set's theme and the panel's text, with the references of its characters.

    Args:
        prompt: Prompt of a set.
        model: Name of the generator.
        max_references: Maximum number of reference images that the generator takes.
        previous: Whether one of them is the panel before.

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
    # One place is the panel before.
    limit = max_references - previous
    if limit < 0:
        raise ValueError(f"{model} takes no reference images, so none can be the panel before; leave out previous")

    # A panel's share of the set's size.
    size = prompt.size and Size(prompt.size.height // prompt.grid.rows, prompt.size.width // prompt.grid.cols)
    characters = characters_of(prompt)
    composed = []
    # Compose the panels.
    for text, shown in zip(prompt.panels, characters, strict=True):
        references = prompt.references
        if references and any(characters):
            references = in_turn([character.images for character in shown])
        # The cut to `limit` below must leave each character at least one image.
        if limit < min(len(references), len(shown)):
            raise ValueError(
                f"panel {text[:60]!r} shows {len(shown)} characters with images, and {model} takes {limit} of them; "
                "name fewer, or leave out previous"
            )
        # Not the set's own text, which asks for a grid.
        whole = f"{prompt.theme.rstrip('.')}. {text}" if prompt.theme else text
        composed.append(
            Prompt(
                id=prompt.id,
                text=tiny_scene(text) if model == TINY else whole,
                theme=prompt.theme,
                characters=tuple(shown),
                references=references[:limit],
                size=size,
            )
        )
    return composed
