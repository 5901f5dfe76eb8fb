"""Prompts from a theme and panels, and what the tiny generator may be asked for; no model is loaded."""

from __future__ import annotations

import pytest

from pacorl.core.grid import panel_texts, shared_text
from pacorl.records.compose import compose, prompt_from
from pacorl.records.prompts import find_record
from pacorl.tiny.words import tiny_prompt
from pacorl.tiny.world import set_prompts
from pacorl.types import Grid

SCENES = ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"]


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(1, 3), Grid(2, 3), Grid(1, 12)])
def test_a_composed_prompt_reads_back(grid):
    panels = [f"Dr. Ada, 3.5 m tall, shows slide {number}!" for number in range(grid.count)]
    prompt = compose("a lecture. All in ink", panels, grid)
    assert panel_texts(prompt.text) == tuple(f"{text}." for text in panels)
    assert f"{grid} grid layout" in shared_text(prompt.text)
    assert prompt.panels == tuple(panels)


def test_plain_words_become_the_prompt_that_the_tiny_generator_was_trained_on():
    """Every held-out prompt, put in other words and another order, is written as it was in training."""
    for wanted in set_prompts("test", 12):
        theme = " ".join(reversed(wanted.theme.upper().replace("-", " ").split(" WITH ")))
        scenes = [text.split(", ") for text in wanted.panels]
        made = tiny_prompt(theme, [f"by the {prop}, {pose}" for pose, prop in scenes], Grid(2, 2))
        assert (made.text, made.panels, made.theme) == (wanted.text, wanted.panels, wanted.theme)


def test_a_panel_may_repeat_the_theme_and_not_depart_from_it():
    made = tiny_prompt("a red hero in town", [*SCENES[:3], "in town the red hero waves, lamp"], Grid(2, 2))
    assert made.panels == (*SCENES[:3], "waving, lamp")
    with pytest.raises(ValueError, match="panel 4 names a colour, blue"):
        tiny_prompt("a red hero in town", [*SCENES[:3], "blue, waving, lamp"], Grid(2, 2))


@pytest.mark.parametrize(
    ("theme", "panels", "fault"),
    [
        (
            "red round dragon, crown, in town, nihgt",
            SCENES,
            r"'dragon'.*'nihgt' \(did you mean 'night'\?\).*palette: day, night",
        ),
        ("a teal crown", SCENES, r"unknown words, 'teal'; the tiny"),
        ("red hero, crown, night, jumpin", SCENES, r"unknown words, 'jumpin' \(did you mean 'jumping'"),
        ("red round hero, night", SCENES, r"the theme.*lacks a place \(meadow, beach, town, mountains\)"),
        ("red round hero, crown, cap, in town", SCENES, "two values of hat, crown and cap"),
        ("a red hero with a crown in town", ["waving", *SCENES[1:]], r"panel 1, 'waving', lacks a prop"),
        ("a red hero with a crown in town", SCENES[:3], "sets of 4 panels as 2x2.*this is 1x3"),
        ("a red hero with a crown in town", [], "describe each panel"),
        ("a lighthouse keeper at sea", [], "'lighthouse'.*'keeper'"),
    ],
)
def test_what_the_tiny_world_has_not_is_named(theme, panels, fault):
    with pytest.raises(ValueError, match=fault):
        prompt_from("tiny", theme=theme, panels=panels)


def test_a_record_is_found_by_its_idx_or_without_one_by_its_number(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"idx": "0007", "prompt": "a fox"}\n\n{"prompt": "an owl"}\n')
    assert [find_record(f"{path}:{name}").text for name in ("0007", "2")] == ["a fox", "an owl"]
    with pytest.raises(ValueError, match="'3'"):
        find_record(f"{path}:3")
    with pytest.raises(ValueError, match="'prompts'"):
        find_record("prompts")
