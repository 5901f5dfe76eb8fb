"""The studio's folder: what is written is read again, a refused save leaves nothing, and what is removed comes back."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest.mock import Mock

import pytest
from PIL import Image
from pydantic import ValidationError

from pacorl.io.images import png_bytes
from pacorl.judge import default_judge
from pacorl.studio.folder import Draft, Folder, Recipe


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path / "studio")
    yield folder
    folder.close()


def picture(number: int = 0) -> Image.Image:
    return Image.new("RGB", (8, 8), (number, 0, 0))


def files_of(folder: Folder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("theme", "line", "seed", "score"), [("", "", 0, None), ('ein "Füchslein"\n[1]', "läuft; schläft", 2**31, 0.25)]
)
def test_a_recipe_is_read_by_the_model_that_wrote_it(folder, theme, line, seed, score):
    written = Recipe.model_validate({"Software": "pacorl 1", "model": "tiny", "theme": theme, "layout": "1x2"})
    written = written.updated(panels=[line, line], seed=seed, score=score, checked=[line], odd=1)
    folder.add_page([(picture(), written), (picture(1), Recipe(note="a try"))])
    (page,) = folder.pages
    assert [drawing.recipe for drawing in page] == [written, Recipe(note="a try")]
    assert default_judge([page[0].path]) == "tiny", "the commands read these files too"


def test_a_page_that_cannot_be_written_is_none(folder, monkeypatch):
    folder.add_page([(picture(), Recipe(note="1"))])
    before = files_of(folder)
    monkeypatch.setattr("pacorl.studio.folder.png_bytes", Mock(side_effect=OSError("no space left on device")))
    with pytest.raises(OSError, match="no space"):
        folder.add_page([(picture(), Recipe(note="2")), (picture(), Recipe(note="3"))])
    assert files_of(folder) == before
    assert len(folder.pages) == 1


def test_what_is_removed_comes_back_as_it_was(folder):
    name = folder.new_character("king", "yellow")
    for number in range(3):
        folder.add_picture(name, picture(number), f"picture {number}")
    page = folder.path / "pages" / folder.add_page([(picture(), Recipe(note="a page"))])
    before = files_of(folder)
    for path in (folder.pictures(name)[1][0], page, folder.character_folder(name)):
        folder.remove("it", path)
        assert not path.exists()
        folder.undo()
        assert files_of(folder) == before
    folder.remove("all", *(path for path, _ in folder.pictures(name)))
    assert folder.removal == "Removed all."
    folder.undo()
    folder.undo()  # by another window
    assert files_of(folder) == before

    folder.remove("king", folder.character_folder(name))
    folder.new_character("king", "green")
    with pytest.raises(FileExistsError, match="a new king"):
        folder.undo()
    assert folder.character(name).text == "green"
    assert len(list((folder.path / "trash").rglob("card.yaml"))) == 1
    lora = folder.path / "loras/tiny/king"
    lora.mkdir(parents=True)
    folder.remove_character("king")
    assert not lora.exists()
    folder.undo()
    assert (lora.exists(), folder.character(name).text) == (True, "green")


def test_a_character_is_a_folder_that_the_commands_read(folder):
    name = folder.new_character("Banana king", " a yellow king ")
    assert name == "Banana_king"
    for number in range(3):
        folder.add_picture(name, picture(number), f"picture {number}")
    folder.caption(folder.pictures(name)[0][0], "")
    assert [caption for _, caption in folder.pictures(name)] == ["", "picture 1", "picture 2"]
    character = folder.character(name)
    assert (character.text, len(character.images)) == ("a yellow king", 3)
    for refused, description, named in (("Banana king", "another", "already"), ("nobody", " ", "description")):
        with pytest.raises(ValueError, match=named):
            folder.new_character(refused, description)
    assert folder.characters() == [name]
    card = folder.character_folder(name) / "card.yaml"
    card.write_text("description: a king\nkeep: {outfit: a crown}\n")
    kept = folder.character(name)
    folder.describe(name, "an old\nking")
    assert folder.character(name) == replace(kept, description="an old king")


def test_one_studio_at_a_time_and_files_are_the_owners_alone(folder):
    with pytest.raises(ValueError, match="--folder"):
        Folder(folder.path)
    assert len(folder.key) > 16
    if os.name == "posix":
        assert folder.path.stat().st_mode & 0o077 == 0


def test_damaged_recipes_are_refused(folder):
    for texts in ({"panels": "{"}, {"seed": "x"}, {"layout": "none"}):
        with pytest.raises(ValidationError, match=next(iter(texts))):
            Recipe.model_validate(texts)
        name = folder.add_page([(picture(), Recipe(note="good"))])
        (folder.path / "pages" / name / "2.png").write_bytes(png_bytes(picture(), texts))
        assert len(folder.pages[0]) == 1


@pytest.mark.parametrize("text", ["{", '{"drawing": "of an older version"}'])
def test_a_damaged_form_is_an_empty_one(folder, text):
    (folder.path / "draft.json").write_text(text)
    assert folder.read_draft() == Draft()
