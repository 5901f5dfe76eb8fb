"""Prompts come from files as they are written there, and every fault is named by file and line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pacorl.core.grid import panel_texts
from pacorl.records.prompts import load_prompts, prompts_from, save_prompts
from pacorl.types import Character, Grid, Prompt, Size

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
SET = "A 1x2 grid layout of a fox. All images feature one fox. [LEFT]:The fox naps. [RIGHT]:The fox runs."


def file_of(folder: Path, *records: dict[str, Any] | str, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_whole_record(tmp_path: Path) -> None:
    record = {
        "idx": "0007",
        "prompt": SET,
        "height": 512,
        "width": 1024,
        "layout": "1x2",
        "theme": "Generate two images of a fox.",
        "category": "Character Generation",
        "task_name": "Multi-pose",
        "criteria": {"Identity": {"Fur": "One fur."}, "Style": {"Ink": "One ink."}},
        "from": "T2IS",
        "editing_prompts": ["A fox naps.", "Make it run."],
    }
    assert load_prompts(file_of(tmp_path, record)) == [
        Prompt(
            id=0,
            text=SET,
            theme="Generate two images of a fox.",
            grid=Grid(1, 2),
            panels=("The fox naps.", "The fox runs."),
            criteria={"Identity": {"Fur": "One fur."}, "Style": {"Ink": "One ink."}},
            size=Size(512, 1024),
            category="Character Generation",
            task="Multi-pose",
        )
    ]


@pytest.mark.parametrize(
    ("record", "grid", "panels"),
    [
        ({"prompt": SET}, Grid(1, 2), 2),
        ({"prompt": SET.replace("1x2", "2x1"), "layout": "1x2"}, Grid(1, 2), 2),
        ({"prompt": "Four cats.", "layout": "2x2"}, Grid(2, 2), 0),
        ({"prompt": "A 2×3 sheet of cats."}, Grid(2, 3), 0),
        ({"prompt": "A cat."}, Grid(1, 1), 0),
        ({"prompt": "Two cats.", "layout": "1x2", "panels": ["A cat.", "A cat."]}, Grid(1, 2), 2),
    ],
)
def test_where_the_layout_comes_from(tmp_path: Path, record: dict[str, Any], grid: Grid, panels: int) -> None:
    prompt = load_prompts(file_of(tmp_path, record))[0]
    assert (prompt.grid, len(prompt.panels)) == (grid, panels)


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    prompts = load_prompts(file_of(tmp_path, "A cat, 3 x 4 cm.", "", SET, name="prompts.txt"))
    assert [(prompt.text, prompt.grid) for prompt in prompts] == [("A cat, 3 x 4 cm.", Grid(1, 1)), (SET, Grid(1, 2))]
    assert prompts[1].panels == ("The fox naps.", "The fox runs.")


def test_marks_of_a_list_and_quotation_marks_around_a_line_are_no_words_of_it(tmp_path: Path) -> None:
    lines = ["1. Two images of one fox: it runs, it sleeps", "- a fox", '"a red owl"', '"Yes" and "No", carved in wood']
    fox, *others = load_prompts(file_of(tmp_path, *lines, name="mine.txt"))
    assert fox.panels == ("one fox, it runs", "one fox, it sleeps")
    assert [prompt.text for prompt in others] == ["a fox", "a red owl", '"Yes" and "No", carved in wood']


def test_sentences_and_themes_with_panels_are_sets(tmp_path: Path) -> None:
    scenes = ["it runs", "it sleeps", "it eats", "it hides"]
    sentence = f"Four pictures of one fox: {', '.join(scenes)}"
    (written,) = load_prompts(file_of(tmp_path, sentence, name="mine.txt"))
    (given,) = load_prompts(file_of(tmp_path, {"theme": "one fox", "panels": [f"one fox, {text}" for text in scenes]}))
    for prompt in (written, given):
        assert (prompt.theme, prompt.grid) == ("one fox", Grid(2, 2))
        assert panel_texts(prompt.text) == tuple(f"one fox, {text}." for text in scenes)
    assert written.origin == f"{tmp_path / 'mine.txt'}:1"

    row = {"theme": "a red hero with a crown in town", "panels": ["waving, flag", "jumping, boat"] * 2, "layout": "2x2"}
    (tiny,) = load_prompts(file_of(tmp_path, row), model="tiny")
    assert tiny.text.startswith("2x2 grid layout of a red hero with a crown in town.")


@pytest.mark.parametrize("line", ["a fox --w 768 --s 28", "# my prompts", "// foxes", "a fox --n blurry"])
def test_syntax_of_other_tools_is_refused_by_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match=r"mine\.txt:2: '(--[wn]|#|//)"):
        load_prompts(file_of(tmp_path, "a fox -- a small one, 3-4 cm", line, name="mine.txt"))


def test_a_fault_is_named_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts\.jsonl:3: .*'prompt'"):
        load_prompts(file_of(tmp_path, {"prompt": "a fox"}, "", {"prompt": " "}))


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    prompts = load_prompts(EXAMPLES)
    save_prompts(prompts, tmp_path / "new" / "copy.jsonl")
    assert load_prompts(tmp_path / "new" / "copy.jsonl") == prompts
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["copy.jsonl"]


def saved_references(folder: Path) -> list[Prompt]:
    """Two records whose references have one name, in folders of their own; their images belong to one character."""
    prompts = []
    for number, colour in enumerate(("red", "blue")):
        image = folder / colour / "front.png"
        image.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), colour).save(image)
        characters = (Character("hero", f"a {colour} hero", (image,)), Character(colour, ""))
        prompts.append(Prompt(number, f"a {colour} hero", characters=characters, references=(image,)))
    return prompts


def test_characters_and_references_are_saved_and_read_back(tmp_path: Path) -> None:
    prompts = saved_references(tmp_path / "characters")
    path = tmp_path / "elsewhere" / "prompts.jsonl"
    save_prompts(prompts, path)
    loaded = load_prompts(path)
    for prompt, original in zip(loaded, prompts, strict=True):
        (reference,) = prompt.references
        hero, other = original.characters
        assert prompt.characters == (replace(hero, images=(reference,)), other)
        assert reference.parent == path.parent / "prompts_images"
        assert reference.read_bytes() == original.references[0].read_bytes()
    save_prompts(loaded, path)
    assert load_prompts(path) == loaded


def test_references_belong_to_their_characters(tmp_path: Path) -> None:
    """The generator is given one of each in turn, or others, or none."""
    for name in ("ann1", "ann2", "bob"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    cast = {"ann": {"description": "a cook", "images": ["ann1.png", "ann2.png"]}, "bob": {"images": ["bob.png"]}}
    fields: list[dict[str, object]] = [
        {"characters": cast},
        {"characters": cast, "references": []},
        {"references": ["ann1.png"]},
    ]
    records = [json.dumps({"prompt": "a hero"} | field) for field in fields]
    (tmp_path / "prompts.jsonl").write_text("\n".join(records))

    prompts = load_prompts(tmp_path / "prompts.jsonl")
    references = [[path.stem for path in prompt.references] for prompt in prompts]
    assert references == [["ann1", "bob", "ann2"], [], ["ann1"]]
    owned = [{character.name: len(character.images) for character in prompt.characters} for prompt in prompts]
    assert owned == [{"ann": 2, "bob": 1}, {"ann": 2, "bob": 1}, {}]
    assert prompts[0].characters[0].description == "a cook"

    save_prompts(prompts, tmp_path / "copy" / "prompts.jsonl")
    saved = load_prompts(tmp_path / "copy" / "prompts.jsonl")
    assert [len(prompt.references) for prompt in saved] == [3, 0, 1]
    assert owned == [{character.name: len(character.images) for character in prompt.characters} for prompt in saved]


def test_panels_that_the_text_does_not_spell_out_are_saved_too(tmp_path: Path) -> None:
    prompts = prompts_from("tiny:dev:3")
    prompts = [replace(prompts[0], panels=prompts[0].panels[::-1]), *prompts[1:]]
    save_prompts(prompts, tmp_path / "tiny.jsonl")
    assert load_prompts(tmp_path / "tiny.jsonl") == prompts


def test_tiny_sources() -> None:
    assert load_prompts("tiny:dev:3") == prompts_from("tiny:dev:3")
    assert [len(prompts_from(f"tiny:{split}")) for split in ("train", "dev", "test")] == [288, 48, 48]
    assert len(prompts_from("tiny:test:5")) == 5
    assert prompts_from("tiny:dev:12") == prompts_from("tiny:dev")[:12]


@pytest.mark.parametrize("source", ["tiny:", "tiny:eval", "tiny:dev:3:4", "tiny:dev:0", "tiny:dev:-1", "tiny:dev:x"])
def test_no_part_of_the_tiny_world(source: str) -> None:
    with pytest.raises(ValueError, match=f"'{source}'"):
        prompts_from(source)


def test_a_limit_spreads_evenly() -> None:
    assert [prompt.id for prompt in prompts_from("tiny:dev:10", limit=4)] == [0, 2, 5, 7]
    assert [prompt.id for prompt in prompts_from("tiny:dev:3", limit=8)] == [0, 1, 2]
    with pytest.raises(ValueError, match="a limit of 0 leaves nothing of tiny:dev"):
        prompts_from("tiny:dev", limit=0)
