"""The words of the tiny generator, read from plain texts.

It knows one world (docs/tiny.md) and reads one form of prompt. `tiny_prompt` finds the world's words in a text, in any
order, and writes that form; whatever the world does not have is refused by name, with what it has.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from pacorl.tiny.characters import EDITS, INSTRUCTIONS, KEPT, VALUES, Panel, write_prompt
from pacorl.types import Grid, Prompt

GRID = Grid(2, 2)
"""The only layout that it was trained on."""
SCENE = ("pose", "prop")
ATTRIBUTE_OF = {value: name for name, values in VALUES.items() for value in values}
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
    shared = attributes_in(theme, where="the theme", required=KEPT)

    described = []
    for position, text in enumerate(panels, 1):
        described.append(Panel(**{**shared, **attributes_in(text, where=f"panel {position}", required=SCENE)}))

    # Last: a word that is not understood is the likelier mistake, and the one to mend first.
    if grid != GRID or len(panels) != GRID.count:
        raise ValueError(
            f"the tiny generator makes sets of {GRID.count} panels as {GRID} and no others, this is {grid} with "
            f"{len(panels)}; describe {GRID.count}, or name a real --model, e.g. black-forest-labs/FLUX.1-dev"
        )
    # A theme may name a pose, which the subject leaves out, so any scene completes the panel that it is read from.
    subject = Panel(**{**{name: VALUES[name][0] for name in SCENE}, **shared}).subject
    return write_prompt(number, described, grid, subject=subject)


def check_tiny(prompt: Prompt) -> None:
    """Check a whole prompt, such as a T2IS record's.

    Raises:
        ValueError: if it is not of the tiny world.
    """
    if not prompt.panels:
        attributes_in(prompt.text, where="the prompt")
        raise ValueError(f"the tiny generator makes sets of {GRID.count} panels; describe each, as in {EXAMPLE}")
    for position, text in enumerate(prompt.panels, 1):
        try:
            Panel.parse(text)
        except ValueError:
            attributes_in(text, where=f"panel {position}", required=tuple(VALUES))


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


def attributes_in(text: str, *, where: str, required: Sequence[str] = ()) -> dict[str, str]:
    """Attribute → value of every word of the world in `text`.

    Raises:
        ValueError: if there are other words, two values of an attribute, or none of a required one.
    """
    words = WORD.findall(text.lower().replace("top hat", "top-hat"))
    unknown = [word for word in dict.fromkeys(words) if word not in ATTRIBUTE_OF and word not in PASSED_OVER]
    if unknown:
        vocabulary = "; ".join(f"{name}: {', '.join(values)}" for name, values in VALUES.items())
        raise ValueError(
            f"{where} says {_quoted(unknown)}, which the tiny generator does not know; it knows {vocabulary}"
        )
    attributes: dict[str, str] = {}
    for word in words:
        name = ATTRIBUTE_OF.get(word, "")
        if name and attributes.setdefault(name, word) != word:
            raise ValueError(f"{where} has two values of {name}, {attributes[name]} and {word}; give one")
    missing = [f"a {name} ({', '.join(VALUES[name])})" for name in required if name not in attributes]
    if missing:
        raise ValueError(f"{where}, {text!r}, lacks {'; '.join(missing)}")
    return attributes


def _quoted(unknown: Sequence[str]) -> str:
    quoted = []
    for word in unknown[:5]:
        near = difflib.get_close_matches(word, ATTRIBUTE_OF, n=1)
        quoted.append(f"{word!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return ", ".join(quoted) + (f" and {len(unknown) - 5} more words" if len(unknown) > 5 else "")
