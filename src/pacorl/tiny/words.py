"""The words of the tiny world: prompts from plain texts, and the attributes that a prompt asks for.

The generator was trained on one world (docs/quickstart.md) and one form of prompt. `tiny_prompt` finds the world's
words in texts, in any order, and writes that form. An unknown word is an error, which lists the known words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain

from pacorl.tiny.world import LOOKS, PALETTE_WORDS, PLACE_WORDS, SCENE, VALUES, theme_text, write_prompt
from pacorl.types import Grid, Prompt

INSTRUCTIONS: dict[str, dict[str, str]] = {
    "colour": {value: f"Paint the hero {value}." for value in VALUES["colour"]},
    "hat": {value: f"Give the hero a {value}." for value in VALUES["hat"]},
    "palette": {value: f"Show the scene {words}." for value, words in PALETTE_WORDS.items()},
    "place": {value: f"Put the hero {words}." for value, words in PLACE_WORDS.items()},
    "pose": {value: f"Let the hero be {value}." for value in VALUES["pose"]},
    "prop": {value: f"Put a {value} beside the hero." for value in VALUES["prop"]},
}
"""Attribute → value → the instruction that changes it. A hero of another shape would be another hero."""
EDIT_TEXTS = tuple(chain.from_iterable(texts.values() for texts in INSTRUCTIONS.values()))
GRIDS = (Grid(2, 2), Grid(3, 3))
"""The layouts of its training."""
NEAR = {
    "red": "crimson scarlet",
    "yellow": "gold golden",
    "green": "emerald",
    "purple": "violet lilac",
    "round": "fat chubby",
    "square": "boxy",
    "pointed": "pointy triangular",
    "tall": "thin slim",
    "top-hat": "topper",
    "day": "daytime daylight noon morning sunny",
    "night": "midnight evening dark starry",
    "sunset": "dusk dawn sunrise",
    "candy": "pastel sweet",
    "meadow": "field grass park garden lawn",
    "beach": "sea seaside shore sand coast",
    "town": "city street village",
    "mountains": "mountain hills hill alps",
    "standing": "stands stand waiting waits",
    "waving": "waves wave greeting greets",
    "jumping": "jumps jump leaping leaps",
    "tree": "oak",
    "house": "home hut cottage",
    "flag": "banner",
    "lamp": "lantern light",
    "boat": "ship sailboat",
}
"""Value → other words for it."""
VALUE_OF: dict[str, str] = {}
"""Word of a text → value."""
ATTRIBUTE_OF: dict[str, str] = {}
"""Value → attribute."""
for _attribute, _values in VALUES.items():
    for _value in _values:
        VALUE_OF[_value] = _value
        ATTRIBUTE_OF[_value] = _attribute
for _value, _words in NEAR.items():
    VALUE_OF.update(dict.fromkeys(_words.split(), _value))
PASSED_OVER = frozenset(
    "a an and at beside by colored colors colour coloured colours hat he her hero heroes him his image in is it "  # noqa: SIM905
    "its near next of on our panel photo picture same scene set she style the their them there they time to wearing "
    "wears while who with".split()
)
"""Ignored, so that "a red hero with a crown, who waves beside a boat" is understood."""
WORD = re.compile(r"[a-z]+(?:-[a-z]+)*")
SHARED = "the description of all panels"
"""Name of a prompt's theme in messages, which pages for people without the term show too."""
EXAMPLE = "--prompt 'a hero with a crown in town' --panel 'waving, flag' --panel 'jumping, boat' …"


def tiny_prompt(theme: str, panels: Sequence[str], grid: Grid) -> Prompt:
    """Write a prompt for the tiny generator: the theme has the place and any looks, each panel a pose and a prop.

    Raises:
        ValueError: if words are unknown, misplaced or missing, or the layout was not learned.
    """
    # The layout first: no change of words mends it.
    check_tiny_grid(grid, len(panels))
    shared, scenes = _shared_and_scenes(theme, panels)
    place = shared.pop("place")
    pairs = [(scene["pose"], scene["prop"]) for scene in scenes]
    return write_prompt(0, place, pairs, grid, named=shared)


def tiny_panel(theme: str, text: str) -> Prompt:
    """Write a prompt that shows one panel in every cell; the text may name what a theme names, and comes first.

    Raises:
        ValueError: if words are unknown or missing.
    """
    attributes = attributes_in(theme, where=SHARED, allowed=(*LOOKS, "place"))
    attributes |= attributes_in(text, where="the panel", allowed=tuple(VALUES), required=SCENE)
    shared = theme_text(attributes["place"], attributes) if "place" in attributes else theme
    return tiny_prompt(shared, [f"{attributes['pose']}, {attributes['prop']}"] * GRIDS[0].count, GRIDS[0])


def check_tiny_grid(grid: Grid, panels: int) -> None:
    """Raise ValueError unless the tiny generator makes this layout."""
    if grid not in GRIDS or panels != grid.count:
        layouts = " or ".join(f"{layout.count} panels as {layout}" for layout in GRIDS)
        raise ValueError(
            f"this model makes sets of {layouts}, and this is {grid} with {panels}; describe so many, or take another "
            "model, e.g. black-forest-labs/FLUX.1-dev"
        )


def asked_in(prompt: Prompt) -> list[dict[str, str]]:
    """Return the requested attributes of each panel of a set, as attribute → value.

    Raises:
        ValueError: if the prompt is not of the tiny world.
    """
    # Without a theme, what precedes the first panel of the text.
    text = prompt.theme or prompt.text.partition("[")[0]
    shared, scenes = _shared_and_scenes(re.sub(r"^\S+ grid layout of ", "", text), prompt.panels)
    return [shared | scene for scene in scenes]


def _shared_and_scenes(theme: str, panels: Sequence[str]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Find the attributes of the theme, and each panel's pose and prop. A panel may repeat words of the theme."""
    shared = attributes_in(theme, where=SHARED, allowed=(*LOOKS, "place"), required=("place",))
    scenes = []
    for position, text in enumerate(panels, 1):
        scenes.append(attributes_in(text, where=f"panel {position}", allowed=SCENE, required=SCENE, passed_over=shared))
    return shared, scenes


def tiny_scene(text: str) -> str:
    """Write the text of a panel that the tiny editor draws from reference images: place, palette, pose and prop.

    Place and palette may be left out: then the references decide them. Colour, shape and hat always are.

    Raises:
        ValueError: if words are unknown, or one of pose and prop is missing.
    """
    attributes = attributes_in(text, where="the panel", allowed=tuple(VALUES), required=SCENE)
    scene = f"{attributes['pose']}, {attributes['prop']}"
    where = []
    if "place" in attributes:
        where.append(PLACE_WORDS[attributes["place"]])
    if "palette" in attributes:
        where.append(PALETTE_WORDS[attributes["palette"]])
    if not where:
        return scene
    return f"{' '.join(where)}, {scene}"


def check_tiny(prompt: Prompt) -> None:
    """Check a whole prompt, such as a T2IS record's.

    Raises:
        ValueError: if it is not of the tiny world.
    """
    if not prompt.panels:
        attributes_in(prompt.text, where="the prompt", allowed=tuple(VALUES))
        raise ValueError(f"this model makes sets; describe each panel, as in {EXAMPLE} or by prompt_from('tiny', …)")
    check_tiny_grid(prompt.grid, len(prompt.panels))
    asked_in(prompt)


def tiny_edit(text: str) -> str:
    """Find the instruction that differs from `text` in case and the final full stop at most; else return `text`."""

    def plain(instruction: str) -> str:
        return instruction.strip().removesuffix(".").casefold()

    return next((instruction for instruction in EDIT_TEXTS if plain(instruction) == plain(text)), text)


def tiny_changed(text: str, instruction: str) -> str:
    """Write a panel's text after an edit: the instruction's value replaces the former one."""
    attributes = attributes_in(text, where="the panel", allowed=tuple(VALUES))
    for attribute, texts in INSTRUCTIONS.items():
        for value, known in texts.items():
            if known == instruction:
                attributes[attribute] = value
    return ", ".join(attributes.values())


def check_tiny_edit(prompt: Prompt) -> None:
    """Check that the tiny editor was taught an edit's instruction, or with references a scene's words.

    Raises:
        ValueError: It was not; the message names one of each kind.
    """
    instruction = prompt.text
    if prompt.references:
        tiny_scene(instruction)
        return
    if instruction not in EDIT_TEXTS:
        forms = [next(iter(texts.values())) for texts in INSTRUCTIONS.values()]
        raise ValueError(f"this model knows no change {instruction!r}; write {' or '.join(map(repr, forms))}")


def attributes_in(
    text: str,
    *,
    where: str,
    allowed: Sequence[str],
    required: Sequence[str] = (),
    passed_over: Mapping[str, str] = {},
) -> dict[str, str]:
    """Find the words of the world in `text`, as attribute → value.

    Args:
        where: name of the text, for messages.
        allowed: attributes that it may name.
        required: attributes that it must name.
        passed_over: attributes with a value that it may name to no effect.

    Raises:
        ValueError: for an unknown word, two values of an attribute, or an attribute that is missing or not allowed.
    """
    words = [word for word in WORD.findall(text.lower().replace("top hat", "top-hat")) if word not in PASSED_OVER]
    values = {word: VALUE_OF.get(word) or VALUE_OF.get(word.removesuffix("s"), "") for word in words}
    # Unknown words first, the likeliest mistake.
    if unknown := [word for word, value in values.items() if not value]:
        vocabulary = "; ".join(f"{name}: {', '.join(VALUES[name])}" for name in allowed)
        quoted = ", ".join(map(repr, unknown[:5]))
        raise ValueError(
            f"{where} has unknown words, {quoted}; this model knows {vocabulary}; other words need another model"
        )

    attributes: dict[str, str] = {}
    for word, value in values.items():
        name = ATTRIBUTE_OF[value]
        if passed_over.get(name) == value:
            continue
        if name not in allowed:
            other = "a panel" if name in SCENE else SHARED
            raise ValueError(f"{where} names a {name}, {value}; for this model {other} does")
        if attributes.setdefault(name, value) != value:
            raise ValueError(f"{where} has two values of {name}, {attributes[name]} and {word}; give one")
    missing = [f"a {name} ({', '.join(VALUES[name])})" for name in required if name not in attributes]
    if missing:
        raise ValueError(f"{where}, {text!r}, lacks {'; '.join(missing)}")
    return attributes
