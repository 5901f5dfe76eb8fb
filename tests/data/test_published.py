"""GEdit-Bench and ShareGPT-4o-Image in the form they are published in."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pacorl.data.published import load_gedit
from pacorl.data.records import load_prompts, prompts_from
from pacorl.io.images import open_image


def picture(colour: str, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (12, 10), colour).save(buffer, kind)
    return buffer.getvalue()


def rows() -> list[dict[str, Any]]:
    """Two edits in two languages each, as the hub's parquet holds them; the second column of pictures is not read."""
    made = []
    for number, (colour, task) in enumerate([("red", "color_alter"), ("blue", "subject-add")]):
        for language, text in (("en", f"Make it {colour}."), ("cn", f"把它变成{colour}")):
            image = {"bytes": picture(colour, "PNG" if number else "JPEG"), "path": f"{number}.png"}
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


def test_pictures_are_written_once(tmp_path: Path) -> None:
    path = table(tmp_path / "gedit.parquet", rows())
    first = {p.sources[0]: p.sources[0].stat().st_mtime_ns for p in load_prompts(path)}
    assert {p.sources[0]: p.sources[0].stat().st_mtime_ns for p in load_prompts(path)} == first
    assert len(list((tmp_path / "gedit_pictures").iterdir())) == 2


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
        (folder / path).write_bytes(picture("red"))
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
def test_a_bad_record_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(collection(tmp_path, [record]))


def test_json_of_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a JSON list of records"):
        load_prompts(collection(tmp_path, {}))
    (tmp_path / "torn.json").write_text("[{")
    with pytest.raises(ValueError, match=r"torn\.json:1: not valid JSON"):
        load_prompts(tmp_path / "torn.json")
