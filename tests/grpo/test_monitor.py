"""The watch's detectors on drawn examples, and its alarms over time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from tiny_sets import draw_grid, panels_of_prompt

from pacorl.core.grid import join
from pacorl.grpo.monitor import (
    SAME_DISTANCE,
    SIDE,
    HackingMonitor,
    PanelStatistics,
    _pixels,
    is_blank,
    panel_statistics,
    signs_of,
)
from pacorl.tiny import world
from pacorl.tiny.world import VALUES, all_panels, draw
from pacorl.types import Grid, Prompt

RNG = random.Random(0)
PANELS = RNG.sample(all_panels(), 24)
GRID = Grid(2, 2)


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
                pair = _pixels([draw(one, SIDE) for one in (panel, replace(panel, **{name: value}))])
                assert np.sqrt(((pair[0] - pair[1]) ** 2).mean()) > SAME_DISTANCE


@pytest.mark.parametrize("colour", ["black", "white", "grey", (20, 24, 40)])
def test_flat_and_dark_panels_are_blank(colour: str | tuple[int, int, int]) -> None:
    panel = noisy(Image.new("RGB", (64, 64), colour), 0.05)
    look = panel_statistics(prompt(), sheet([panel] * 4))
    assert (look.blank, look.duplicates) == (1.0, 1.0)


def test_a_faint_drawing_is_blank_only_in_the_dark() -> None:
    """Contrast between the two limits; and what is dark with more contrast is a night."""
    stripes = np.tile([[-1.0, 1.0]], (SIDE, SIDE // 2))[None, :, :, None] * np.ones(3)
    assert [bool(is_blank(mean + std * stripes)[0]) for mean, std in ((0.1, 0.06), (0.5, 0.06), (0.1, 0.09))] == [
        True,
        False,
        False,
    ]


def test_drawings_are_not_blank() -> None:
    assert not is_blank(_pixels([draw(panel, SIDE) for panel in all_panels()[::37]])).any()


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
    return signs_of(images).get("diversity")


def test_one_picture_for_every_prompt_is_no_diversity() -> None:
    healthy = diversity([panel_statistics(*one) for one in sets(24)])
    alike = diversity([panel_statistics(*one) for one in sets(24, same=True)])
    assert healthy is not None
    assert alike is not None
    assert alike < 0.5 * healthy
    assert diversity([panel_statistics(*one) for one in sets(3)] * 4) is None, "three prompts are too few"


def test_diversity_is_the_root_mean_squared_distance_of_pairs() -> None:
    images = [panel_statistics(*one) for one in sets(5)]
    pairs = combinations([np.array(image.thumbnail) for image in images], 2)
    assert diversity(images) == pytest.approx(np.sqrt(np.mean([((a - b) ** 2).mean() for a, b in pairs])))


def test_diversity_is_between_prompts_not_within() -> None:
    image = sets(1)[0][1]
    noise = [panel_statistics(prompt(number % 4), noisy(image, 0.3, number)) for number in range(16)]
    assert diversity(noise) == pytest.approx(0, abs=0.05)


def test_a_healthy_world_has_low_signs_of() -> None:
    found = signs_of([panel_statistics(*one) for one in sets(24)])
    assert found["duplicates"] < 0.02
    assert found["blank"] == 0.0


# --- over time -------------------------------------------------------------------------------------------------


def test_a_rise_beyond_the_limit_is_an_alarm() -> None:
    watch = HackingMonitor({"duplicates": 0.2}, average=2)
    raised = [watch.update("epoch", {"monitor/duplicates": value}) for value in (0.0, 0.1, 0.2, 0.25, 0.3, 0.4)]
    assert [len(alarms) for alarms in raised] == [0, 0, 0, 0, 1, 1]
    alarm = raised[4][0]
    assert (alarm.reference, alarm.now) == (pytest.approx(0.05), pytest.approx(0.275))
    assert "duplicates went from 0.050 to 0.275, beyond the limit of 0.2" in str(alarm)


def test_a_fall_is_a_share_of_the_best() -> None:
    watch = HackingMonitor({"diversity": 0.4, "held_out": 0.2})
    first = {"monitor/diversity": 0.5, "held_out/clip": 0.30, "held_out/gemma": None}
    assert watch.update("evaluation", first) == []
    assert watch.update("evaluation", {"monitor/diversity": 0.31, "held_out/clip": 0.25}) == []
    alarms = watch.update("evaluation", {"monitor/diversity": 0.29, "held_out/clip": 0.23})
    assert [alarm.sign for alarm in alarms] == ["diversity", "held_out/clip"]


@pytest.mark.parametrize(("prompts", "average"), [(42, 3), (8, 3), (6, 4), (4, 6)])
def test_the_draws_of_few_prompts_raise_no_alarm(prompts: int, average: int) -> None:
    """Of 300 healthy epochs; the diversity of four prompts of the tiny world was 0.284 ± 0.048."""
    watch = HackingMonitor.of("warn", prompts=prompts)
    assert watch.prompts_average == average
    rng = np.random.default_rng(0)
    drawn = (0.284 + 0.048 * math.sqrt(4 / prompts) * rng.normal(size=300)).tolist()
    assert not any(watch.update("epoch", {"monitor/diversity": value}) for value in drawn)
    # One image for every prompt is still an alarm.
    assert any(watch.update("epoch", {"monitor/diversity": 0.05}) for _ in range(average))

    # By three epochs of four prompts they would.
    if prompts == 4:
        short = HackingMonitor(watch.limits)
        assert any(short.update("epoch", {"monitor/diversity": value}) for value in drawn)


def test_what_was_gained_and_is_lost_again_is_an_alarm() -> None:
    watch = HackingMonitor({"held_out": 0.2, "blank": 0.1}, average=2)
    raised = [watch.update("evaluation", {"held_out/clip": value}) for value in (0.3, 0.5, 0.41, 0.39, 0.45)]
    assert [len(alarms) for alarms in raised] == [0, 0, 0, 1, 0]
    assert "held_out/clip went from 0.500 to 0.390" in str(raised[3][0])
    # A rise is one from the start, not from the lowest; means over two epochs: .2, .1, 0, .15, .3
    raised = [watch.update("epoch", {"monitor/blank": value}) for value in (0.2, 0.2, 0.0, 0.0, 0.3, 0.3)]
    assert [len(alarms) for alarms in raised] == [0, 0, 0, 0, 0, 0]
    assert len(watch.update("epoch", {"monitor/blank": 0.4})) == 1


def test_training_and_evaluation_have_starts_of_their_own() -> None:
    watch = HackingMonitor({"blank": 0.1}, average=1)
    assert watch.update("evaluation", {"monitor/blank": 0.0}) == []
    assert watch.update("epoch", {"monitor/blank": 0.3}) == []
    assert watch.update("epoch", {"monitor/blank": 0.35}) == []
    assert len(watch.update("evaluation", {"monitor/blank": 0.35})) == 1


def test_a_resumed_watch_goes_on() -> None:
    lines = [{"kind": "epoch", "epoch": n, "monitor/blank": v} for n, v in enumerate((0.0, 0.0, 0.1, 0.3, 0.3))]
    whole, resumed = (HackingMonitor({"blank": 0.1}, average=2) for _ in range(2))
    for line in lines:
        expected = whole.update("epoch", line)
    resumed.restore(lines[:-1])
    assert resumed.update("epoch", lines[-1]) == expected
    assert expected


def test_what_the_log_holds_of_images() -> None:
    blank = Image.new("RGB", (64, 64))
    monitor = HackingMonitor({"blank": 0.1})
    monitor.restore([{"kind": "evaluation", "monitor/blank": 0.0}])
    signs, raised = monitor.observe("evaluation", [panel_statistics(prompt(), blank)], {"loss": 1.0})
    assert signs == {
        "monitor/duplicates": 1.0,
        "monitor/blank": 1.0,
        "alarm/blank": 1.0,
    }
    assert [alarm.sign for alarm in raised] == ["blank"]


@pytest.mark.parametrize(("kappa", "alarms"), [(0.3, ["across"]), (0.0, [])])
def test_sets_that_become_alike_are_an_alarm_unless_the_text_names_what_they_share(
    kappa: float, alarms: list[str]
) -> None:
    monitor = HackingMonitor(average=1, prompts_average=1)
    raised = []
    for across in (0.2, 0.5):
        raised += monitor.update("epoch", {"monitor/across": across, "monitor/kappa": kappa})
    assert [alarm.sign for alarm in raised] == alarms
