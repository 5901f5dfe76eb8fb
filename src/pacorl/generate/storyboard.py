"""Storyboards: characters named once, one style, many scenes → pages of panels.

    title: A day at the practice
    style: soft watercolour, morning light
    layout: 2x2
    characters:
      dentist: a young dentist in light-blue scrubs with round glasses
    scenes:
      - "{dentist} explains oral hygiene to a child; {dentist} holds a model of teeth"

`characters` may also be a list of character folders (`records.characters`). A character's first mention in a scene
becomes its description, later ones `the dentist`. The images in the folders of a page's characters are its references,
if the generator takes references. Scenes beyond a page go on the next, which they must fill.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pacorl.core.batches import in_batches
from pacorl.core.grid import parse_layout
from pacorl.io.documents import blamed_on, read_yaml, typed
from pacorl.records.characters import find_character, in_turn
from pacorl.records.compose import layout_for, prompt_from
from pacorl.records.fields import NonBlank
from pacorl.records.panels import PanelDraft
from pacorl.types import TINY, Character, Grid, Prompt

MENTION = re.compile(r"\{([^{}]*)\}")


class BoardFile(BaseModel):
    """The keys of a storyboard file."""

    model_config = ConfigDict(extra="forbid")

    title: NonBlank
    style: str = ""
    layout: str = "2x2"
    characters: dict[str, NonBlank] | list[NonBlank] = {}
    """Name → description, or folders of characters."""
    scenes: Annotated[list[NonBlank], Field(min_length=1)]
    """A text per panel; one that begins with a mention needs quotes, or YAML reads a mapping."""


@dataclass(frozen=True, slots=True)
class Storyboard:
    """The contents of a storyboard file."""

    title: str
    scenes: tuple[str, ...]
    layout: Grid
    characters: tuple[Character, ...] = ()
    style: str = ""

    @property
    def theme(self) -> str:
        """Common theme of all pages."""
        texts = [self.title, *(character.text for character in self.characters)]
        if self.style:
            texts.append(f"All images share one style: {self.style}")
        return ". ".join(text.rstrip(".") for text in texts)

    @property
    def panels(self) -> list[str]:
        """Text of each scene for people. Raises ValueError for an unknown character."""
        return [spoken(scene, self.characters) for scene in self.scenes]


def read_storyboard(path: Path) -> Storyboard:
    """Read a storyboard. Raises ValueError, naming the file, the invalid key, its value and the fix."""
    document = read_yaml(path)
    with blamed_on(path):
        board_file = typed(document, BoardFile)
        # In the file or in folders.
        if isinstance(board_file.characters, dict):
            characters = [Character(name, text) for name, text in board_file.characters.items()]
        else:
            characters = [find_character(name, path.parent) for name in board_file.characters]
        layout = parse_layout(board_file.layout)
        if len(board_file.scenes) % layout.count:
            raise ValueError(
                f"{len(board_file.scenes)} scenes do not fill pages of {layout}, {layout.count} panels each; add some, "
                "leave some out, or give another layout"
            )
        board = Storyboard(
            title=board_file.title,
            style=board_file.style,
            layout=layout,
            characters=tuple(characters),
            scenes=tuple(board_file.scenes),
        )
        _ = board.panels  # raises for an unknown character, before anything is loaded
        return board


def storyboard_of(draft: PanelDraft, characters: Sequence[Character], *, layout: Grid | None) -> Storyboard:
    """Convert a written set to a storyboard of one page. A panel without mentions shows all characters.

    Raises:
        ValueError: if a panel is empty, mentions an unknown character or contains a panel tag, or the layout has
            another number of panels.
    """
    prompt_from("", theme=draft.theme, panels=draft.panels, grid=layout)  # raises
    all_characters = " and ".join(f"{{{character.name}}}" for character in characters)
    scenes = []
    for text in draft.panels:
        mentions = MENTION.search(text) or not characters
        scenes.append(text if mentions else f"{all_characters}, {text}")
    return Storyboard(
        title=MENTION.sub(r"the \1", draft.theme),
        scenes=tuple(scenes),
        layout=layout or layout_for(len(scenes)),
        characters=tuple(characters),
    )


def board_prompt(board: Storyboard, model: str, *, max_references: int, separate: bool) -> Prompt:
    """Compose the prompt of a storyboard of one page; one scene is one image."""
    if model == TINY:
        board = replace(board, style=board.title)  # the request has the place
    if len(board.scenes) > 1 or (model == TINY and not separate):
        return pages(board, model, max_references=max_references, separate=separate)[0]
    (scene,) = board.panels
    prompt = prompt_from(model, theme=scene, grid=Grid(1, 1))
    references = references_for(board.scenes, board, limit=max_references)
    return replace(prompt, characters=board.characters, references=references)


def references_for(scenes: Sequence[str], board: Storyboard, *, limit: int) -> tuple[Path, ...]:
    """Choose reference images of the characters in some scenes: the first of each, then the second of each.

    Args:
        limit: Maximum number of references; 0 for a generator without.

    Raises:
        ValueError: More characters than `limit` have images.
    """
    mentions = {mention.strip() for scene in scenes for mention in MENTION.findall(scene)}
    shown = [character for character in board.characters if character.images and character.name in mentions]
    if 0 < limit < len(shown):
        raise ValueError(
            f"a page shows {len(shown)} characters with images, and the generator takes {limit} reference images; "
            "name fewer in its scenes, or give a smaller layout"
        )
    return in_turn(shown)[:limit]


def pages(board: Storyboard, model: str, *, max_references: int = 0, separate: bool = False) -> list[Prompt]:
    """Compose one prompt per page.

    Args:
        max_references: Maximum number of reference images that the generator takes.
        separate: Whether the panels are generated one by one (`panel_prompts`), so that the page's own text is
            not read and has no layout to fit.

    Raises:
        ValueError: if the model cannot generate a page (`compose.prompt_from`), or too many characters are on it.
    """
    # The tiny generator reads attributes, not sentences: its theme is the first character, and the style has the place.
    theme = board.theme
    if model == TINY:
        subject = [character.text for character in board.characters[:1]]
        theme = spoken(", ".join([*subject, board.style]), board.characters, model)

    prompts = []
    for number, scenes in enumerate(in_batches(board.scenes, board.layout.count)):
        panels = [spoken(scene, board.characters, model) for scene in scenes]
        prompt = prompt_from("" if separate else model, theme=theme, panels=panels, grid=board.layout)
        references = references_for(scenes, board, limit=max_references)
        prompts.append(replace(prompt, id=number, characters=board.characters, references=references))
    return prompts


def spoken(scene: str, characters: Sequence[Character], model: str = "") -> str:
    """Replace the mentions in a scene by descriptions of the characters. Raises ValueError for an unknown one."""
    texts = {character.name: character.text for character in characters}
    described: set[str] = set()

    def describe(mention: re.Match[str]) -> str:
        name = mention[1].strip()
        if name not in texts:
            raise ValueError(f"scene {scene!r} names {name!r}, who is none of {', '.join(texts) or 'no characters'}")
        again = name in described
        described.add(name)
        return f"the {name.replace('_', ' ')}" if again else texts[name]

    text = MENTION.sub(describe, scene)
    # The tiny generator knows no names: what is left of them is a hero.
    for name in texts if model == TINY else ():
        text = re.sub(rf"(?<!\w){re.escape(name.replace('_', ' '))}(?!\w)", "hero", text)
    # Not `capitalize`, which would lower the rest, including names.
    return text[:1].upper() + text[1:]
