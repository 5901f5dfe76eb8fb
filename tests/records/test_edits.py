"""Edits in files, in the form that two collections are published in, and in the tiny world."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pacorl.io import files
from pacorl.io.files import digest
from pacorl.io.images import open_image
from pacorl.records import edits
from pacorl.records.edits import load_gedit, save_edits
from pacorl.records.prompts import load_prompts, prompts_from
from pacorl.tiny import characters
from pacorl.tiny.character_edits import Edit, character_edits, grade_edits, write_edits
from pacorl.tiny.characters import EDITS, VALUES, Oracle, Panel, draw, split_of
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


def test_an_image_of_many_records_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, hashed = [], []
    open_image, digest = edits.open_image, files.digest
    monkeypatch.setattr(edits, "open_image", lambda path: opened.append(path) or open_image(path))
    monkeypatch.setattr(files, "digest", lambda path: hashed.append(path) or digest(path))
    Image.new("RGB", (8, 8)).save(tmp_path / "fox.png")
    for _ in range(3):
        images = edits.images_beside(["fox.png"], tmp_path)
        edits.copied_images(images, tmp_path / "sets.jsonl")
    assert (len(opened), len(hashed)) == (1, 1)
    (tmp_path / "fox.png").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"fox\.png"):
        edits.images_beside(["fox.png"], tmp_path)


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
        ({"image": "../a.png", "instruction": "Paint it."}, r"image '\.\./a\.png' is outside of"),
        ({"image": "/etc/hostname", "instruction": "Paint it."}, "is outside of"),
        ({"image": "link.png", "instruction": "Paint it."}, "is outside of"),
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
        assert all(getattr(edit.after, name) == getattr(edit.before, name) for name in {*VALUES} - {edit.attribute})


@pytest.mark.slow
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


def test_grades_count_attributes(tmp_path: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Edit(PANEL, "hat", "cap")
    prompts = load_prompts(write_edits(tmp_path, [edit], name="one"))
    half = Panel("blue", "round", "cap", "night", "waving", "tree")

    # A world of two dozen panels: templates of all take seconds.
    few = (half, edit.before, edit.after, *characters.all_panels()[::230])
    monkeypatch.setattr(characters, "all_panels", lambda: few)
    monkeypatch.setattr(characters, "_templates", characters._templates.__wrapped__)

    grades = grade_edits(prompts, [draw(half, 64)], oracle=oracle)
    assert grades == {"kept": pytest.approx(3 / 5), "followed": 1.0, "edited_well": 0.0, "valid": 1.0}


@pytest.mark.slow
def test_a_prompt_without_truth_is_not_graded(tmp_path: Path, oracle: Oracle) -> None:
    draw(PANEL, 64).save(tmp_path / "a.png")
    prompt = Prompt(3, "Give the hero a cap.", sources=(tmp_path / "a.png",))
    with pytest.raises(ValueError, match=r"prompt 3 .* does not describe the edited image"):
        grade_edits([prompt], [draw(PANEL, 64)], oracle=oracle)


def test_saved_edits_are_read_back(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(image_bytes("red"))
    edits = [
        Prompt(0, "Make it blue.", sources=(tmp_path / "a.png",)),
        Prompt(1, "Add.", sources=(tmp_path / "b.png",)),
    ]
    save_edits(edits, tmp_path / "out" / "train.jsonl")
    again = load_prompts(tmp_path / "out" / "train.jsonl")
    assert [prompt.text for prompt in again] == ["Make it blue.", "Add."]
    assert again[0].sources == again[1].sources, "equal images are copied once"
    assert again[0].sources[0].read_bytes() == image_bytes("red")


# --- published collections -------------------------------------------------------------------------------------


def image_bytes(colour: str, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (12, 10), colour).save(buffer, kind)
    return buffer.getvalue()


def rows() -> list[dict[str, Any]]:
    """Two edits in two languages each, as the hub's parquet holds them; the second column of images is not read."""
    made = []
    for number, (colour, task) in enumerate([("red", "color_alter"), ("blue", "subject-add")]):
        for language, text in (("en", f"Make it {colour}."), ("cn", f"把它变成{colour}")):
            image = {"bytes": image_bytes(colour, "PNG" if number else "JPEG"), "path": f"{number}.png"}
            made.append(
                {
                    "key": f"k{number}",
                    "task_type": task,
                    "instruction": text,
                    "instruction_language": language,
                    "input_image": image,
                    "input_image_raw": image,
                    "Intersection_exist": bool(number),
                }
            )
    return made


def table(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def test_gedit_as_published(tmp_path: Path) -> None:
    prompts = load_prompts(table(tmp_path / "gedit.parquet", rows()))
    assert [(p.id, p.text, p.category, p.task) for p in prompts] == [
        (0, "Make it red.", "color_alter", "en"),
        (1, "把它变成red", "color_alter", "cn"),
        (2, "Make it blue.", "subject-add", "en"),
        (3, "把它变成blue", "subject-add", "cn"),
    ]
    assert prompts[0].sources == prompts[1].sources
    assert prompts[0].sources[0].suffix == ".jpg"
    assert open_image(prompts[2].sources[0]).getpixel((0, 0)) == (0, 0, 255)
    assert str(prompts[0].grid) == "1x1"


def test_one_language_and_shards(tmp_path: Path) -> None:
    table(tmp_path / "data" / "a.parquet", rows()[:3])
    table(tmp_path / "data" / "b.parquet", rows()[3:])
    assert [p.text for p in prompts_from(f"{tmp_path / 'data'}:en")] == ["Make it red.", "Make it blue."]
    assert [p.id for p in prompts_from(str(tmp_path / "data"))] == [0, 1, 2, 3]


def test_the_released_preprocessing_s_columns(tmp_path: Path) -> None:
    records = [
        {"prompt": row["instruction"], "image": row["input_image"], "instruction_language": "en"} for row in rows()
    ]
    assert load_gedit(table(tmp_path / "train.parquet", records))[2].text == "Make it blue."


def test_images_are_written_once(tmp_path: Path) -> None:
    path = table(tmp_path / "gedit.parquet", rows())
    first = {p.sources[0]: p.sources[0].stat().st_mtime_ns for p in load_prompts(path)}
    assert {p.sources[0]: p.sources[0].stat().st_mtime_ns for p in load_prompts(path)} == first
    assert len(list((tmp_path / "gedit_images").iterdir())) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction": "  "}, r"gedit\.parquet, row 2: the instruction is missing"),
        ({"input_image": {"bytes": None, "path": "x"}}, "row 2: the image has no bytes"),
        ({"input_image": {"bytes": b"junk", "path": "x"}}, "row 2, its image: not an image"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    records = rows()
    records[1] |= change
    with pytest.raises(ValueError, match=message):
        load_prompts(table(tmp_path / "gedit.parquet", records))


def test_a_file_that_is_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"torn\.parquet: cannot be read as parquet"):
        load_prompts(tmp_path / "torn.parquet")
    with pytest.raises(ValueError, match="has no column input_image or image; it has instruction"):
        load_prompts(table(tmp_path / "other.parquet", [{"instruction": "a"}]))
    with pytest.raises(ValueError, match="holds no edits in cn"):
        prompts_from(f"{table(tmp_path / 'en.parquet', rows()[:1])}:cn")


def collection(folder: Path, records: Any, name: str = "text_and_image_to_image.json") -> Path:
    for path in ("in/1.png", "in/2.png", "out/1.png"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(image_bytes("red"))
    (folder / name).write_text(json.dumps(records), encoding="utf-8")
    return folder / name


def test_sharegpt_4o_as_published(tmp_path: Path) -> None:
    records = [
        {"input_prompt": "Add a hat.", "input_image": ["in/1.png"], "output_image": "out/1.png"},
        {"input_prompt": "Join them.", "input_image": ["in/1.png", "in/2.png"], "output_image": "out/1.png"},
    ]
    prompts = load_prompts(collection(tmp_path, records))
    assert [(p.id, p.text, [s.name for s in p.sources]) for p in prompts] == [
        (0, "Add a hat.", ["1.png"]),
        (1, "Join them.", ["1.png", "2.png"]),
    ]
    plain = collection(tmp_path, [{"input_prompt": "A hat.", "output_image": "out/1.png"}], "text_to_image.json")
    assert load_prompts(plain)[0].sources == ()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input_image": ["in/1.png"]}, "record 1: 'input_prompt' is missing"),
        ({"input_prompt": "a", "input_image": ["in/9.png"]}, "record 1: .*9.png is missing; unpack"),
        ({"input_prompt": "a", "input_image": ["../../x.png"]}, "record 1: .*leads out of"),
        ({"input_prompt": "a", "input_image": 3}, "record 1: 'input_image' must be a path or a list of paths, got 3"),
        ("a", "record 1: 'input_prompt' is missing"),
    ],
)
def test_a_bad_record_of_a_collection_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(collection(tmp_path, [record]))


def test_json_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a JSON list of records"):
        load_prompts(collection(tmp_path, {}))
    (tmp_path / "torn.json").write_text("[{")
    with pytest.raises(ValueError, match=r"torn\.json:1: not valid JSON"):
        load_prompts(tmp_path / "torn.json")


def test_an_edits_image_is_never_copied_through_a_link(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "key").write_text("secret")
    name = f"{digest(tmp_path / 'a.png')[:32]}.png"
    (tmp_path / "out" / "train_images").mkdir(parents=True)
    (tmp_path / "out" / "train_images" / name).symlink_to(tmp_path / "key")
    save_edits([Prompt(id=0, text="Give it a hat.", sources=(tmp_path / "a.png",))], tmp_path / "out" / "train.jsonl")
    assert (tmp_path / "key").read_text() == "secret"
    assert (tmp_path / "out" / "train_images" / name).read_bytes() == (tmp_path / "a.png").read_bytes()
