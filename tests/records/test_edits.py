"""Edits in files, with their images."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from pacorl.io import files
from pacorl.io.files import digest
from pacorl.records import images
from pacorl.records.prompts import load_prompts, save_prompts
from pacorl.types import Prompt


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
