"""Comparisons are read as they are, and what is wrong with them is named by file and record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pacorl.records.comparisons import answer_text, comparisons_from, save_comparisons, save_info
from pacorl.tiny.comparisons import draw_comparisons
from pacorl.tiny.oracle import read_panels

INFO = {"cot_train": {"file_name": "train.json", "formatting": "sharegpt", "columns": {"messages": "messages"}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "ab":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    return tmp_path


def sharegpt(question: str = "<image><image>Same?", answer: str = "Yes, both are red.", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": ["a.png", "b.png"]} | more


def write(folder: Path, *records: Any) -> None:
    (folder / "train.json").write_text(json.dumps(records))


def test_sharegpt_is_taken_word_for_word(folder: Path) -> None:
    turns = [{"from": "human", "value": "<image><image>Red?"}, {"from": "gpt", "value": "No."}]
    llama_factory = {"conversations": turns, "images": ["a.png", "b.png"]}
    write(folder, sharegpt(), sharegpt("\n<image> then <image>: same?", "No", category="Story"), llama_factory)
    first, second, third = comparisons_from(f"{folder}:cot_train")
    assert (third.question, third.consistent, len(third.images)) == ("Red?", False, 2)
    assert (first.question, first.answer, first.consistent) == ("Same?", "Yes, both are red.", True)
    assert (first.reasons, first.category) == ("both are red.", "")
    assert first.images == (folder / "a.png", folder / "b.png")
    assert (second.question, second.answer, second.consistent) == ("\n<image> then <image>: same?", "No", False)
    assert (second.category, answer_text(second)) == ("Story", "No")


def test_a_missing_image_is_named_with_its_record(folder: Path) -> None:
    write(folder, sharegpt(), sharegpt(images=["a.png", "gone.png"]))
    with pytest.raises(ValueError, match=r"train\.json, record 2: .*gone\.png.*unpack"):
        comparisons_from(f"{folder}:cot_train")


def test_what_is_saved_is_read_back_with_each_tag_once(folder: Path) -> None:
    """LLaMA-Factory refuses a record with more tags than images."""
    write(folder, sharegpt(group="g"), sharegpt("First <image>, then <image>: same?", "No. The hat.", category="Story"))
    read = comparisons_from(f"{folder}:cot_train")
    save_comparisons(read, folder / "lines.jsonl")
    save_info([folder / "lines.jsonl"], folder)
    assert comparisons_from(str(folder / "lines.jsonl")) == comparisons_from(f"{folder}:lines") == read
    # Fields become a conversation.
    fields = {"images": ["a.png", "b.png"], "question": "Same?", "consistent": False, "reasons": "The hat."}
    (folder / "mine.jsonl").write_text(json.dumps(fields))
    (mine,) = comparisons_from(str(folder / "mine.jsonl"))
    save_comparisons([mine], folder / "saved.jsonl")
    (saved,) = comparisons_from(str(folder / "saved.jsonl"))
    assert (answer_text(mine), replace(saved, answer="")) == ("No. The hat.", mine)


@pytest.mark.slow
def test_the_tiny_worlds_labels_are_true(tmp_path: Path) -> None:
    drawn = comparisons_from("tiny:dev:24", scratch=tmp_path)
    assert drawn == comparisons_from("tiny:dev:24", scratch=tmp_path)
    assert drawn != draw_comparisons(tmp_path, split="dev", count=24, seed=1)
    for one in drawn:
        first, second = read_panels([Image.open(path) for path in one.images])
        assert first is not None
        assert second is not None
        same = (first.colour, first.shape, first.hat) == (second.colour, second.shape, second.hat)
        assert same == one.consistent
        assert one.consistent or getattr(first, one.category) != getattr(second, one.category)
    assert sum(one.consistent for one in drawn) == 12
