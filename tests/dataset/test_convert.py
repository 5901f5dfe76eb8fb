"""Published collections of edits become JSONL of edits, which prompts are read from."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pacorl.dataset.convert import convert
from pacorl.io.images import open_image
from pacorl.records.prompts import load_prompts


def image_bytes(colour: str, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (12, 10), colour).save(buffer, kind)
    return buffer.getvalue()


def rows() -> list[dict[str, Any]]:
    """Two edits in two languages each, as the hub's parquet holds them; the second column of images is not read."""
    made = []
    for number, (colour, task) in enumerate([("red", "color_alter"), ("blue", "subject-add")]):
        image = {"bytes": image_bytes(colour, "PNG" if number else "JPEG"), "path": f"{number}.png"}
        for language, text in (("en", f"Make it {colour}."), ("cn", f"把它变成{colour}")):
            row = {"key": f"k{number}", "task_type": task, "instruction": text, "instruction_language": language}
            made.append(row | {"input_image": image, "input_image_raw": image, "Intersection_exist": bool(number)})
    return made


def table(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def test_gedit_of_two_shards_becomes_edits_of_each_language(tmp_path: Path) -> None:
    table(tmp_path / "data" / "a.parquet", rows()[:3])
    table(tmp_path / "data" / "b.parquet", rows()[3:])
    assert [path.name for path in convert(tmp_path)] == ["edits.jsonl", "en.jsonl", "cn.jsonl"]
    prompts = load_prompts(tmp_path / "edits.jsonl")
    assert [(p.id, p.text, p.category) for p in prompts] == [
        (0, "Make it red.", "color_alter"),
        (1, "把它变成red", "color_alter"),
        (2, "Make it blue.", "subject-add"),
        (3, "把它变成blue", "subject-add"),
    ]
    assert prompts[0].sources == prompts[1].sources
    assert prompts[0].sources[0].suffix == ".jpg"
    assert open_image(prompts[2].sources[0]).getpixel((0, 0)) == (0, 0, 255)
    assert [p.text for p in load_prompts(tmp_path / "cn.jsonl")] == ["把它变成red", "把它变成blue"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "images").iterdir()}
    convert(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "images").iterdir()} == before


@pytest.mark.parametrize("content", [None, b"junk"])
def test_a_bad_row_is_named(tmp_path: Path, content: bytes | None) -> None:
    records = rows()
    records[1] |= {"input_image": {"bytes": content, "path": "x"}}
    with pytest.raises(ValueError, match=r"gedit\.parquet, row 2: "):
        convert(table(tmp_path / "gedit.parquet", records))


def test_sharegpt_4o_becomes_edits_and_prompts(tmp_path: Path) -> None:
    records = [
        {"input_prompt": "Add a hat.", "input_image": "in/1.png", "output_image": "out/1.png"},
        {"input_prompt": "Join them.", "input_image": ["in/1.png", "in/2.png"], "output_image": "out/1.png"},
        {"input_prompt": "A hat.", "output_image": "out/1.png"},
    ]
    (tmp_path / "in").mkdir()
    for name in ("1.png", "2.png"):
        (tmp_path / "in" / name).write_bytes(image_bytes("red"))
    (tmp_path / "edits.json").write_text(json.dumps(records), encoding="utf-8")
    (path,) = convert(tmp_path / "edits.json")
    assert [(p.id, p.text, [s.name for s in p.sources]) for p in load_prompts(path)] == [
        (0, "Add a hat.", ["1.png"]),
        (1, "Join them.", ["1.png", "2.png"]),
        (2, "A hat.", []),
    ]


def test_another_table_keeps_its_columns_and_its_images_become_paths(tmp_path: Path) -> None:
    shown = [{"bytes": image_bytes(colour), "path": "x.png"} for colour in ("red", "blue")]
    (path,) = convert(table(tmp_path / "t.parquet", [{"key": ["a", "b"], "source": shown[0], "edits": shown}]))
    row = json.loads(path.read_text())
    assert (path.name, row["key"], row["edits"][0]) == ("rows.jsonl", ["a", "b"], row["source"])
    assert open_image(tmp_path / row["edits"][1]).getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize("content", [None, b"PAR1 and no more"])
def test_what_is_no_table_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content:
        (tmp_path / "cut.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}{'/cut.parquet' if content else ' '}"):
        convert(tmp_path)
