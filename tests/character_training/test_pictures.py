"""Images of a character for training: captions, held-out images, sizes, and refusals in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image
from tiny_hero import hero_config, make_hero

from pacorl.character_training.pictures import Picture, gallery_prompts, read_pictures
from pacorl.types import Size


def test_captions_are_files_or_the_card_with_the_trigger(tmp_path: Path) -> None:
    hero = make_hero(tmp_path / "zorp", captions=False)
    (hero / "card.yaml").write_text("description: a hero.\nkeep: {outfit: crown}\n")
    (hero / "0.txt").write_text("zorp by\na flag\n")
    pictures = read_pictures(hero_config(hero, tmp_path / "run"))
    captions = {picture.path.name: picture.caption for picture in (*pictures.train, *pictures.held_out)}
    assert captions == {"0.png": "zorp by a flag"} | {f"{n}.png": "zorp, a hero, crown" for n in range(1, 6)}

    config = hero_config(hero, tmp_path / "run", 'gallery.prompts=["{character} by a boat"]')
    assert [prompt.text for prompt in gallery_prompts(config, pictures.subject)] == ["zorp, a hero, crown by a boat"]


def test_captions_of_other_tools_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hero = make_hero(tmp_path / "zorp", captions=False)
    (hero / "card.yaml").write_text("description: a hero\n")
    # The trigger is no part of a word.
    texts = ("[trigger] waving", "zorp, jumping", "a zorplike thing", "{trigger} by a lamp", "<trigger>")
    for number, text in enumerate(texts):
        (hero / f"{number}.txt").write_text(text)
    pictures = read_pictures(hero_config(hero, tmp_path / "run"))
    captions = {picture.path.name: picture.caption for picture in (*pictures.train, *pictures.held_out)}
    assert captions == {
        "0.png": "zorp waving",
        "1.png": "zorp, jumping",
        "2.png": "zorp, a hero, a zorplike thing",
        "3.png": "zorp by a lamp",
        "4.png": "zorp",
        "5.png": "zorp, a hero",
    }
    (record,) = caplog.records
    assert record.getMessage().startswith("5.png")


def test_copies_of_a_picture_stay_on_one_side(tmp_path: Path) -> None:
    hero = make_hero(tmp_path / "zorp")
    for number in range(6):
        shutil.copy(hero / f"{number}.png", hero / f"{number}b.png")
    pictures = read_pictures(hero_config(hero, tmp_path / "run"))
    train, held_out = ({picture.path.name[0] for picture in side} for side in (pictures.train, pictures.held_out))
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize(("pictures", "held_out"), [(4, []), (5, [3]), (6, [3])])
def test_pictures_are_held_out_of_five_or_more(tmp_path: Path, pictures: int, held_out: list[int]) -> None:
    hero = make_hero(tmp_path / "zorp", pictures=pictures)
    found = read_pictures(hero_config(hero, tmp_path / "run"))
    assert [picture.path.name for picture in found.held_out] == [f"{number}.png" for number in held_out]
    assert len(found.train) == pictures - len(held_out)
    assert not {picture.path for picture in found.train} & {picture.path for picture in found.held_out}


def test_pictures_of_other_shapes_are_cropped(tmp_path: Path) -> None:
    Image.new("RGB", (300, 100), "red").save(tmp_path / "wide.png")
    cropped = Picture(tmp_path / "wide.png", "").open(Size(64, 32))
    assert (cropped.size, cropped.getpixel((16, 2))) == ((32, 64), (255, 0, 0))


def test_a_picture_or_caption_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    hero = make_hero(tmp_path / "zorp")
    (hero / "3.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"3\.txt is empty; write the caption of 3\.png into it, or delete it"):
        read_pictures(hero_config(hero, tmp_path / "run"))
    (hero / "3.png").write_text("Dear Sir")
    with pytest.raises(ValueError, match=r"3\.png: not an image of a known format"):
        read_pictures(hero_config(hero, tmp_path / "run"))
    with pytest.raises(ValueError, match="there is no character 'zork'"):
        read_pictures(hero_config(tmp_path / "zork", tmp_path / "run").model_copy(update={"character": "zork"}))
