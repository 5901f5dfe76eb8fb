"""Prompts that are trained on and measured on are found; splits keep them apart."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from pacorl.io.documents import write_jsonl
from pacorl.records.leaks import check_leaks, find_leaks, split_prompts, trained_on
from pacorl.types import Prompt


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(id=number, text=text) for number, text in enumerate(texts)]


def edits(folder: Path, *pairs: tuple[str, str]) -> list[Prompt]:
    """(colour of the image, instruction) each; equal colours are equal files under two names."""
    folder.mkdir(exist_ok=True)
    made = []
    for number, (colour, text) in enumerate(pairs):
        path = folder / f"{number}.png"
        Image.new("RGB", (8, 8), colour).save(path)
        made.append(Prompt(id=number, text=text, sources=(path,)))
    return made


def test_case_spaces_and_punctuation_do_not_hide_a_prompt() -> None:
    train = prompts("A red fox.", "a blue boat", "A  RED fox!", "café")
    leaks = find_leaks(train, prompts("a red fox", "cafe\u0301"))
    assert [(prompt.id, other.id) for prompt, other in leaks] == [(0, 0), (2, 0), (3, 1)]


def test_sets_of_one_text_differ_by_their_references(tmp_path: Path) -> None:
    for name in ("ann", "bob", "copy"):
        (tmp_path / name).write_text(name if name != "copy" else "ann")
    ann, bob, copy = (Prompt(0, "A hero waves.", references=(tmp_path / name,)) for name in ("ann", "bob", "copy"))
    assert find_leaks([ann], [bob, Prompt(1, "A hero waves.")]) == []
    assert len(find_leaks([ann], [copy])) == 1
    (tmp_path / "bob").write_text("ann")
    os.utime(tmp_path / "bob", ns=(1, 1))
    assert len(find_leaks([ann], [bob])) == 1


def test_a_split_keeps_families_and_benchmarks_apart(tmp_path: Path) -> None:
    colours = ["red", "red", "green", "blue", "white", "black", "blue", "pink"]
    made = edits(tmp_path, *((colour, f"{number}") for number, colour in enumerate(colours)))
    train, test = split_prompts(made, test=3, keep_out=edits(tmp_path / "bench", ("pink", "x")))
    assert sorted(p.id for p in [*train, *test]) == list(range(7))
    assert len(test) >= 3
    assert {colours[p.id] for p in train}.isdisjoint(colours[p.id] for p in test)
    assert split_prompts(made, test=3) == split_prompts(made, test=3)
    several = [replace(prompt, id=7) for prompt in made]  # files number their prompts alike
    assert len([*chain(*split_prompts(several, test=3, keep_out=made[7:]))]) == 7


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sources=st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=3), min_size=6, max_size=16))
def test_no_image_is_on_both_sides_of_a_split(tmp_path: Path, sources: list[set[int]]) -> None:
    """Edits of several images join the families of all of them, and so do edits that share one of their images."""
    for number in range(12):
        (tmp_path / f"{number}").write_text(str(number))
    edits = []
    for position, images in enumerate(sources):
        edits.append(Prompt(position, f"Edit {position}.", sources=tuple(tmp_path / str(name) for name in images)))
    try:
        train, test = split_prompts(edits, test=2)
    except ValueError:  # all edits hang together
        return
    assert sorted(prompt.id for prompt in (*train, *test)) == list(range(len(edits)))
    sides = [{path for prompt in side for path in prompt.sources} for side in (train, test)]
    assert sides[0].isdisjoint(sides[1])


def test_an_item_that_was_trained_on_is_found_in_another_spelling(tmp_path: Path) -> None:
    rows = [{"theme": "A red fox, jumping!", "panels": ["It leaps.", "It lands."]}, {"prompt": "A blue boat."}]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "config.yaml").write_text(f"prompts: {{train: {tmp_path / 'prompts.jsonl'}}}\n")
    texts = {"fox": ["an owl", "a RED fox  jumping"], "boat": ["A blue boat at night."], "panel": ["it LANDS"]}
    assert trained_on(texts, tmp_path) == {"fox": "a RED fox  jumping", "panel": "it LANDS"}


def test_a_leak_is_refused_unless_the_training_prompts_are_evaluated_on_purpose() -> None:
    train, shown = prompts("a fox", "a boat"), [Prompt(0, "A boat", origin="data/bench.jsonl:1")]
    with pytest.raises(ValueError, match=r"1 of 2 training prompts.*Training prompt 1 is data/bench\.jsonl:1: "):
        check_leaks(train, shown, deliberate=False)
    assert check_leaks(train, prompts("a hat"), deliberate=False) == ""
    assert "2 of 2 training prompts" in check_leaks(train, train, deliberate=True)
    with pytest.raises(ValueError, match=r"2 of 2 training prompts .* set prompts\.evaluation to"):
        check_leaks(train, train, deliberate=False)
