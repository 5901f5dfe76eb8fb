"""Folders of a person's own images become questions, each image as often as the others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from pacorl.dataset.folder import read_instances
from pacorl.dataset.own_images import MAX_CANDIDATES, pair_images
from pacorl.io.images import ImageError


def write_images(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.new("RGB", (16, 16), (10 * number, 0, 90)).save(folder / name)


def test_each_folder_is_a_theme_and_each_image_a_reference(tmp_path: Path) -> None:
    write_images(tmp_path / "mine" / "one_red-fox", *(f"{number}.png" for number in range(7)))
    write_images(tmp_path / "mine" / "owls", "a.jpg", "b.gif", "b.png")
    for name in ("notes.txt", ".DS_Store"):
        (tmp_path / "mine" / "owls" / name).write_text("no image")
    counts = pair_images(tmp_path / "set", tmp_path / "mine")
    assert counts == {"groups": 2, "images": 10, "instances": 10}
    instances = read_instances(tmp_path / "set" / "instances.jsonl")
    assert {instance.theme for instance in instances} == {"one red fox", "owls"}
    foxes = [instance for instance in instances if instance.group == "one_red-fox"]
    shown = Counter(name for instance in foxes for name in instance.candidates)
    assert set(shown.values()) == {MAX_CANDIDATES}
    assert all(instance.reference not in instance.candidates for instance in instances)
    for name in {name for instance in instances for name in (instance.reference, *instance.candidates)}:
        assert (tmp_path / "set" / name).is_file()
    assert (tmp_path / "set/images/owls/a.jpg").read_bytes() == (tmp_path / "mine/owls/a.jpg").read_bytes()
    with Image.open(tmp_path / "set/images/owls/b.gif.png") as converted:
        assert converted.format == "PNG"
    before = (tmp_path / "set" / "instances.jsonl").read_bytes()
    pair_images(tmp_path / "set", tmp_path / "mine")
    assert (tmp_path / "set" / "instances.jsonl").read_bytes() == before
    assert pair_images(tmp_path / "other", tmp_path / "mine" / "owls")["groups"] == 1


def test_what_cannot_be_ranked_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_images(tmp_path / "mine" / "pair", "a.png", "b.png")
    with pytest.raises(ValueError, match="pair: 2 images give nothing to rank"):
        pair_images(tmp_path / "set", tmp_path / "mine")
    with pytest.raises(ValueError, match="there is no such folder"):
        pair_images(tmp_path / "set", tmp_path / "absent")
    (tmp_path / "mine" / "pair" / "c.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"c\.png: not an image"):
        pair_images(tmp_path / "set", tmp_path / "mine")
    assert not (tmp_path / "set").exists()
