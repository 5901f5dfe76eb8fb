"""Redraw failing panels: of the sets of `pacorl generate --min`, and of a page given by `--from`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.cli.gate import Gate
from pacorl.cli.generator import AdaptedGenerator, ChoiceOptions
from pacorl.cli.shared import echo_errors
from pacorl.config.options import UsageError
from pacorl.types import TINY, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import FinishedPage
    from pacorl.types import Character

IMAGE_MARK = b"Software" + bytes(5) + b"pacorl "
"""The first text chunk of a generated PNG (`generate.generated_images.recipe_texts`)."""


def read_page(
    path: Path,
    generator: AdaptedGenerator,
    characters: Sequence[Character],
    *,
    layout: str = "",
    texts: Sequence[str] = (),
) -> FinishedPage:
    """Read a page of `pacorl generate`, or of another tool.

    Args:
        layout: ROWSxCOLS of the page; by default the recipe's.
        texts: What each panel shows; by default the recipe's.

    Raises:
        ValueError: There is no layout, or no text for a panel, or the generator does not take it.
    """
    from pacorl.core.grid import parse_layout
    from pacorl.gate.panels import layout_of, open_panels
    from pacorl.generate.repair import FinishedPage
    from pacorl.generate.separate import panel_prompts
    from pacorl.io.images import recipe_of
    from pacorl.types import Prompt

    if path.is_dir():
        raise UsageError(f"{path} is a folder; --from takes one page")
    # A given layout replaces the recipe's.
    panels = open_panels([path], grid=layout)
    layout = layout or layout_of(str(path))
    if not layout:
        raise UsageError(f"{path} has no layout in a recipe; give --layout, such as 2x2")
    recipe = {**recipe_of(path), "layout": layout}
    prompt = Prompt(
        0,
        "",
        grid=parse_layout(layout),
        theme=recipe.get("theme", ""),
        panels=tuple(texts) or tuple(filter(None, panels.texts)),
        characters=tuple(characters),
    )
    prompts = panel_prompts(prompt, generator.model, kind=generator.kind)
    return FinishedPage(path, panels._replace(texts=prompt.panels), prompts, recipe)


@dataclass(frozen=True, slots=True)
class Redrawing:
    """Generator, judge and gate that draw panels again."""

    options: AdaptedGenerator
    choice: ChoiceOptions
    gate: Gate
    model: Generator
    reward: PacoReward

    def repaired(self, page: FinishedPage, target: Path, *, seed: int = 0) -> dict[str, Any]:
        """Draw failing panels again until the gate passes, and write the page (`generate.repair.repair_page`).

        Args:
            seed: Added to the page's, as the number of the try is.

        Returns:
            The JSON document.
        """
        from pacorl.generate.repair import redraw_by, repair_page

        def judged(images: Sequence[Image]) -> Check:
            with self.model.judging():
                return self.gate.check(self.reward, page.panels._replace(images=tuple(images)))

        # A new panel has the size of its neighbours, except from the tiny model, whose size is fixed.
        size = self.options.size
        if size is None and self.model.model != TINY:
            size = Size(page.panels.images[0].height, page.panels.images[0].width)
        seed += int(page.recipe.get("seed", 0))
        redraw = redraw_by(self.model, page.prompts, seed=seed, size=size, steps=self.options.steps)
        return repair_page(page, target, gate=judged, redraw=redraw, tries=self.choice.tries, say=echo_errors)
