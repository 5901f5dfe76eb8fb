"""Edits in files, and in the tiny world."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from research.tiny.edits import grade_edits, world_edits, write_edits

from pacorl.io import files
from pacorl.io.files import digest
from pacorl.records import images
from pacorl.records.prompts import load_prompts, save_prompts
from pacorl.tiny.oracle import Oracle
from pacorl.tiny.words import INSTRUCTIONS
from pacorl.tiny.world import VALUES, draw, split_of_hero
from pacorl.types import Prompt


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def written(folder: Path, *records: object) -> Path:
    path = folder / "edits.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_an_image_of_many_records_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, hashed = [], []
    open_image, digest = images.open_image, files.digest
    monkeypatch.setattr(images, "open_image", lambda path: opened.append(path) or open_image(path))
    monkeypatch.setattr(files, "digest", lambda path: hashed.append(path) or digest(path))
    Image.new("RGB", (8, 8)).save(tmp_path / "fox.png")
    for _ in range(3):
        images.copied_images(images.images_beside(["fox.png"], tmp_path), tmp_path / "sets.jsonl")
    assert (len(opened), len(hashed)) == (1, 1)
    (tmp_path / "fox.png").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"fox\.png"):
        images.images_beside(["fox.png"], tmp_path)


def test_the_world_s_edits_change_one_attribute_of_the_split_s_own_characters() -> None:
    edits = world_edits("dev", 40)
    assert {edit.attribute for edit in edits} == set(INSTRUCTIONS)
    assert edits == world_edits("dev", 40)
    assert edits != world_edits("dev", 40, seed=1)
    for edit in edits:
        assert split_of_hero(edit.before.colour, edit.before.shape, edit.before.hat) == "dev"
        assert getattr(edit.after, edit.attribute) == edit.value != getattr(edit.before, edit.attribute)
        assert all(getattr(edit.after, name) == getattr(edit.before, name) for name in {*VALUES} - {edit.attribute})


@pytest.mark.slow
def test_written_edits_come_back_and_are_graded(tmp_path: Path, oracle: Oracle) -> None:
    edits = world_edits("test", 8)
    prompts = load_prompts(write_edits(tmp_path, edits, name="test", pixels=64))
    assert [prompt.text for prompt in prompts] == [edit.instruction for edit in edits]
    perfect = grade_edits(prompts, [draw(edit.after, 64) for edit in edits], oracle=oracle)
    assert perfect == {"kept": 1.0, "followed": 1.0, "edited_well": 1.0, "valid": 1.0}
    copies = grade_edits(prompts, [draw(edit.before, 64) for edit in edits], oracle=oracle)
    assert copies == {"kept": 1.0, "followed": 0.0, "edited_well": 0.0, "valid": 1.0}
    blank = grade_edits(prompts, [Image.new("RGB", (64, 64))] * 8, oracle=oracle)
    assert blank == {"kept": 0.0, "followed": 0.0, "edited_well": 0.0, "valid": 0.0}


def test_saved_edits_are_read_back(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(image_bytes("red"))
    edits = [
        Prompt(0, "Make it blue.", sources=(tmp_path / "a.png",)),
        Prompt(1, "Add.", sources=(tmp_path / "b.png",)),
    ]
    save_prompts(edits, tmp_path / "out" / "train.jsonl")
    again = load_prompts(tmp_path / "out" / "train.jsonl")
    assert [prompt.text for prompt in again] == ["Make it blue.", "Add."]
    assert again[0].sources == again[1].sources, "equal images are copied once"
    assert again[0].sources[0].read_bytes() == image_bytes("red")


def image_bytes(colour: str, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (12, 10), colour).save(buffer, kind)
    return buffer.getvalue()


def test_an_edits_image_is_never_copied_through_a_link(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "key").write_text("secret")
    name = f"{digest(tmp_path / 'a.png')[:32]}.png"
    (tmp_path / "out" / "train_images").mkdir(parents=True)
    (tmp_path / "out" / "train_images" / name).symlink_to(tmp_path / "key")
    save_prompts([Prompt(id=0, text="Give it a hat.", sources=(tmp_path / "a.png",))], tmp_path / "out" / "train.jsonl")
    assert (tmp_path / "key").read_text() == "secret"
    assert (tmp_path / "out" / "train_images" / name).read_bytes() == (tmp_path / "a.png").read_bytes()


def test_a_snapshot_of_the_hub_links_into_its_own_blobs_alone(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "c0ffee", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for folder in (blobs, tmp_path):
        Image.new("RGB", (8, 8)).save(folder / "0a", "PNG")
    (snapshot / "a.png").symlink_to("../../blobs/0a")
    path = written(snapshot, {"image": "a.png", "instruction": "Paint it."})
    assert load_prompts(path)[0].sources == (snapshot / "a.png",)
    (snapshot / "a.png").unlink()
    (snapshot / "a.png").symlink_to("../../0a")
    with pytest.raises(ValueError, match=r"'a\.png'"):
        load_prompts(path)
