"""Storyboards as files, and the prompts of their pages; no model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from pacorl.core.grid import panel_texts
from pacorl.generate.storyboard import pages, read_storyboard

CASES = sorted((Path(__file__).parents[2] / "configs" / "cases").glob("*.yaml"))

DENTIST = """
title: A day at the practice
style: soft watercolour
layout: 1x2
characters: {kind_dentist: a young dentist in light-blue scrubs., boy: a boy of six}
scenes:
  - "{kind_dentist} shows {boy} a model of teeth; {kind_dentist} smiles"
  - "{kind_dentist} reads an X-ray"
  - "an empty waiting room"
  - "a street"
"""


def write(tmp_path, text: str) -> Path:
    path = tmp_path / "board.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_pages_of_panels(tmp_path):
    board = read_storyboard(write(tmp_path, DENTIST))
    first, last = pages(board, "some/model")
    assert first.panels == (
        "A young dentist in light-blue scrubs shows a boy of six a model of teeth; the kind dentist smiles",
        "A young dentist in light-blue scrubs reads an X-ray",
    )
    assert (str(first.grid), str(last.grid)) == ("1x2", "1x2")
    assert last.panels == ("An empty waiting room", "A street")
    assert len(panel_texts(first.text)) == 2
    for told in ("A day at the practice", "a boy of six", "soft watercolour"):
        assert told in first.text
        assert told in last.text


def test_scenes_that_do_not_fill_a_page_are_refused(tmp_path):
    path = write(tmp_path, "title: A walk\nlayout: 2x3\nscenes: [a, b, c, d, e, f, g, h]")
    with pytest.raises(ValueError, match=r"board\.yaml: 8 scenes do not fill pages of 2x3"):
        read_storyboard(path)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_case_studies_can_be_asked_for(path):
    board = read_storyboard(path)
    model = "tiny" if path.stem.startswith("tiny") else "black-forest-labs/FLUX.1-dev"
    for page in pages(board, model):
        assert len(page.panels) == page.grid.count


@pytest.fixture
def cast(tmp_path) -> Path:
    """Ann with three images, Bob and Cleo with one."""
    for name, count in {"ann": 3, "bob": 1, "cleo": 1}.items():
        folder = tmp_path / "characters" / name
        folder.mkdir(parents=True)
        (folder / "card.yaml").write_text(f"description: {name} the cook")
        for number in range(count):
            Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    return tmp_path


BOARD = (
    "title: x\nlayout: 1x1\ncharacters: [ann, bob, cleo]\nscenes: ['{ann} and { bob } cook', '{cleo} sings', 'A road']"
)


def test_a_page_has_the_references_of_its_characters(cast):
    """The first image of each, then the second ones, up to what the generator takes."""
    board = read_storyboard(write(cast, BOARD))

    def references(limit):
        made = pages(board, "some/model", max_references=limit)
        return [[f"{path.parent.name}/{path.name}" for path in page.references] for page in made]

    assert references(0) == [[], [], []]
    assert references(3) == [["ann/0.png", "bob/0.png", "ann/1.png"], ["cleo/0.png"], []]
    with pytest.raises(ValueError, match="a page shows 2 characters with images, and the generator takes 1 reference"):
        references(1)


def test_the_tiny_generator_reads_the_style_in_place_of_the_title_and_no_names(tmp_path):
    text = "title: Night comic\ncharacters: {Ann_B: a red hero}\nscenes: ['Ann B waving, boat'"
    text += ", '{Ann_B} near a ball, {Ann_B} jumping'" * 3 + "]\n"
    (page,) = pages(read_storyboard(write(tmp_path, f"{text}style: in town")), "tiny")
    assert "2x2 grid layout of a red hero in town. [TOP]-[LEFT]: waving, boat." in page.text
    with pytest.raises(ValueError, match="no place"):
        pages(read_storyboard(write(tmp_path, text)), "tiny")
