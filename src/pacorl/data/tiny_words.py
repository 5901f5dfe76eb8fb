"""The words of the tiny generator, read from plain texts.

It knows one world (docs/tiny.md) and reads one form of prompt. `tiny_prompt` finds the world's words in a text, in any
order, and writes that form; whatever the world does not have is refused by name, with what it has.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from pacorl.data.characters import CRITERIA, EDITS, IDENTITY, INSTRUCTIONS, VALUES, Panel
from pacorl.types import Grid, Prompt

GRID = Grid(2, 2)
"""The only layout that it was trained on."""

THEME = (*IDENTITY, "palette")
SCENE = ("pose", "prop")
# Words that say nothing of an image, so that "a red round hero with a crown, at night" is understood.
PASSED_OVER = frozenset(
    "a an and at beside by hero heroes in is of on our same the there wearing wears while who with".split()  # noqa: SIM905
)
WORD = re.compile(r"[a-z]+(?:-[a-z]+)*")
EXAMPLE = "--prompt 'red round hero, crown, night' --panel 'waving, flag' --panel 'jumping, boat' …"


def tiny_prompt(theme: str, panels: Sequence[str], grid: Grid, number: int = 0) -> Prompt:
    """The prompt that the tiny generator reads. A panel that names an attribute of the theme departs from it.

    Raises:
        ValueError: if words are unknown, attributes missing, or the layout is another than 2x2.
    """
    shared = attributes_in(theme, where="the theme")
    _check_complete(shared, THEME, where="the theme", text=theme)
    described = [_panel(shared, text, place) for place, text in enumerate(panels, 1)]
    if grid != GRID or len(panels) != GRID.count:
        raise ValueError(
            f"the tiny generator makes sets of {GRID.count} panels as {GRID} and no others, this is {grid} with "
            f"{len(panels)}; describe {GRID.count}, or name a real --model, e.g. black-forest-labs/FLUX.1-dev"
        )
    subject = Panel(**{**{name: VALUES[name][0] for name in SCENE}, **shared}).subject
    tags = ("[TOP]-[LEFT]", "[TOP]-[RIGHT]", "[BOTTOM]-[LEFT]", "[BOTTOM]-[RIGHT]")
    scenes = [f"{tag}: {panel.text}." for tag, panel in zip(tags, described, strict=True)]
    return Prompt(
        id=number,
        text=" ".join([f"{grid} grid layout of {subject}.", *scenes]),
        theme=subject,
        grid=grid,
        panels=tuple(panel.text for panel in described),
        criteria=CRITERIA,
    )


def check_tiny(prompt: Prompt) -> None:
    """Checks a whole prompt, such as a T2IS record's.

    Raises:
        ValueError: if it is not of the tiny world.
    """
    if not prompt.panels:
        attributes_in(prompt.text, where="the prompt")
        raise ValueError(f"the tiny generator makes sets of {GRID.count} panels; describe each, as in {EXAMPLE}")
    for place, text in enumerate(prompt.panels, 1):
        try:
            Panel.parse(text)
        except ValueError:
            _check_complete(
                attributes_in(text, where=f"panel {place}"), tuple(VALUES), where=f"panel {place}", text=text
            )


def check_tiny_edit(prompt: Prompt) -> None:
    """Check that the tiny editor was taught an edit's instruction.

    Raises:
        ValueError: It was not; the message names near ones.
    """
    instruction = prompt.text
    if instruction not in INSTRUCTIONS:
        near = difflib.get_close_matches(instruction, INSTRUCTIONS, n=2, cutoff=0.5)
        hint = f"nearest: {' or '.join(map(repr, near))}" if near else "none is near"
        forms = " ".join(f"{form.format(name.upper())} ({', '.join(VALUES[name])})" for name, form in EDITS.items())
        raise ValueError(f"the tiny editor does not know {instruction!r} ({hint}); it knows: {forms}")


def attributes_in(text: str, *, where: str) -> dict[str, str]:
    """Attribute → value of every word of the world in `text`.

    Raises:
        ValueError: if there are other words, or two values of an attribute.
    """
    attributes: dict[str, str] = {}
    name_of = {value: name for name, values in VALUES.items() for value in values}
    words = WORD.findall(text.lower().replace("top hat", "top-hat"))
    unknown = [word for word in dict.fromkeys(words) if word not in name_of and word not in PASSED_OVER]
    if unknown:
        raise ValueError(
            f"{where} says {_quoted(unknown, name_of)}, which the tiny generator does not know; {known_words()}"
        )
    for word in words:
        name = name_of.get(word)
        if name is None:
            continue
        if attributes.get(name, word) != word:
            raise ValueError(f"{where} has two values of {name}, {attributes[name]} and {word}; give one")
        attributes[name] = word
    return attributes


def known_words() -> str:
    """The world's words, for a message."""
    return "it knows " + "; ".join(f"{name}: {', '.join(values)}" for name, values in VALUES.items())


def _panel(shared: Mapping[str, str], text: str, place: int) -> Panel:
    attributes = attributes_in(text, where=f"panel {place}")
    _check_complete(attributes, SCENE, where=f"panel {place}", text=text)
    return Panel(**{**shared, **attributes})


def _check_complete(attributes: Mapping[str, str], names: Sequence[str], *, where: str, text: str) -> None:
    missing = [name for name in names if name not in attributes]
    if missing:
        needed = "; ".join(f"a {name} ({', '.join(VALUES[name])})" for name in missing)
        raise ValueError(f"{where}, {text!r}, lacks {needed}")


def _quoted(unknown: Sequence[str], words: Mapping[str, str]) -> str:
    quoted = []
    for word in unknown[:5]:
        near = difflib.get_close_matches(word, words, n=1)
        quoted.append(f"{word!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return ", ".join(quoted) + (f" and {len(unknown) - 5} more words" if len(unknown) > 5 else "")
