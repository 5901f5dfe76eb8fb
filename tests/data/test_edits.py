"""Edits in files and in the tiny world."""

import json
from pathlib import Path

import pytest
from PIL import Image

from pacorl.data.character_edits import Edit, character_edits, grade_edits, write_edits
from pacorl.data.characters import EDITS, Oracle, Panel, draw, split_of
from pacorl.data.records import load_prompts
from pacorl.types import Grid, Prompt

PANEL = Panel("red", "round", "crown", "day", "waving", "tree")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def written(folder: Path, *records: object) -> Path:
    path = folder / "edits.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_an_edit_is_read_with_its_source(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (20, 10)).save(tmp_path / "photos" / "cat.jpg")
    record = {"image": "photos/cat.jpg", "instruction": " Give it a top hat. ", "category": "hat"}
    (prompt,) = load_prompts(written(tmp_path, record))
    assert prompt.text == "Give it a top hat."
    assert prompt.sources == (tmp_path / "photos" / "cat.jpg",)
    assert prompt.grid == Grid(1, 1)
    assert prompt.category == "hat"


def test_several_sources_are_kept_in_order(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (20, 10)).save(tmp_path / name)
    (prompt,) = load_prompts(written(tmp_path, {"image": ["b.png", "a.png"], "instruction": "Put a into b."}))
    assert [path.name for path in prompt.sources] == ["b.png", "a.png"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"image": "a.png"}, "'instruction' must be the text of an edit, got None"),
        ({"image": "a.png", "instruction": " "}, "'instruction' must be"),
        ({"instruction": "Paint it."}, "'image' must be an image's path or a list of paths, got None"),
        ({"image": [], "instruction": "Paint it."}, "'image' must be"),
        ({"image": "gone.png", "instruction": "Paint it."}, r"image 'gone\.png' cannot be read \(No such file"),
        ({"image": "text.png", "instruction": "Paint it."}, r"text\.png: not an image"),
        ({"image": "cut.png", "instruction": "Paint it."}, r"cut\.png: damaged or cut off"),
        ({"image": "../a.png", "instruction": "Paint it."}, r"image '\.\./a\.png' lies outside of"),
        ({"image": "/etc/hostname", "instruction": "Paint it."}, "lies outside of"),
        ({"image": "link.png", "instruction": "Paint it."}, "lies outside of"),
        ({"image": "a.png", "instruction": "Paint it.", "panels": ["one", "two"]}, "'panels' of an edit"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, record: dict[str, object], message: str) -> None:
    folder = tmp_path / "edits"
    folder.mkdir()
    good = folder / "a.png"
    Image.effect_noise((64, 64), 50).convert("RGB").save(good)
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    (folder / "text.png").write_text("no picture")
    (folder / "cut.png").write_bytes(good.read_bytes()[:2000])
    (folder / "link.png").symlink_to(tmp_path / "a.png")
    path = written(folder, {"image": "a.png", "instruction": "Paint it red."}, record)
    with pytest.raises(ValueError, match=rf"edits\.jsonl:2: .*{message}"):
        load_prompts(path)


def test_the_world_s_edits_change_one_attribute_of_the_split_s_own_characters() -> None:
    edits = character_edits("dev", 40)
    assert {edit.attribute for edit in edits} == set(EDITS)
    assert edits == character_edits("dev", 40)
    assert edits != character_edits("dev", 40, seed=1)
    for edit in edits:
        assert split_of(edit.before) == "dev"
        assert getattr(edit.after, edit.attribute) == edit.value != getattr(edit.before, edit.attribute)
        assert all(getattr(edit.after, name) == getattr(edit.before, name) for name in edit.others)


def test_written_edits_come_back_and_are_graded(tmp_path: Path, oracle: Oracle) -> None:
    edits = character_edits("test", 8)
    prompts = load_prompts(write_edits(tmp_path, edits, name="test", pixels=64))
    assert [prompt.text for prompt in prompts] == [edit.instruction for edit in edits]
    perfect = grade_edits(prompts, [draw(edit.after, 64) for edit in edits], oracle=oracle)
    assert perfect == {"kept": 1.0, "followed": 1.0, "edited_well": 1.0, "valid": 1.0}
    copies = grade_edits(prompts, [draw(edit.before, 64) for edit in edits], oracle=oracle)
    assert copies == {"kept": 1.0, "followed": 0.0, "edited_well": 0.0, "valid": 1.0}
    blank = grade_edits(prompts, [Image.new("RGB", (64, 64))] * 8, oracle=oracle)
    assert blank == {"kept": 0.0, "followed": 0.0, "edited_well": 0.0, "valid": 0.0}


def test_grades_count_attributes(tmp_path: Path, oracle: Oracle) -> None:
    edit = Edit(PANEL, "hat", "cap")
    prompts = load_prompts(write_edits(tmp_path, [edit], name="one"))
    half = Panel("blue", "round", "cap", "night", "waving", "tree")
    grades = grade_edits(prompts, [draw(half, 64)], oracle=oracle)
    assert grades == {"kept": pytest.approx(3 / 5), "followed": 1.0, "edited_well": 0.0, "valid": 1.0}


def test_a_prompt_without_truth_is_not_graded(tmp_path: Path, oracle: Oracle) -> None:
    draw(PANEL, 64).save(tmp_path / "a.png")
    prompt = Prompt(3, "Give the hero a cap.", sources=(tmp_path / "a.png",))
    with pytest.raises(ValueError, match=r"prompt 3 .* does not say what the edited image is to show"):
        grade_edits([prompt], [draw(PANEL, 64)], oracle=oracle)
