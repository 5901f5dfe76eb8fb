"""Sets of separate images: their prompts, references and seeds, the panel before, files, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.twins import tiny_klein
from tests.twins.parts import vocabulary

from pacorl.generate.generator import Generator
from pacorl.generate.separate import panel_prompts, panel_seeds
from pacorl.generate.sets import generate_sets
from pacorl.models.policies.klein import KLEIN
from pacorl.types import Character, Grid, Prompt, Size

SIZE = Size(32, 48)
PANELS = ("Ann waves.", "Ann and Bob jump.", "A boat.")


@pytest.fixture(scope="module")
def generator() -> Generator:
    """FLUX.2-klein in small: sets, and up to four references."""
    torch.manual_seed(0)
    return Generator(KLEIN.over(tiny_klein(vocabulary()), max_sequence_length=144), model="klein", kind="klein")


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    """Ann has two images, Bob one."""
    paths = []
    for number, colour in enumerate(("red", "orange", "blue")):
        paths.append(tmp_path / f"{number}.png")
        Image.new("RGB", (32, 32), colour).save(paths[-1])
    cast = (Character("ann", "", (paths[0], paths[1])), Character("bob", "", (paths[2],)))
    given = {"characters": cast, "references": (paths[0], paths[2], paths[1])}
    return Prompt(5, "1x3 grid layout", theme="A day.", grid=Grid(1, 3), panels=PANELS, size=Size(64, 150), **given)


def test_a_panel_s_prompt_has_the_theme_its_text_and_its_characters_references(prompt: Prompt) -> None:
    first, second, third = panel_prompts(prompt, "klein", kind="klein")
    assert [panel.text for panel in (first, second, third)] == [f"A day. {text}" for text in PANELS]
    names = [[path.stem for path in panel.references] for panel in (first, second, third)]
    assert names == [["0", "1"], ["0", "2", "1"], []]
    assert {(panel.grid, panel.size) for panel in (first, second, third)} == {(Grid(1, 1), Size(64, 50))}


def test_a_panel_is_drawn_from_text_references_or_by_an_edit(prompt: Prompt) -> None:
    alone = replace(prompt, theme="Ann", grid=Grid(1, 1), panels=("Ann waves.",))
    (text_only,) = panel_prompts(alone, "lab/flux", kind="flux")
    assert (text_only.text, text_only.references, text_only.sources) == ("Ann waves.", (), ())
    (edit,) = panel_prompts(alone, "lab/edit", kind="qwen_edit")
    assert (edit.sources, edit.references) == (alone.characters[0].images[:1], ())
    both = replace(alone, panels=("Ann and Bob jump.",))
    with pytest.raises(ValueError, match="shows 2 characters with images, and lab/edit takes 1"):
        panel_prompts(both, "lab/edit", kind="qwen_edit")
    with pytest.raises(ValueError, match="lab/edit edits images"):
        panel_prompts(replace(alone, characters=(), references=()), "lab/edit", kind="qwen_edit")
    with pytest.raises(ValueError, match="1 panels have 0 texts"):
        panel_prompts(replace(alone, panels=()), "lab/flux", kind="flux")


@pytest.mark.slow
def test_each_panel_is_the_image_that_its_prompt_makes_alone(generator: Generator, prompt: Prompt) -> None:
    (made,) = generate_sets(generator, prompt, seed=7, separate=True, size=SIZE, steps=1)
    assert made.image.size == (3 * 48, 32)
    own_prompts = panel_prompts(prompt, "klein", kind="klein")
    for position, (panel, own) in enumerate(zip(made.panels, own_prompts, strict=True)):
        (alone,) = generator.sample(own, seeds=7 * 3 + position, size=SIZE, steps=1)
        assert panel.tobytes() == alone.tobytes()
    assert (made.prompt, made.recipe["size"], made.recipe["separate"]) == (prompt, str(SIZE), True)


def test_every_panel_has_its_own_seed() -> None:
    """Within torch's range for any seed of a draw."""
    assert panel_seeds(7, 3) == [21, 22, 23]
    large = panel_seeds(2**63 - 1, 16)
    assert len(set(large)) == 16
    assert max(large) < 2**63
