"""Whole sets are ranked without a reference: from grids, from folders of images, and on to a judge's pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from pacorl.dataset.export import export
from pacorl.dataset.folder import Answer, Instance, read_instances, write_records
from pacorl.dataset.grids import pair
from pacorl.dataset.own_images import pair_images
from pacorl.records.comparisons import load_comparisons


def test_the_best_sets_images_belong_together_and_the_worst_ones_do_not(dataset):
    folder = dataset(prompts=3, grids=3, paired=False)
    assert pair(folder, sets=True) == {"prompts": 3, "panels": 36, "instances": 3}
    shown = read_instances(folder / "instances.jsonl")
    assert [len(instance.panels) for instance in shown] == [3, 3, 3]
    answers = [
        Answer.to(instance, [[best] for best in instance.candidates[::-1]], annotator=name)
        for instance in shown
        for name in ("ann", "ben")
    ]
    answers[-1] = replace(answers[-1], candidates=answers[-1].candidates[::-1], panels=answers[-1].panels[::-1])
    write_records(folder / "rankings.jsonl", answers)

    counts = export(folder, shares={"train": 0.5, "test": 0.5})

    assert counts["balance"] | {"yes": 12, "no": 12, "votes": 72, "tied": 12} == counts["balance"]
    assert {split["groups"] for split in counts["splits"].values()} == {
        1
    }  # not by an absent reference, nor of tied votes
    assert counts["benchmark"]["rankings"] == 0
    comparisons = load_comparisons(folder / "export/comparisons_train.jsonl")
    for comparison in comparisons:
        first, second = (path.stem.split("_") for path in comparison.images)
        assert first[0] == second[0] == ("2" if comparison.consistent else "0")
        assert first[1] != second[1]
    # Rankings belong to one kind of question. Without them, questions of sets take the place of those about references.
    with pytest.raises(ValueError, match="6 rankings of another kind, of whole sets"):
        pair(folder)
    (folder / "rankings.jsonl").unlink()
    assert pair(folder) == {"prompts": 3, "panels": 36, "instances": 108}
    assert pair(folder, sets=True)["instances"] == 3


def test_folders_of_own_images_are_sets(tmp_path: Path):
    for name, colour in {
        "fox/a/1": "red",
        "fox/a/2": "blue",
        "fox/b/1": "red",
        "fox/b/2": "red",
        "fox/b/3": "red",
    }.items():
        path = tmp_path / "mine" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 12), colour).save(path)
    folder = tmp_path / "set"
    counts = pair_images(folder, tmp_path / "mine", sets=True)
    assert counts == {"groups": 1, "images": 5, "instances": 1}
    (instance,) = read_instances(folder / "instances.jsonl")
    assert (instance.theme, instance.candidates) == ("fox", ("sets/fox/a.png", "sets/fox/b.png"))
    assert [[Path(name).name for name in panels] for panels in instance.panels] == [
        ["a-1.png", "a-2.png"],
        ["b-1.png", "b-2.png", "b-3.png"],
    ]
    with Image.open(folder / "sets/fox/a.png") as sheet:
        assert sheet.getpixel((256, 512)) == (255, 0, 0)
        assert sheet.getpixel((768, 512)) == (0, 0, 255)
    (tmp_path / "mine/owl/a").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"owl.a: 0 images give nothing to rank; a set needs two images"):
        pair_images(folder, tmp_path / "mine", sets=True)
    with pytest.raises(ValueError, match="there are no themes"):
        pair_images(folder, tmp_path / "mine/fox/a", sets=True)


def test_a_folder_with_rankings_of_the_other_kind_is_refused(dataset):
    folder = dataset(prompts=2, grids=2)
    shown = read_instances(folder / "instances.jsonl")
    answers = [Answer.to(instance, [[name] for name in instance.candidates], annotator="ann") for instance in shown[:3]]
    write_records(folder / "rankings.jsonl", answers)
    before = (folder / "instances.jsonl").read_bytes()
    with pytest.raises(ValueError, match="has 3 rankings of another kind, with a reference; use a folder of its own"):
        pair(folder, sets=True)
    assert (folder / "instances.jsonl").read_bytes() == before
    pair(folder)


@pytest.mark.parametrize("panels", [(), (("a", "b"),), (("a", "b"), ("c",))])
def test_a_set_lists_its_images(panels):
    with pytest.raises(ValueError, match="lists two images or more of each candidate"):
        Instance("1", "g", "", ("x.png", "y.png"), panels=panels)
