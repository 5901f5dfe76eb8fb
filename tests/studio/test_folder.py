"""The studio's folder: what is written is read again, a refused save leaves nothing, and what is removed comes back."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pacorl.io.images import ImageError
from pacorl.judge import default_judge
from pacorl.studio.folder import RECIPE, Draft, Folder, Recipe
from pacorl.studio.page import opened


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path / "studio")
    yield folder
    folder.close()


def picture(number: int = 0) -> Image.Image:
    return Image.new("RGB", (8, 8), (number, 0, 0))


def files_of(folder: Folder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(theme=TEXTS, panels=st.lists(TEXTS, max_size=4), seed=st.integers(0, 2**31), score=st.none() | st.floats(0, 1))
def test_a_recipe_is_read_by_the_model_that_wrote_it(tmp_path_factory, theme, panels, seed, score):
    path = tmp_path_factory.mktemp("studio")
    words = {"theme": theme, "panels": panels, "seed": seed}
    recipe = Recipe(**words, layout="2x2", score=score, loras={"a": 0.5}, matrix=[[None, score]], model="tiny")
    folder = Folder(path)
    page = folder.add_page([(picture(), recipe)], before=picture(1), tries=[picture(2)])
    checked = recipe.model_copy(update={"verdict": [theme], "odd": 1, "tries": [theme]})
    folder.keep_recipe(page, 0, checked, picture())
    folder.keep_draft(Draft(sentence=theme, **words))
    folder.close()

    again = Folder(path)
    (read,) = again.pages
    assert read.recipes == (checked,)
    assert Recipe.of(read.candidates[0].read_bytes()) == checked
    assert default_judge(read.candidates) == "tiny", "the commands read these files too"
    assert read.before
    assert len(read.tries) == 1
    assert again.read_draft() == Draft(sentence=theme, **words)
    again.close()


def test_a_page_that_cannot_be_written_leaves_nothing(folder, monkeypatch):
    folder.add_page([(picture(), Recipe(layout="1x1"))])
    before = files_of(folder)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("pacorl.studio.folder.png_bytes", full)
    with pytest.raises(OSError, match="no space"):
        folder.add_page([(picture(), Recipe(layout="1x1")), (picture(), Recipe(layout="1x1"))])
    assert files_of(folder) == before
    assert len(folder.pages) == 1


def test_a_number_is_never_given_again_and_unfinished_pages_are_swept(folder):
    first = folder.add_page([(picture(), Recipe(layout="1x1"))])
    folder.remove("it", first.folder)
    assert folder.add_page([(picture(), Recipe(layout="1x1"))]).number == first.number + 1
    unfinished = folder.path / "pages" / ".new-x"
    unfinished.mkdir()
    folder.close()
    Folder(folder.path).close()
    assert not unfinished.exists()


def test_what_is_removed_comes_back_as_it_was(folder):
    name = folder.new_character("Banana king", "yellow")
    for number in range(3):
        folder.add_picture(name, picture(number), f"picture {number}")
    page = folder.add_page([(picture(), Recipe(layout="1x1"))])
    before = files_of(folder)
    path = folder.pictures(name)[1][0]
    for paths in ([path, path.with_suffix(".txt")], [page.folder], [folder.path / "characters" / name]):
        folder.remove("it", *paths)
        assert files_of(folder) != before
        folder.undo()
        assert files_of(folder) == before
    assert [page.number for page in folder.pages] == [1]


def test_what_has_a_new_owner_stays_in_the_trash(folder):
    name = folder.new_character("king", "yellow")
    folder.add_picture(name, picture())
    folder.remove("a picture", folder.pictures(name)[0][0])
    folder.add_picture(name, picture(9))
    with pytest.raises(ValueError, match=r"01\.png"):
        folder.undo()
    assert len(list((folder.path / "trash").rglob("*.png"))) == 1


def test_a_character_is_a_folder_that_the_commands_read(folder):
    name = folder.new_character("Bananå king!", " a yellow king ")
    assert name == "Banana_king_"
    for number in range(3):
        folder.add_picture(name, picture(number), f"picture {number}")
    assert [caption for _, caption in folder.pictures(name)] == ["picture 0", "picture 1", "picture 2"]
    character = folder.character(name)
    assert (character.text, len(character.images)) == ("a yellow king", 3)
    folder.describe(name, "a green king")
    assert folder.character(name).text == "a green king"
    with pytest.raises(ValueError, match="already"):
        folder.new_character("Bananå king!", "another")
    with pytest.raises(ValueError, match="looks like"):
        folder.new_character("nobody", " ")
    assert folder.characters() == [name]


def test_one_studio_at_a_time_and_files_are_the_owners_alone(folder):
    with pytest.raises(ValueError, match="--folder"):
        Folder(folder.path)
    assert len(folder.key) > 16
    folder.keep_draft(Draft())
    folder.add_page([(picture(), Recipe(layout="1x1"))])
    for path in folder.path.rglob("*"):
        if path.is_file() and os.name == "posix":
            assert path.stat().st_mode & 0o077 == 0, path


def test_damaged_recipes_and_pictures_are_refused(folder, tmp_path):
    from pacorl.io.images import png_bytes

    assert Recipe.of(png_bytes(picture())) is None
    for text in ("{", "[]", '{"layout": "none"}', '{"seed": "x"}'):
        with pytest.raises(ValueError, match=r"."):
            Recipe.of(png_bytes(picture(), {RECIPE: text}))
    for content in (b"", b"no image", png_bytes(picture())[:40]):
        with pytest.raises(ImageError, match=r"a\.png"):
            opened(content, "a.png")
