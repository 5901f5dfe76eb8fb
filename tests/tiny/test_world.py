"""The tiny world: its splits, its texts, and an oracle that is right on drawings and grades as worked by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from PIL import Image
from research.tiny.heroes import heroes_of
from tiny_sets import draw_grid

from pacorl.core.grid import panel_texts, split
from pacorl.core.set_scores import kappa
from pacorl.tiny.grading import grades_of, of_all_sets
from pacorl.tiny.oracle import agreement, evenness, grade, majority, read_panels
from pacorl.tiny.words import asked_in, check_tiny, check_tiny_edit, tiny_edit, tiny_prompt
from pacorl.tiny.world import IDENTITY, LOOKS, VALUES, Panel, draw, panels_of, set_prompts
from pacorl.types import Grid, Prompt

SPLITS = ("train", "dev", "test")
HERO = Panel("red", "round", "crown", "sunset", "town", "jumping", "boat")
ASKED = {"place": "town", "pose": "jumping", "prop": "boat"}


# --- splits and prompts ----------------------------------------------------------------------------------------


def test_splits_share_no_hero_and_each_has_every_value() -> None:
    for first, second in itertools.combinations(SPLITS, 2):
        assert set(heroes_of(first)).isdisjoint(heroes_of(second))
    for name in SPLITS:
        for index, look in enumerate(IDENTITY):
            assert {hero[index] for hero in heroes_of(name)} == set(VALUES[look])
    assert sum(len(panels_of(name)) for name in SPLITS) == np.prod([len(values) for values in VALUES.values()])


def scenes_of(prompt: Prompt) -> tuple[str, tuple[str, ...]]:
    return asked_in(prompt)[0]["place"], tuple(sorted(prompt.panels))


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(3, 3)])
def test_splits_share_no_scenes(grid: Grid) -> None:
    scenes = {name: {scenes_of(prompt) for prompt in set_prompts(name, 288, grid=grid)} for name in SPLITS}
    for first, second in itertools.combinations(SPLITS, 2):
        assert scenes[first].isdisjoint(scenes[second])


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(3, 3)])
def test_no_panel_names_a_look_and_half_of_the_themes_name_none(grid: Grid) -> None:
    prompts = set_prompts("train", 200, grid=grid)
    named = []
    for prompt in prompts:
        assert [text.rstrip(".") for text in panel_texts(prompt.text)] == list(prompt.panels)
        assert len(set(prompt.panels)) == grid.count
        named.append(len(set(asked_in(prompt)[0]) & set(LOOKS)))
    assert 0.4 < np.mean([count == 0 for count in named]) < 0.6
    assert max(named) == 2


def test_prompts_depend_on_split_count_and_seed_alone() -> None:
    assert set_prompts("dev", 12) == set_prompts("dev", 48)[:12]
    assert set_prompts("dev", 12) != set_prompts("dev", 12, seed=1)


# --- words -----------------------------------------------------------------------------------------------------

SCENES = ("waving, flag", "jumping, boat", "standing, lamp", "standing, tree")


@pytest.mark.parametrize(
    ("theme", "written"),
    [
        ("a hero in town", "a hero in town"),
        ("TOWN", "a hero in town"),
        ("A red, round hero with a top hat, at night in the city!", "a red round hero with a top-hat in town at night"),
        ("the same golden hero by the sea, at dusk", "a yellow hero at the beach at sunset"),
    ],
)
def test_near_words_case_and_punctuation_do_not_matter(theme: str, written: str) -> None:
    assert tiny_prompt(theme, SCENES, Grid(2, 2)).theme == written


@pytest.mark.parametrize(
    ("theme", "panels", "named"),
    [
        ("a hero in twon", SCENES, "twon"),
        ("a hero", SCENES, "place"),
        ("a red blue hero in town", SCENES, "colour"),
        ("a hero in town, waving", SCENES, "pose"),
        ("a hero in town", ("red, waving, flag", *SCENES[1:]), "panel 1"),
        ("a hero in town", ("waving", *SCENES[1:]), "prop"),
        ("a hero in town", SCENES[:3], "2x2"),
        ("a fox", ("waving, lynx", *SCENES[1:]), "all panels has the unknown word 'fox', no place"),
    ],
)
def test_a_refusal_names_what_is_wrong(theme: str, panels: Sequence[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tiny_prompt(theme, panels, Grid(2, 2))


def test_other_prompts_and_instructions_are_refused() -> None:
    for prompt in set_prompts("test", 12):
        check_tiny(prompt)
    with pytest.raises(ValueError, match="dentist"):
        check_tiny(Prompt(id=0, text="a dentist in her surgery"))
    check_tiny_edit(Prompt(id=0, text="Give the hero a crown."))
    for text in ("give the Hero a crown", "Give the hero a crown. "):
        assert tiny_edit(text) == "Give the hero a crown."
    with pytest.raises(ValueError, match="Give the hero a cap"):
        check_tiny_edit(Prompt(id=0, text="Give the hero a cape."))


# --- the oracle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 96, pytest.param(64, marks=pytest.mark.slow)])
def test_the_oracle_reads_drawings(size: int) -> None:
    panels = Random(0).sample(panels_of("test"), 200)
    assert read_panels([draw(panel, size) for panel in panels]) == panels


def test_the_oracle_reads_and_grades_a_set() -> None:
    prompt = tiny_prompt("a red hero in town", SCENES, Grid(2, 2))
    described = [replace(HERO, pose=pose, prop=prop) for pose, prop in (scene.split(", ") for scene in SCENES)]
    panels = split(draw_grid(described, prompt.grid, 32), prompt.grid)
    assert read_panels(panels) == described
    assert set(grade(asked_in(prompt), described).values()) == {1.0}


def test_what_is_nothing_of_this_world_is_invalid() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    junk = [noise, Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64), "white"), Image.new("RGB", (32, 32), "red")]
    assert read_panels(junk) == [None] * 4


# --- grades, worked by hand ------------------------------------------------------------------------------------


def test_grades_of_one_wrong_hat() -> None:
    seen = [HERO, HERO, HERO, replace(HERO, hat="cap")]
    # Three of six pairs differ in one of four looks; no text names the hat.
    assert grade([ASKED] * 4, seen) == pytest.approx(
        {"attribute_agreement": (3 + 3 * 0.75) / 6, "all_equal_pairs": 0.5, "prompt_match": 1, "valid": 1}
    )
    assert grade([ASKED | {"hat": "crown"}] * 4, seen)["prompt_match"] == pytest.approx(1 - 1 / 16)


def test_an_invalid_panel_agrees_with_nothing_and_matches_nothing() -> None:
    grades = grade([ASKED] * 4, [HERO, HERO, HERO, None])
    assert grades == {"attribute_agreement": 0.5, "all_equal_pairs": 0.5, "prompt_match": 0.75, "valid": 0.75}


def test_kappa_takes_out_what_different_sets_share() -> None:
    blue = replace(HERO, colour="blue")
    learned = agreement([[HERO] * 4, [blue] * 4])
    assert learned["colour"] == (1, 0)
    assert learned["hat"] == (1, 1)
    assert (kappa(*learned["colour"]), kappa(*learned["hat"])) == (1, 0)
    # Within: no pair is equal. Across: two of four are.
    assert agreement([[HERO, blue], [HERO, blue]])["colour"] == (0, 0.5)


def test_sets_whose_prompts_name_a_look_count_in_no_agreement_of_all_sets() -> None:
    """They agree by their words, whatever the generator learned."""
    free, named = (tiny_prompt(f"a{colour} hero in town", SCENES, Grid(2, 2)) for colour in ("", " red"))
    shown = [[HERO] * 4, [HERO, HERO, HERO, replace(HERO, colour="blue", hat="cap")]]
    grades = grades_of([free, free, named], [*shown, [replace(HERO, hat="cap")] * 4])
    assert of_all_sets(shown).items() <= grades.items()


def test_diversity_is_that_of_majorities() -> None:
    blue = replace(HERO, colour="blue")
    assert evenness([majority([HERO] * 4)] * 10) == pytest.approx(0, abs=1e-12)
    # One of four looks has two equally common majorities out of six values.
    assert evenness([majority([HERO, HERO, blue, None]), majority([blue, blue, HERO])]) == pytest.approx(
        np.log(2) / np.log(6) / 4
    )
    assert evenness([majority([None] * 4)] * 10) == 0
