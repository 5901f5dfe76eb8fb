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
from pacorl.models.policies.separate import panel_prompts, panel_seeds
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.generate.generator import AnySize, Generator


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
