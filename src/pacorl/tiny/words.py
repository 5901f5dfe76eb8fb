"""Vocabulary of the tiny generator, and prompts from plain texts.

The generator was trained on one world (docs/tiny.md) and one form of prompt. `tiny_prompt` finds the world's words in a
text, in any order, and writes that form. An unknown word is an error, which lists the known ones.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Sequence

from pacorl.io.terminal import did_you_mean
from pacorl.tiny.characters import EDITS, INSTRUCTIONS, KEPT, VALUES, Panel, write_prompt
from pacorl.types import Grid, Prompt

GRID = Grid(2, 2)
"""The only layout of its training."""
SCENE = ("pose", "prop")
ATTRIBUTE_OF = {value: name for name, values in VALUES.items() for value in values}
# Ignored, so that "a red round hero with a crown, at night" is understood.
PASSED_OVER = frozenset(
    "a an and at beside by hero heroes in is of on our same the there wearing wears while who with".split()  # noqa: SIM905
)
MISSPELT = 0.8
"""Least similarity of a misspelt word: "nihgt" is night, and "teal" is not tall."""
WORD = re.compile(r"[a-z]+(?:-[a-z]+)*")
EXAMPLE = "--prompt 'red round hero, crown, night' --panel 'waving, flag' --panel 'jumping, boat' …"


def tiny_prompt(theme: str, panels: Sequence[str], grid: Grid) -> Prompt:
    """Write a prompt for the tiny generator. An attribute of a panel overrides the theme's.

    Raises:
        ValueError: if words are unknown, attributes missing, or the layout is not 2x2.
    """
    # The layout first: no change of words mends it.
    check_tiny_grid(grid, len(panels))
    shared = attributes_in(theme, where="the theme", required=KEPT)

    # Each panel, with the theme's attributes unless it has its own.
    described = []
    for position, text in enumerate(panels, 1):
        attributes = shared | attributes_in(text, where=f"panel {position}", required=SCENE)
        described.append(Panel(**attributes))

    # The subject is independent of the scene, which a theme need not name.
    scene = {name: VALUES[name][0] for name in SCENE}
    subject = Panel(**scene | shared).subject
    return write_prompt(0, described, grid, subject=subject)


def check_tiny_grid(grid: Grid, panels: int) -> None:
    """Raise ValueError unless the tiny generator makes this layout."""
    if grid != GRID or panels != GRID.count:
        raise ValueError(
            f"the tiny generator makes sets of {GRID.count} panels as {GRID} only, this is {grid} with "
            f"{panels}; describe {GRID.count}, or name a real --model, e.g. black-forest-labs/FLUX.1-dev"
        )


def tiny_scene(text: str) -> str:
    """Write the text of a panel that the tiny editor draws from reference images: palette, pose and prop.

    Raises:
        ValueError: if words are unknown, or one of the three is missing.
    """
    scene = ("palette", *SCENE)
    attributes = attributes_in(text, where="the panel", required=scene)
    # The references show the traits, so the text names none.
    traits = {name: VALUES[name][0] for name in VALUES}
    return Panel(**traits | attributes).scene_text


def check_tiny(prompt: Prompt) -> None:
    """Check a whole prompt, such as a T2IS record's.

    Raises:
        ValueError: if it is not of the tiny world.
    """
    if not prompt.panels:
        attributes_in(prompt.text, where="the prompt")
        raise ValueError(
            f"the tiny generator makes sets of {GRID.count} panels; describe each, as in {EXAMPLE} "
            "or by prompt_from('tiny', …)"
        )
    for position, text in enumerate(prompt.panels, 1):
        try:
            Panel.parse(text)
        except ValueError:
            attributes_in(text, where=f"panel {position}", required=tuple(VALUES))


def check_tiny_edit(prompt: Prompt) -> None:
    """Check that the tiny editor was taught an edit's instruction, or with references a scene's words.

    Raises:
        ValueError: It was not; the message names near ones.
    """
    instruction = prompt.text
    if prompt.references:
        tiny_scene(instruction)
        return
    if instruction not in INSTRUCTIONS:
        near = map(repr, difflib.get_close_matches(instruction, INSTRUCTIONS, n=2, cutoff=0.5))
        forms = [form.format(name.upper()) for name, form in EDITS.items()]
        hint = " or ".join(near) or " ".join(forms)
        raise ValueError(f"the tiny editor has no instruction {instruction!r}; write {hint}")


def attributes_in(text: str, *, where: str, required: Sequence[str] = ()) -> dict[str, str]:
    """Find the words of the world in `text`, as attribute → value.

    Raises:
        ValueError: for an unknown word, two values of an attribute, or a missing required attribute.
    """
    # Sort the words.
    attributes: dict[str, str] = {}
    unknown = []
    # The first fault is reported; the other words are still sorted.
    fault = ""
    for word in dict.fromkeys(WORD.findall(text.lower().replace("top hat", "top-hat"))):
        name = ATTRIBUTE_OF.get(word)
        if name is None:
            if word not in PASSED_OVER:
                unknown.append(word)
        elif name in attributes:
            fault = fault or f"{where} has two values of {name}, {attributes[name]} and {word}; give one"
        else:
            attributes[name] = word

    # Report unknown words first, the likeliest mistake.
    if unknown:
        vocabulary = "; ".join(f"{name}: {', '.join(values)}" for name, values in VALUES.items())
        raise ValueError(
            f"{where} has unknown words, {_quoted(unknown, attributes)}; the tiny generator has {vocabulary}"
        )
    if fault:
        raise ValueError(fault)
    missing = [f"a {name} ({', '.join(VALUES[name])})" for name in required if name not in attributes]
    if missing:
        raise ValueError(f"{where}, {text!r}, lacks {'; '.join(missing)}")
    return attributes


def _quoted(unknown: Sequence[str], attributes: Container[str]) -> str:
    """Quote the first five words, each with a misspelt value of an attribute that the text lacks."""
    lacking = [word for word, name in ATTRIBUTE_OF.items() if name not in attributes]
    quoted = []
    for word in unknown[:5]:
        hint = did_you_mean(word, lacking, cutoff=MISSPELT)
        quoted.append(f"{word!r} ({hint})" if hint else repr(word))
    listed = ", ".join(quoted)
    if len(unknown) > 5:
        listed += f" and {len(unknown) - 5} more words"
    return listed
