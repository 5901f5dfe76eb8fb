"""The monitor's signs of drawn examples, and its alarms over time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tiny_sets import draw_grid, panels_of_prompt

from pacorl.core.grid import join
from pacorl.grpo.monitor import SAME_DISTANCE, SIDE, HackingMonitor, PanelStatistics, panel_statistics, signs_of
from pacorl.tiny import world
from pacorl.tiny.world import VALUES, all_panels, draw
from pacorl.types import Grid, Prompt

RNG = random.Random(0)
PANELS = RNG.sample(all_panels(), 24)
GRID = Grid(2, 2)


def pixels_of(images: Sequence[Image.Image]) -> NDArray[np.float64]:
    return np.stack([np.asarray(image) for image in images]) / 255


def sheet(panels: Sequence[Image.Image]) -> Image.Image:
    return join(list(panels), GRID)


def noisy(image: Image.Image, amount: float, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).normal(0, 255 * amount, (image.height, image.width, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def prompt(number: int = 0) -> Prompt:
    return Prompt(id=number, text="", grid=GRID)


# --- one sheet -------------------------------------------------------------------------------------------------


def test_copies_are_duplicates_and_the_smallest_redrawing_is_none() -> None:
    copies = [noisy(draw(PANELS[0], 64), 0.02, seed) for seed in range(4)]
    assert panel_statistics(prompt(), sheet(copies)).duplicates == 1.0
    assert (
        panel_statistics(prompt(), sheet([*copies[:2], draw(PANELS[1], 64), draw(PANELS[2], 64)])).duplicates == 1 / 6
    )
    for panel in PANELS:
        for name, values in VALUES.items():
            for value in set(values) - {getattr(panel, name)}:
                pair = pixels_of([draw(one, SIDE) for one in (panel, replace(panel, **{name: value}))])
                assert np.sqrt(((pair[0] - pair[1]) ** 2).mean()) > SAME_DISTANCE


# --- many sheets -----------------------------------------------------------------------------------------------


def sets(count: int, *, same: bool = False) -> list[tuple[Prompt, Image.Image]]:
    made = []
    for number, one in enumerate(world.set_prompts("train", count)):
        panels = panels_of_prompt(one)
        if same:  # every set shows the first one's hero in the first one's place
            panels = [replace(panel, palette="night", colour="red", prop="lamp") for panel in panels]
        made.append((prompt(number), draw_grid(panels, GRID, 32)))
    return made


def test_the_order_of_the_panels_changes_no_sign() -> None:
    """Every panel counts alike: signs are of the set, and not of the panel that comes first."""
    panels = [draw(panel, 32) for panel in PANELS[:3]]
    panels.append(Image.new("RGB", (32, 32), "grey"))
    shown = panel_statistics(prompt(), sheet(panels))
    turned = panel_statistics(prompt(), sheet(panels[1:] + panels[:1]))
    for field in fields(shown):
        assert getattr(turned, field.name) == pytest.approx(getattr(shown, field.name)), field.name


def diversity(images: Sequence[PanelStatistics]) -> float | None:
    return signs_of(images).get("monitor/diversity")


def test_diversity_is_the_root_mean_squared_distance_of_pairs() -> None:
    images = [panel_statistics(*one) for one in sets(5)]
    pairs = combinations([np.array(image.thumbnail) for image in images], 2)
    assert diversity(images) == pytest.approx(np.sqrt(np.mean([((a - b) ** 2).mean() for a, b in pairs])))


# --- over time -------------------------------------------------------------------------------------------------


def alarms(sign: str, values: Sequence[float], *, monitor: HackingMonitor | None = None) -> list[bool]:
    """Whether each value of a sign raises an alarm, with 24 prompts an epoch."""
    monitor = monitor or HackingMonitor(prompts=24)
    return [bool(monitor.update({sign: value})) for value in values]


def test_a_rise_of_three_epochs_mean_beyond_the_limit_is_an_alarm() -> None:
    rising = [0.0, 0.0, 0.0, 0.3, 0.3, 0.3]
    assert alarms("monitor/duplicates", rising) == [False] * 5 + [True]
    monitor = HackingMonitor(prompts=24)
    (alarm,) = [alarm for value in rising for alarm in monitor.update({"monitor/duplicates": value})]
    assert (alarm.sign, alarm.reference, alarm.now) == ("duplicates", 0.0, pytest.approx(0.3))
    assert "duplicates went from 0.000 to 0.300" in str(alarm)
    # From the start, and not from the lowest: means of .2, .13, .07, .1, .2, .3
    assert alarms("monitor/duplicates", [0.2, 0.2, 0.2, 0.0, 0.0, 0.3, 0.3, 0.3]) == [False] * 8


def test_a_fall_is_a_share_of_the_best() -> None:
    assert alarms("monitor/diversity", [0.5] * 3 + [0.31] * 3) == [False] * 6
    assert alarms("monitor/diversity", [0.5] * 3 + [0.29] * 3) == [False] * 5 + [True]
    assert alarms("held_out/clip", [0.3, 0.5, 0.43, 0.42, 0.45]) == [False, False, False, True, False]
    assert HackingMonitor(prompts=24).update({"held_out/gemma": None}) == []


@pytest.mark.parametrize("prompts", [42, 8, 6, 4])
def test_the_draws_of_few_prompts_raise_no_alarm(prompts: int) -> None:
    """Of 300 healthy epochs; the diversity of four prompts of the tiny world was 0.284 ± 0.048."""
    rng = np.random.default_rng(0)
    drawn = (0.284 + 0.048 * math.sqrt(4 / prompts) * rng.normal(size=300)).tolist()
    monitor = HackingMonitor(prompts=prompts)
    assert not any(alarms("monitor/diversity", drawn, monitor=monitor))
    # One image for every prompt is still an alarm.
    assert any(alarms("monitor/diversity", [0.05] * 6, monitor=monitor))
    # By three epochs of four prompts there would be alarms.
    if prompts == 4:
        assert any(alarms("monitor/diversity", drawn))


@pytest.mark.parametrize(("start", "raised"), [(0.3, True), (0.0, False)])
def test_sets_that_become_alike_are_an_alarm_unless_the_text_names_what_they_share(start: float, raised: bool) -> None:
    """The start decides, since κ of sets that have become alike is 0."""
    monitor = HackingMonitor(prompts=24)
    kappas = [start] * 3 + [0.3 - start] * 3
    lines = [{"monitor/across": 0.2 + 0.3 * (n > 2), "monitor/kappa": kappa} for n, kappa in enumerate(kappas)]
    raising = [bool(monitor.update(line)) for line in lines]
    assert raising[-1] is raised
