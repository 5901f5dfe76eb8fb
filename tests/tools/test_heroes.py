"""Heroes from references: the teacher, the files, the grades by the oracle, and the story's verdict."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tools.tiny.hero_story import changes, holds, verdict
from tools.tiny.heroes import HERO_GRADES, NAME, grade_heroes, hero_tasks, taught_heroes, write_heroes

from pacorl.config import base as configs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.records.characters import characters_of
from pacorl.records.prompts import load_prompts
from pacorl.tiny.characters import IDENTITY, Oracle, Panel, draw, split_of
from pacorl.types import Prompt

RECIPE = Path(__file__).parents[2] / "configs" / "tiny_hero.yaml"


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    return load_prompts(write_heroes(tmp_path, hero_tasks("test", 12), name="test"))


@pytest.mark.parametrize(("redraw", "paste"), [(0.0, 0.0), (0.4, 0.2)])
def test_the_teacher_errs_as_often_as_it_is_told(redraw: float, paste: float) -> None:
    drawn = list(islice(taught_heroes(random.Random(0), redraw=redraw, paste=paste), 4000))
    pasted = [panel in task.references for task, panel in drawn]
    assert np.mean(pasted) == pytest.approx(paste, abs=0.02)
    differing = []
    for (task, panel), was_pasted in zip(drawn, pasted, strict=True):
        assert split_of(task.asked) == "train"
        if not was_pasted:
            assert (panel.palette, panel.pose, panel.prop) == (task.asked.palette, task.asked.pose, task.asked.prop)
            differing += [getattr(panel, name) != getattr(task.asked, name) for name in IDENTITY]
    # A redrawn trait keeps its value by chance: of 6, 4 and 3 values.
    assert np.mean(differing) == pytest.approx(redraw * (1 - (1 / 6 + 1 / 4 + 1 / 3) / 3), abs=0.02)


def test_a_task_has_one_hero_and_as_many_scenes_as_images() -> None:
    for task in hero_tasks("dev", 48):
        panels = (task.asked, *task.references)
        assert len({panel.kept for panel in panels}) == 1
        assert len({(panel.pose, panel.prop) for panel in panels}) == len(panels) in (3, 4)
        assert task.references[0].in_scene(task.text) == task.asked


def test_the_prompt_tells_the_hero_by_images_alone(prompts: Sequence[Prompt]) -> None:
    for prompt, task in zip(prompts, hero_tasks("test", 12), strict=True):
        assert prompt.panels == (prompt.text,) == (task.text,)
        assert not any(getattr(task.asked, name) in prompt.text for name in IDENTITY)
        assert len(prompt.references) == len(task.references)
        [[hero]] = characters_of(prompt)
        assert hero.name == hero.text == NAME
        assert hero.images == prompt.references


def test_the_oracle_grades_what_was_drawn(prompts: Sequence[Prompt]) -> None:
    tasks = hero_tasks("test", 12)

    def grades(panels: Sequence[Panel]) -> dict[str, float]:
        graded = grade_heroes(prompts, [draw(panel, 32) for panel in panels], oracle=Oracle())
        return {name: float(np.mean([row[name] for row in graded])) for name in HERO_GRADES}

    right = grades([task.asked for task in tasks])
    assert right == {"identity": 1, "all_traits": 1, "scene": 1, "pasted": 0, "valid": 1}
    # A copy of a reference has the hero and the palette, and neither pose and prop as asked.
    pasted = grades([task.references[-1] for task in tasks])
    assert (pasted["identity"], pasted["pasted"]) == (1, 1)
    assert pasted["scene"] < 0.7
    # A pasted scene is one with another hero, too.
    others = [replace(task.references[0], hat="cap" if task.asked.hat == "crown" else "crown") for task in tasks]
    other = grades(others)
    assert other["identity"] == pytest.approx(2 / 3)
    assert (other["all_traits"], other["pasted"]) == (0, 1)


def evaluation(identity: Sequence[float], pasted: Sequence[float]) -> np.ndarray:
    """Grades of prompts with one image each."""
    table = np.zeros((len(identity), 1, len(HERO_GRADES)))
    table[:, 0, HERO_GRADES.index("identity")] = identity
    table[:, 0, HERO_GRADES.index("pasted")] = pasted
    return table


@pytest.mark.parametrize(
    ("identity", "pasted", "reached"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], True),
        ([1, 1, 1, 1], [0, 0, 0, 1], False),  # more pasted
        ([1, 0.5, 0.5, 0.5], [0, 0, 0, 0], False),  # an interval down to zero
    ],
)
def test_identity_must_rise_by_its_interval_and_pasting_must_not(
    identity: list[float], pasted: list[float], reached: bool
) -> None:
    before = evaluation([0.5] * 4, [0] * 4)
    row = {"seed": 1, **changes(before, evaluation(identity, pasted))}
    assert row["identity"]["change"] == pytest.approx(np.mean(identity) - 0.5)
    assert row["identity"]["low"] <= row["identity"]["change"] <= row["identity"]["high"]
    assert holds(row) is reached
    lines = verdict({"seeds": [row], "reached": reached})
    assert lines[0].startswith(f"seed 1: identity 0.500 → {np.mean(identity):.3f}")
    assert lines[-1].endswith(": reached" if reached else ": not reached")


def test_its_recipe_is_a_run_with_the_reward_of_references() -> None:
    run = configs.load(PolicyConfig, RECIPE)
    assert run.model.kind == "kontext"
    assert "reference" in [reward.name for reward in run.rewards]
