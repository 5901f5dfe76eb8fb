from __future__ import annotations

import json

import pytest

from pacorl.core.grid import parse_layout, split
from pacorl.dataset.pair import instances_of, pair, panel_path
from pacorl.dataset.records import PromptRecord, read_instances
from pacorl.io.documents import read_jsonl, write_jsonl
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image
from pacorl.types import Prompt


def record(idx: str, layout: str = "2x2") -> PromptRecord:
    return PromptRecord(idx, Prompt(id=0, text="A set.", grid=parse_layout(layout)), {})


def test_paper_arithmetic():
    instances = [one for number in range(708) for one in instances_of(record(f"{number:04d}"), grids=4)]
    assert len(instances) == 33_984
    assert len({one.id for one in instances}) == 33_984


@pytest.mark.parametrize(
    ("layout", "grids", "count"), [("1x3", 2, 2 * 3 * 2), ("2x4", 5, 5 * 8 * 7), ("1x2", 6, 6 * 2)]
)
def test_other_layouts(layout, grids, count):
    assert len(list(instances_of(record("a", layout), grids=grids))) == count


def test_candidates_share_a_position_and_one_shares_the_grid():
    for one in instances_of(record("a"), grids=4):
        grid, position = one.id.split(":")[1].split("_")
        other = one.id.split(":")[2]
        assert other != position
        assert one.reference == f"images/a/{grid}_{position}.png"
        assert one.candidates == tuple(f"images/a/{x}_{other}.png" for x in range(4))


@pytest.mark.parametrize(("layout", "grids"), [("2x2", 1), ("1x1", 4)])
def test_nothing_to_rank_is_an_error(layout, grids):
    with pytest.raises(ValueError, match="nothing to rank"):
        list(instances_of(record("a", layout), grids=grids))


def test_pair_cuts_what_split_cuts(dataset):
    folder = dataset(prompts=2, grids=3)
    instances = read_instances(folder / "instances.jsonl")
    assert len(instances) == 2 * 3 * 4 * 3
    panels = split(open_image(folder / "grids/0001/2.png"), record("x").prompt.grid)
    for position, panel in enumerate(panels):
        assert open_image(folder / panel_path("0001", 2, position)).tobytes() == panel.tobytes()


def test_pair_is_idempotent_and_repairs_a_lost_panel(dataset):
    folder = dataset(prompts=1, grids=2)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    counts = pair(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    lost = folder / "images/0000/1_2.png"
    lost.unlink()
    assert pair(folder) == counts
    assert lost.is_file()


def test_dry_run_writes_nothing(dataset):
    folder = dataset(prompts=1, grids=2, paired=False)
    assert pair(folder, dry_run=True) == {"prompts": 1, "panels": 8, "instances": 24}
    assert not (folder / "images").exists()
    assert not (folder / "instances.jsonl").exists()


def test_a_changed_grid_is_named(dataset):
    folder = dataset(prompts=1, grids=2, paired=False)
    write_atomic(folder / "grids/0000/1.png", b"not an image")
    with pytest.raises(ValueError, match=r"grids/0000/1\.png is not the image that was generated"):
        pair(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"record 7: grid 0 of '0000' is already taken"),
        ({"number": 9, "file": "../secret.png"}, "leads out of"),
        ({"sha256": None}, "is not the image that was generated"),
    ],
)
def test_bad_lists_of_grids_are_named(dataset, change, message):
    folder = dataset(prompts=2, grids=3, paired=False)
    (folder.parent / "secret.png").write_bytes(b"x")
    rows = read_jsonl(folder / "grids.jsonl")
    write_jsonl(folder / "grids.jsonl", [*rows, rows[0] | change])
    with pytest.raises(ValueError, match=message):
        pair(folder)
    assert not (folder / "instances.jsonl").exists()


def test_a_grid_without_its_number_is_named(dataset):
    folder = dataset(prompts=1, grids=2, paired=False)
    write_jsonl(folder / "grids.jsonl", [{"group": "0000", "file": "grids/0000/0.png"}])
    with pytest.raises(ValueError, match=r"record 1: a grid has group, number, file and sha256, this has group, file"):
        pair(folder)


def test_a_prompt_without_grids_is_named(dataset):
    folder = dataset(prompts=2, grids=2, paired=False)
    rows = (folder / "grids.jsonl").read_text().splitlines()
    write_atomic(folder / "grids.jsonl", "\n".join(row for row in rows if json.loads(row)["group"] != "0001"))
    with pytest.raises(ValueError, match="0001 first"):
        pair(folder)
