"""Storyboards: characters named once, one style, many scenes → pages of panels.

    title: A day at the practice
    style: soft watercolour, morning light
    layout: 2x2
    characters:
      dentist: a young dentist in light-blue scrubs with round glasses
    scenes:
      - "{dentist} explains oral hygiene to a child; {dentist} holds a model of teeth"
    criteria:                       # optional, as T2IS records have them
      Identity: {Face: The dentist has the same face in all images.}

A character's first mention in a scene becomes its description, later ones `the dentist`. Scenes beyond a page go on the
next; the candidates of a later page are also judged beside the panels of the pages before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.core.grid import parse_layout
from pacorl.generate.compose import prompt_from
from pacorl.io.documents import blamed_on, read_yaml
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.engine.generator import Generator
    from pacorl.generate.ranking import Judged
    from pacorl.generate.sets import GeneratedImage
    from pacorl.judges.judge import Judge
    from pacorl.judges.pairwise import Ask

KEYS = ("title", "style", "layout", "characters", "scenes", "criteria")
PAGE = Grid(2, 2)
MENTION = re.compile(r"\{([^{}]*)\}")
MAX_PANELS = 16
"""Of one page; more leave each panel too few pixels."""


@dataclass(frozen=True, slots=True)
class Storyboard:
    """What a file says."""

    title: str
    scenes: tuple[str, ...]
    style: str = ""
    layout: Grid = PAGE
    characters: Mapping[str, str] = field(default_factory=dict)
    criteria: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def theme(self) -> str:
        """What all pages share."""
        sentences = [self.title.rstrip("."), *(text.rstrip(".") for text in self.characters.values())]
        return ". ".join(
            [*sentences, *([f"All images share one style: {self.style.rstrip('.')}"] if self.style else [])]
        )


def read_storyboard(path: Path) -> Storyboard:
    """Reads a storyboard.

    Raises:
        ValueError: if it cannot be used; it names file, key, value and fix.
    """
    document = read_yaml(path)
    with blamed_on(path):
        return _storyboard(document)


def pages(board: Storyboard, model: str) -> list[Prompt]:
    """One prompt per page. A last page that the layout would not fill is laid out in fewer rows, or in one.

    Raises:
        ValueError: if the model cannot generate a page (`compose.prompt_from`).
    """
    size = board.layout.count
    scenes_by_page = [board.scenes[start : start + size] for start in range(0, len(board.scenes), size)]
    return [
        prompt_from(
            model,
            theme=_theme_for(board, model),
            panels=[spoken(text, board.characters) for text in scenes],
            grid=_layout_of(len(scenes), board.layout),
            criteria=board.criteria,
            number=number,
        )
        for number, scenes in enumerate(scenes_by_page)
    ]


def spoken(scene: str, characters: Mapping[str, str]) -> str:
    """A scene with its characters described.

    Raises:
        ValueError: if a name is not among them.
    """
    described: set[str] = set()

    def describe(mention: re.Match[str]) -> str:
        name = mention[1].strip()
        if name not in characters:
            raise ValueError(
                f"scene {scene!r} names {name!r}, who is none of {', '.join(characters) or 'no characters'}"
            )
        again = name in described
        described.add(name)
        return f"the {name.replace('_', ' ')}" if again else characters[name].rstrip(".")

    text = MENTION.sub(describe, scene)
    return text[:1].upper() + text[1:]


def generate_storyboard(
    generator: Generator,
    board: Storyboard,
    *,
    seed: int = 0,
    best_of: int = 1,
    judge: Judge | None = None,
    ask: Ask = "theme",
    size: Size | None = None,
    steps: int | None = None,
    on_step: Callable[[int], None] = lambda images: None,
) -> list[GeneratedImage]:
    """Generates every page, in order, as `generate_sets` does.

    Of `best_of` candidates the judge's best is kept; from the second page on the judge also compares them with all
    panels before.

    Args:
        size: of a full page; panels keep their size on a shorter one.
    """
    from pacorl.generate.ranking import judge_with_earlier
    from pacorl.generate.sets import generate_sets

    prompts = pages(board, generator.model)
    sizes = [_size_of(prompt, board, generator.size_of(prompt, size)) for prompt in prompts]
    for prompt, page_size in zip(prompts, sizes, strict=True):  # all pages before the first is generated
        generator.check([prompt], page_size)
    images: list[GeneratedImage] = []
    earlier: list[Image] = []

    def rank(prompts: Sequence[Prompt], candidates: Sequence[Image]) -> list[Judged]:
        assert judge is not None
        return judge_with_earlier(judge, prompts, candidates, earlier, ask=ask)

    for number, (prompt, page_size) in enumerate(zip(prompts, sizes, strict=True)):
        images += generate_sets(
            generator,
            [prompt],
            seed=seed + number * best_of,
            best_of=best_of,
            rank=rank if judge else None,
            size=page_size,
            steps=steps,
            on_step=on_step,
        )
        earlier += images[-1].panels
    return images


def _size_of(prompt: Prompt, board: Storyboard, page: Size) -> Size:
    height, width = page.height // board.layout.rows, page.width // board.layout.cols
    return Size(height * prompt.grid.rows, width * prompt.grid.cols)


def _layout_of(count: int, layout: Grid) -> Grid:
    return Grid(count // layout.cols, layout.cols) if count % layout.cols == 0 else Grid(1, count)


def _theme_for(board: Storyboard, model: str) -> str:
    """The tiny generator reads attributes, not sentences: its theme is the first character and the style."""
    if model != TINY:
        return board.theme
    return ", ".join(filter(None, [next(iter(board.characters.values()), board.title), board.style]))


# --- the file --------------------------------------------------------------------------------------------------


def _storyboard(document: Any) -> Storyboard:
    if not isinstance(document, dict):
        raise ValueError(f"a storyboard is a mapping of {', '.join(KEYS)}, this is a {type(document).__name__}")
    unknown = [key for key in document if key not in KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; a storyboard has {', '.join(KEYS)}")
    characters = _texts(document.get("characters"), "characters")
    scenes = document.get("scenes")
    if not isinstance(scenes, list) or not scenes:
        raise ValueError(f"scenes must be a list of texts, got {scenes!r}")
    layout = _layout(document.get("layout", "2x2"))
    board = Storyboard(
        title=_text(document.get("title"), "title"),
        style=_text(document.get("style", ""), "style", empty=True),
        layout=layout,
        characters=characters,
        scenes=tuple(_text(scene, f"scene {place}") for place, scene in enumerate(scenes, 1)),
        criteria=_criteria(document.get("criteria")),
    )
    for scene in board.scenes:
        spoken(scene, characters)
    return board


def _layout(value: Any) -> Grid:
    layout = parse_layout(_text(value, "layout"))
    if layout.count > MAX_PANELS:
        raise ValueError(f"layout {layout} has {layout.count} panels a page; give at most {MAX_PANELS}")
    return layout


def _text(value: Any, key: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (empty or value.strip()):
        raise ValueError(f"{key} must be a text, got {value!r}" + (" (quote it)" if isinstance(value, dict) else ""))
    return value.strip()


def _texts(value: Any, key: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} must map names to texts, got {value!r}")
    return {str(name): _text(text, f"{key}.{name}") for name, text in value.items()}


def _criteria(value: Any) -> dict[str, dict[str, str]]:
    if not isinstance(value or {}, dict):
        raise ValueError(f"criteria must map dimensions to named texts, got {value!r}")
    return {str(dimension): _texts(named, f"criteria.{dimension}") for dimension, named in (value or {}).items()}
