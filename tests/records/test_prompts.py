"""Prompts come from files as they are written there, with their images, and are written as they are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pacorl.core.grid import panel_texts, shared_text
from pacorl.io.files import digest
from pacorl.records import images
from pacorl.records.compose import compose, in_tiny_words
from pacorl.records.prompts import load_prompts, save_prompts
from pacorl.types import Character, Grid, Prompt, Size

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
SET = "A 1x2 grid layout of a fox. All images feature one fox. [LEFT]:The fox naps. [RIGHT]:The fox runs."


def file_of(folder: Path, *records: dict[str, Any] | str, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def image_at(path: Path, colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path, "PNG")
    return path


def test_a_whole_record(tmp_path: Path) -> None:
    criteria = {"Identity": {"Fur": "One fur."}, "Style": {"Ink": "One ink."}}
    record = {"idx": "0007", "prompt": SET, "height": 512, "width": 1024, "layout": "1x2", "theme": "Two images."}
    record |= {"category": "Character Generation", "task_name": "Multi-pose", "criteria": criteria, "from": "T2IS"}
    (prompt,) = load_prompts(file_of(tmp_path, record))
    assert prompt == Prompt(
        0,
        SET,
        "Two images.",
        Grid(1, 2),
        ("The fox naps.", "The fox runs."),
        criteria,
        size=Size(512, 1024),
        category="Character Generation",
    )


@pytest.mark.parametrize(
    ("record", "grid", "panels"),
    [
        ({"prompt": SET.replace("1x2", "2x1"), "layout": "1x2"}, Grid(1, 2), 2),
        ({"prompt": "Four cats.", "layout": "2x2"}, Grid(2, 2), 0),
        ({"prompt": "A 2×3 sheet of cats."}, Grid(2, 3), 0),
        ({"prompt": "A cat."}, Grid(1, 1), 0),
        ({"prompt": "Two cats.", "layout": "1x2", "panels": ["A cat.", "A cat."]}, Grid(1, 2), 2),
    ],
)
def test_where_the_layout_comes_from(tmp_path: Path, record: dict[str, Any], grid: Grid, panels: int) -> None:
    (prompt,) = load_prompts(file_of(tmp_path, record))
    assert (prompt.grid, len(prompt.panels)) == (grid, panels)


def test_plain_text_is_one_prompt_a_line_without_marks_of_a_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["A cat, 3 x 4 cm.", "", SET, "1. Two images of one fox: it runs, it sleeps", "- a fox", '"Yes" in wood']
    lines += ["1) It naps 2) it runs", "Two images of a fox", '"Two images of an owl: asleep, awake"']
    prompts = load_prompts(file_of(tmp_path, *lines, name="mine.txt"))
    assert [prompt.text for prompt in prompts[:2]] == ["A cat, 3 x 4 cm.", SET]
    assert [prompt.grid for prompt in prompts[:2]] == [Grid(1, 1), Grid(1, 2)]
    assert prompts[2].panels == ("one fox, it runs", "one fox, it sleeps")
    assert [prompt.text for prompt in prompts[3:5]] == ["a fox", '"Yes" in wood']
    assert prompts[5].panels == ("It naps", "it runs")
    assert "'Two images of a fox': The text does not list" in caplog.text
    assert prompts[7].panels == ("an owl, asleep", "an owl, awake")
    assert prompts[2].origin == f"{tmp_path / 'mine.txt'}:4"


def test_a_set_for_another_generator_is_composed_anew_for_the_tiny_one(tmp_path: Path) -> None:
    scenes = "waving by a tree, jumping by a boat, standing by a lamp, waving by a flag"
    path = file_of(tmp_path, f"Four pictures of a round hero in town: {scenes}", name="heroes.txt")
    (other,), (tiny,) = load_prompts(path), load_prompts(path, model="tiny")
    assert (other.text != tiny.text, in_tiny_words(other).text, in_tiny_words(tiny)) == (True, tiny.text, tiny)


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(1, 3), Grid(1, 12)])
def test_a_composed_prompt_reads_back(grid: Grid) -> None:
    panels = [f"Dr. Ada, 3.5 m tall, shows slide {number}!" for number in range(grid.count)]
    prompt = compose("a lecture. All in ink", panels, grid)
    assert panel_texts(prompt.text) == tuple(f"{text}." for text in panels)
    assert f"{grid} grid layout" in shared_text(prompt.text)


@pytest.mark.parametrize(
    "line", ["a fox --w 768 --s 28", "# my prompts", "// foxes", "a fox --n blurry", "Two images:"]
)
def test_syntax_of_other_tools_and_a_list_on_further_lines_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match=r"mine\.txt:2: '(--[wn]|#|//|Two)"):
        load_prompts(file_of(tmp_path, "a fox -- a small one, 3-4 cm", line, name="mine.txt"))


# --- images of a record ------------------------------------------------------------------------------------------


def test_an_image_is_never_copied_through_a_link_and_opened_again_once_it_changed(tmp_path: Path) -> None:
    fox, secret = image_at(tmp_path / "fox.png"), tmp_path / "key"
    secret.write_text("secret")
    link = tmp_path / "sets_images" / f"{digest(fox)[:32]}.png"
    link.parent.mkdir()
    link.symlink_to(secret)
    images.copied_images(images.images_beside(["fox.png"], tmp_path), tmp_path / "sets.jsonl")
    assert (secret.read_text(), link.read_bytes()) == ("secret", fox.read_bytes())
    fox.write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"fox\.png"):
        images.images_beside(["fox.png"], tmp_path)


def test_a_snapshot_of_the_hub_links_into_its_own_blobs_alone(tmp_path: Path) -> None:
    link = tmp_path / "snapshots" / "c0ffee" / "a.png"
    link.parent.mkdir(parents=True)
    for blob in ("blobs/0a", "0a"):
        image_at(tmp_path / blob)
    link.symlink_to("../../blobs/0a")
    path = file_of(link.parent, {"image": "a.png", "instruction": "Paint it."})
    assert load_prompts(path)[0].sources == (link,)
    link.unlink()
    link.symlink_to("../../0a")
    with pytest.raises(ValueError, match=r"'a\.png'"):
        load_prompts(path)


def test_references_belong_to_their_characters(tmp_path: Path) -> None:
    """The generator is given one of each in turn, or others, or none."""
    for name in ("ann1", "ann2", "bob"):
        image_at(tmp_path / f"{name}.png")
    cast = {"ann": {"description": "a cook", "images": ["ann1.png", "ann2.png"]}, "bob": {"images": ["bob.png"]}}
    fields = [{"characters": cast}, {"characters": cast, "references": []}, {"references": ["ann1.png"]}]
    prompts = load_prompts(file_of(tmp_path, *({"prompt": "a hero"} | each for each in fields)))
    references = [[path.stem for path in prompt.references] for prompt in prompts]
    assert references == [["ann1", "bob", "ann2"], [], ["ann1"]]
    owned = [{character.name: len(character.images) for character in prompt.characters} for prompt in prompts]
    assert owned == [{"ann": 2, "bob": 1}, {"ann": 2, "bob": 1}, {}]
    assert prompts[0].characters[0].description == "a cook"


# --- writing -----------------------------------------------------------------------------------------------------


def saved_again(prompts: list[Prompt], path: Path) -> list[Prompt]:
    save_prompts(prompts, path)
    return load_prompts(path)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    prompts = load_prompts(EXAMPLES)
    assert saved_again(prompts, tmp_path / "new" / "copy.jsonl") == prompts
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["copy.jsonl"]
    # Panels that the text does not spell out, too.
    first, *others = load_prompts("tiny:dev:3")
    prompts = [replace(first, panels=first.panels[::-1]), *others]
    assert saved_again(prompts, tmp_path / "tiny.jsonl") == prompts


def test_images_are_saved_once_by_their_content(tmp_path: Path) -> None:
    """Edits of equal images, and references of one name that belong to a character."""
    red, copy = image_at(tmp_path / "a.png"), image_at(tmp_path / "b.png")
    edits = [Prompt(0, "Make it blue.", sources=(red,)), Prompt(1, "Add.", sources=(copy,))]
    again = saved_again(edits, tmp_path / "out" / "train.jsonl")
    assert [prompt.text for prompt in again] == ["Make it blue.", "Add."]
    assert again[0].sources == again[1].sources != edits[0].sources

    sets = []
    for number, colour in enumerate(("red", "blue")):
        image = image_at(tmp_path / colour / "front.png", colour)
        cast = (Character("hero", f"a {colour} hero", (image,)), Character(colour, ""))
        sets.append(Prompt(number, f"a {colour} hero", characters=cast, references=(image,)))
    path = tmp_path / "elsewhere" / "prompts.jsonl"
    for prompt, original in zip(saved_again(sets, path), sets, strict=True):
        (reference,) = prompt.references
        hero, other = original.characters
        assert prompt.characters == (replace(hero, images=(reference,)), other)
        assert reference.parent == path.parent / "prompts_images"
        assert reference.read_bytes() == original.references[0].read_bytes()
    assert saved_again(load_prompts(path), path)[1].references[0].is_file()


# --- sources -----------------------------------------------------------------------------------------------------


def test_tiny_sources_and_a_limit_that_spreads_evenly() -> None:
    assert [len(load_prompts(f"tiny:{split}")) for split in ("train", "dev", "test")] == [288, 48, 48]
    assert load_prompts("tiny:dev:12") == load_prompts("tiny:dev")[:12]
    assert [prompt.id for prompt in load_prompts("tiny:dev:10", limit=4)] == [0, 2, 5, 7]
    assert [prompt.id for prompt in load_prompts("tiny:dev:3", limit=8)] == [0, 1, 2]
    for source in ("tiny:", "tiny:eval", "tiny:dev:3:4", "tiny:dev:0", "tiny:dev:x"):
        with pytest.raises(ValueError, match=f"'{source}'"):
            load_prompts(source)
