"""The tiny world: its splits, its texts, and an oracle that is right on drawings and grades as worked by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pacorl.core.grid import panel_texts, split
from pacorl.tiny import characters
from pacorl.tiny.characters import (
    IDENTITY,
    KEPT,
    TEMPLATE_SIZE,
    VALID_DISTANCE,
    VALUES,
    Oracle,
    Panel,
    agreement_of_looks,
    all_panels,
    character_prompts,
    draw,
    draw_grid,
    evenness,
    grade,
    majority,
    panels_of,
    redrawn,
    split_of,
)
from pacorl.types import Grid

SPLITS = ("train", "dev", "test")
HERO = Panel(colour="red", shape="round", hat="crown", palette="sunset", pose="jumping", prop="boat")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def some_panels(count: int) -> list[Panel]:
    return random.Random(0).sample(all_panels(), count)


def test_panels_of_a_split_are_listed_once() -> None:
    assert panels_of("dev") is panels_of("dev")
    assert {split_of(panel) for panel in panels_of("dev")} == {"dev"}


def test_every_panel_is_there_once() -> None:
    assert len(set(all_panels())) == len(all_panels()) == 6 * 4 * 3 * 4 * 3 * 6


def test_the_page_of_the_world_lists_its_words() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tiny.md").read_text("utf-8")
    assert all(f"| {name} | {', '.join(values)} |" in page for name, values in VALUES.items())


def test_parse_is_the_inverse_of_text() -> None:
    assert HERO.text == "red round hero, crown, sunset, jumping, boat"
    assert [Panel.parse(panel.text) for panel in all_panels()] == list(all_panels())
    assert Panel.parse(f" {HERO.text}. ") == HERO


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a dentist in her surgery", "'a dentist in her surgery' does not describe a panel of the tiny world"),
        (HERO.text.replace("crown", "beret"), "hat 'beret' is not one of cap, crown, top-hat"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Panel.parse(text)


# --- splits ----------------------------------------------------------------------------------------------------


def test_splits_share_no_character_and_each_has_every_value() -> None:
    heroes_of = {name: {p.kept[:3] for p in all_panels() if split_of(p) == name} for name in SPLITS}
    for first, second in itertools.combinations(SPLITS, 2):
        assert heroes_of[first].isdisjoint(heroes_of[second])
    for heroes in heroes_of.values():
        for index, name in enumerate(IDENTITY):
            assert {character[index] for character in heroes} == set(VALUES[name])


def test_splits_share_no_prompt() -> None:
    texts = {name: {prompt.text for prompt in character_prompts(name, 288)} for name in SPLITS}
    for first, second in itertools.combinations(SPLITS, 2):
        assert texts[first].isdisjoint(texts[second])


@pytest.mark.parametrize("name", SPLITS)
def test_prompts_show_heroes_of_their_split(name: characters.Split) -> None:
    for prompt in character_prompts(name, 48):
        assert {split_of(Panel.parse(text)) for text in prompt.panels} == {name}


# --- prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(1, 3), Grid(2, 4)])
def test_a_prompt_names_every_attribute_of_every_panel(grid: Grid) -> None:
    for prompt in character_prompts("train", 12, grid=grid):
        panels = [Panel.parse(text) for text in prompt.panels]
        assert len(panels) == grid.count
        assert len({panel.kept for panel in panels}) == 1
        assert len(set(panels)) == grid.count  # the scenes differ
        assert [Panel.parse(text) for text in panel_texts(prompt.text)] == panels
        assert prompt.theme in prompt.text


def test_prompts_depend_on_split_count_and_seed_alone() -> None:
    assert character_prompts("dev", 12) == character_prompts("dev", 48)[:12]
    assert character_prompts("dev", 12) != character_prompts("dev", 12, seed=1)


def test_the_held_out_prompts_differ_in_their_subject() -> None:
    assert len({prompt.theme for prompt in character_prompts("test", 48)}) == 48


def test_redrawn_changes_kept_attributes_alone() -> None:
    panels = some_panels(200)
    changed = redrawn(panels, chance=1.0, rng=random.Random(0))
    assert [(p.pose, p.prop) for p in changed] == [(p.pose, p.prop) for p in panels]
    assert redrawn(panels, chance=0.0, rng=random.Random(0)) == panels
    for name in KEPT:
        share_equal = np.mean([getattr(a, name) == getattr(b, name) for a, b in zip(panels, changed, strict=True)])
        assert share_equal == pytest.approx(1 / len(VALUES[name]), abs=0.12)


# --- the oracle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_the_oracle_reads_drawings(oracle: Oracle, size: int) -> None:
    panels = some_panels(300)
    assert oracle.read([draw(panel, size) for panel in panels]) == panels


def test_the_oracle_reads_the_panels_of_a_grid_image(oracle: Oracle) -> None:
    prompt = character_prompts("test", 1)[0]
    described = [Panel.parse(text) for text in prompt.panels]
    panels = split(draw_grid(described, prompt.grid, 64), prompt.grid)
    assert oracle.read(panels) == described
    assert set(oracle.grade(prompt, panels).values()) == {1.0}


def test_what_is_nothing_of_this_world_is_invalid(oracle: Oracle) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    junk = [noise, Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64), "white"), Image.new("RGB", (32, 32), "red")]
    assert oracle.read(junk) == [None] * 4
    described = character_prompts("test", 1)[0]
    assert set(oracle.grade(described, junk).values()) == {0.0}


def test_the_valid_distance_is_the_change_of_one_identity_attribute() -> None:
    rng = random.Random(0)
    changes = []
    for panel in some_panels(400):
        name = rng.choice(IDENTITY)
        other = replace(panel, **{name: rng.choice([value for value in VALUES[name] if value != getattr(panel, name)])})
        first, second = (np.asarray(draw(one, TEMPLATE_SIZE), dtype=float) / 255 for one in (panel, other))
        changes.append(np.sqrt(np.mean((first - second) ** 2)))
    assert np.median(changes) == pytest.approx(VALID_DISTANCE, rel=0.15)


# --- grades, worked by hand ------------------------------------------------------------------------------------


def test_grades_of_a_perfect_set() -> None:
    described = [replace(HERO, prop=prop) for prop in ("boat", "tree", "lamp", "flag")]
    assert grade(described, described) == {
        "attribute_agreement": 1,
        "all_equal_pairs": 1,
        "prompt_match": 1,
        "valid": 1,
    }


def test_grades_of_one_wrong_hat() -> None:
    described = [HERO] * 4
    seen = [HERO, HERO, HERO, replace(HERO, hat="cap")]
    # Three of six pairs differ in one of four kept attributes; one panel of four misses one of six.
    assert grade(described, seen) == pytest.approx(
        {"attribute_agreement": (3 + 3 * 0.75) / 6, "all_equal_pairs": 0.5, "prompt_match": 1 - 1 / 24, "valid": 1}
    )


def test_a_wrong_scene_costs_match_and_no_agreement() -> None:
    grades = grade([HERO, HERO], [HERO, replace(HERO, pose="waving", prop="tree")])
    assert grades == pytest.approx(
        {"attribute_agreement": 1, "all_equal_pairs": 1, "prompt_match": 1 - 2 / 12, "valid": 1}
    )


def test_an_invalid_panel_agrees_with_nothing_and_matches_nothing() -> None:
    grades = grade([HERO] * 4, [HERO, HERO, HERO, None])
    assert grades == {"attribute_agreement": 0.5, "all_equal_pairs": 0.5, "prompt_match": 0.75, "valid": 0.75}
    assert set(grade([HERO] * 4, [None] * 4).values()) == {0.0}


def test_agreement_of_looks_tells_shared_looks_from_one_look() -> None:
    """Two heroes apart in their hats: κ is 1 for the hat, and 0 for the looks of both."""
    found = agreement_of_looks([[HERO] * 3, [replace(HERO, hat="cap"), None, replace(HERO, hat="cap")]])
    assert (found["within/hat"], found["across/hat"], found["kappa/hat"]) == (1, 0, 1)
    assert (found["within/colour"], found["across/colour"], found["kappa/colour"]) == (1, 1, 0)


# --- diversity -------------------------------------------------------------------------------------------------


def diversity(sets: Sequence[Sequence[Panel | None]]) -> float:
    return evenness([majority(panels) for panels in sets])


def sets_of(subjects: Sequence[Sequence[str]]) -> list[list[Panel | None]]:
    return [[Panel(*subject, pose="standing", prop="tree")] * 4 for subject in subjects]


def test_diversity_is_1_if_all_values_are_equally_common() -> None:
    everyone = itertools.product(*(VALUES[name] for name in KEPT))
    assert diversity(sets_of(list(everyone))) == pytest.approx(1)


def test_diversity_is_0_if_every_set_is_alike() -> None:
    assert diversity([[HERO] * 4] * 10) == pytest.approx(0, abs=1e-12)


def test_diversity_looks_at_the_majority_of_a_set() -> None:
    blue = replace(HERO, colour="blue")
    mixed: list[list[Panel | None]] = [[HERO, HERO, blue, None], [blue, blue, blue, HERO]]
    # One of four attributes has two equally common majorities out of six values.
    assert diversity(mixed) == pytest.approx(np.log(2) / np.log(6) / 4)


def test_junk_has_no_diversity() -> None:
    assert diversity([[None] * 4] * 10) == 0
