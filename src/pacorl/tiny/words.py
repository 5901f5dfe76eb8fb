"""The words of the tiny world: prompts from plain texts, and the attributes that a prompt asks for.

The generator was trained on one world (docs/quickstart.md) and one form of prompt. `tiny_prompt` finds the world's
words in texts, in any order, and writes that form. An unknown word is an error, which lists the known words.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pacorl.tiny.world import LOOKS, SCENE, VALUES, WHERE, theme_text, where_text, write_prompt
from pacorl.types import Grid, Prompt

FORMS = {
    "colour": "Paint the hero {}.",
    "hat": "Give the hero a {}.",
    "palette": "Show the scene {}.",
    "place": "Put the hero {}.",
    "pose": "Let the hero be {}.",
    "prop": "Put a {} beside the hero.",
}
INSTRUCTIONS: dict[str, dict[str, str]] = {
    name: {value: form.format(WHERE.get(name, {}).get(value, value)) for value in VALUES[name]}
    for name, form in FORMS.items()
}
"""Attribute → value → the instruction that changes it. A hero of another shape would be another hero."""
EDITS = {text: {name: value} for name, texts in INSTRUCTIONS.items() for value, text in texts.items()}
"""Instruction → the attribute that it changes, with its new value."""
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
ATTRIBUTE_OF = {value: name for name, values in VALUES.items() for value in values}
"""Value → attribute."""
VALUE_OF = {value: value for value in ATTRIBUTE_OF} | {
    word: value for value, words in NEAR.items() for word in words.split()
}
"""Word of a text → value."""
PASSED_OVER = frozenset(
    "a an and at beside by colored colors colour coloured colours hat he her hero heroes him his image in is it "  # noqa: SIM905
    "its near next of on our panel photo picture same scene set she style the their them there they time to wearing "
    "wears while who with".split()
)
"""Ignored, so that "a red hero with a crown, who waves beside a boat" is understood."""
WORD = re.compile(r"[a-z]+(?:-[a-z]+)*")
SHARED = "the description of all panels"
"""Name of a prompt's theme in messages, which pages for people without the term show too."""
EXAMPLE = "'a hero with a crown in town' --panel 'waving, flag' --panel 'jumping, boat' …"


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
    return write_prompt(0, place, pairs, grid, looks=shared)


def tiny_panel(theme: str, text: str) -> Prompt:
    """Write a prompt that shows one panel in every cell; the text may name what a theme names, and comes first.

    Raises:
        ValueError: if words are unknown or missing.
    """
    of_theme = Text(SHARED, theme, allowed=(*LOOKS, "place"))
    shared_attributes, panel_attributes = read_texts(of_theme, Text("the panel", text, tuple(VALUES), required=SCENE))
    attributes = shared_attributes | panel_attributes
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
    texts = [Text(SHARED, theme, allowed=(*LOOKS, "place"), required=("place",))]
    for position, text in enumerate(panels, 1):
        texts.append(Text(f"panel {position}", text, allowed=SCENE, required=SCENE))
    shared, *scenes = read_texts(*texts)
    return shared, scenes


def tiny_scene(text: str) -> str:
    """Write the text of a panel that the tiny editor draws from reference images: place, palette, pose and prop.

    Place and palette may be left out: then the references decide them. Colour, shape and hat always are.

    Raises:
        ValueError: if words are unknown, or one of pose and prop is missing.
    """
    (attributes,) = read_texts(Text("the panel", text, tuple(VALUES), required=SCENE))
    return ", ".join(filter(None, [where_text(attributes), attributes["pose"], attributes["prop"]]))


def check_tiny(prompt: Prompt) -> None:
    """Check a whole prompt, such as a T2IS record's. Raises ValueError if it is not of the tiny world."""
    if not prompt.panels:
        read_texts(Text("the prompt", prompt.text, tuple(VALUES)))
        raise ValueError(f"this model makes sets; describe each panel, as in {EXAMPLE} or by prompt_from('tiny', …)")
    check_tiny_grid(prompt.grid, len(prompt.panels))
    asked_in(prompt)


def tiny_edit(text: str) -> str:
    """Find the instruction that differs from `text` in case and the final full stop at most; else return `text`."""

    def plain(instruction: str) -> str:
        return instruction.strip().removesuffix(".").casefold()

    for instruction in EDITS:
        if plain(instruction) == plain(text):
            return instruction
    return text


def check_tiny_edit(prompt: Prompt) -> None:
    """Check that the tiny editor was taught an edit's instruction, or with references a scene's words.

    Raises:
        ValueError: It was not; the message names one of each kind.
    """
    instruction = prompt.text
    if prompt.references:
        tiny_scene(instruction)
        return
    if instruction not in EDITS:
        forms = [next(iter(texts.values())) for texts in INSTRUCTIONS.values()]
        raise ValueError(f"this model knows no change {instruction!r}; write {' or '.join(map(repr, forms))}")


class Text(NamedTuple):
    """A text in words of the world."""

    name: str
    """Name of the text, for messages."""
    text: str
    allowed: Sequence[str]
    """Attributes that it may name."""
    required: Sequence[str] = ()
    """Attributes that it must name."""


def read_texts(*texts: Text) -> list[dict[str, str]]:
    """Find the words of the world in each text, as attribute → value. A later text may repeat words of the first.

    Raises:
        ValueError: for the first text with unknown words, two values of an attribute, or attributes that are missing or
            not allowed.
    """
    attributes_of_texts: list[dict[str, str]] = []
    for text in texts:
        repeatable = attributes_of_texts[0] if attributes_of_texts else {}
        attributes_of_texts.append(_attributes_in(text, repeatable))
    return attributes_of_texts


def _attributes_in(text: Text, repeatable: Mapping[str, str]) -> dict[str, str]:
    attributes: dict[str, str] = {}
    faults = []
    words = WORD.findall(text.text.lower().replace("top hat", "top-hat"))
    for word in words:
        if word in PASSED_OVER:
            continue
        value = VALUE_OF.get(word) or VALUE_OF.get(word.removesuffix("s"))
        attribute = ATTRIBUTE_OF.get(value or "", "")
        if not value:
            faults.append(f"the unknown word {word!r}")
        elif attribute in text.allowed:
            if attributes.setdefault(attribute, value) != value:
                faults.append(f"two values of {attribute}, {attributes[attribute]} and {value}")
        elif repeatable.get(attribute) != value:
            owner = "a panel" if attribute in SCENE else SHARED
            faults.append(f"a {attribute}, {value}, which belongs to {owner}")
    faults += [f"no {attribute}" for attribute in text.required if attribute not in attributes]
    if faults:
        vocabulary = "; ".join(f"{attribute}: {', '.join(VALUES[attribute])}" for attribute in text.allowed)
        raise ValueError(
            f"{text.name} has {', '.join(faults)}. This model knows {vocabulary}; other words need another model"
        )
    return attributes
