from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from asked import Asked
from judges import by_grey, grey
from PIL import Image

from pacorl.core.grid import split
from pacorl.gate.check import Check, Control, ControlError, check_set
from pacorl.gate.panels import Panels
from pacorl.generate.repair import FinishedPage, Redraw, repair_page, repair_set
from pacorl.io.images import open_image, png_texts
from pacorl.types import Grid

GATE = partial(check_set, Asked(by_grey), least=0.5)
"""Compares greys: a difference of 50 is P(Yes) 0.5."""
HERO = [("hero", grey(20))]


def redraws(*shades: int) -> tuple[Redraw, list[int]]:
    """A source of panels of these greys, and the panels that it was asked for."""
    asked: list[int] = []

    def redraw(panel: int, number: int) -> tuple[Image.Image, Mapping[str, str]]:
        asked.append(panel)
        return grey(shades[number - 1])[0], {"panel": f"panel {panel}", "seed": str(number)}

    return redraw, asked


def shades_of(images: Sequence[Image.Image]) -> list[Any]:
    return [image.getpixel((0, 0))[0] for image in images]  # type: ignore[index]


def test_failing_panels_are_redrawn_in_turn_the_worst_first() -> None:
    redraw, asked = redraws(110, 25, 22)
    repair = repair_set(grey(20, 100, 20, 120), gate=partial(GATE, characters=HERO), redraw=redraw, tries=9)
    assert asked == [3, 1, 3]
    assert [attempt.accepted for attempt in repair.tries] == [True, True, True]
    assert shades_of(repair.images) == [20, 25, 20, 22]
    assert (repair.before.passed, repair.after.passed) == (False, True)
    assert sorted(repair.replaced) == [1, 3]


@pytest.mark.parametrize("redrawn", [110, 80])
def test_a_panel_that_fits_no_better_is_rejected_and_near_zero_is_a_tie(redrawn: int) -> None:
    gate = partial(check_set, Asked(lambda question: by_grey(question) ** 8), least=0.5)
    redraw, _ = redraws(redrawn)
    repair = repair_set(grey(20, 20, 20, 110), gate=gate, redraw=redraw, tries=1)
    assert [attempt.accepted for attempt in repair.tries] == [False]
    assert repair.replaced == {}


def test_a_panel_that_lowers_the_mean_is_rejected() -> None:
    means = iter([0.5, 0.4])

    def gate(panels: Sequence[Image.Image]) -> Check:
        return replace(GATE(panels), scores=Mock(mean=next(means)))

    assert repair_set(grey(20, 20, 20, 110), gate=gate, redraw=redraws(20)[0], tries=1).replaced == {}


def test_a_failed_control_is_a_rejected_try() -> None:
    def gate(panels: Sequence[Image.Image]) -> Check:
        if shades_of(panels)[0] == 99:
            raise ControlError(Control("1.png", "the same image", same=True, p_yes=0.1), 0.5)
        return GATE(panels)

    redraw, _ = redraws(99, 20)
    repair = repair_set(grey(120, 20, 20), gate=gate, redraw=redraw)
    assert [attempt.accepted for attempt in repair.tries] == [False, True]
    assert "1.png with the same image has P(Yes) 0.1000" in repair.tries[0].error
    assert (repair.tries[0].verdict, repair.tries[1].error) == (repair.tries[0].error, "")
    with pytest.raises(ControlError):
        repair_set(grey(99, 20), gate=gate, redraw=redraw)


def test_every_try_is_kept_and_the_page_has_the_seeds_of_new_panels(tmp_path: Path) -> None:
    redraw, _ = redraws(130, 21)
    page, images = tmp_path / "page.png", grey(20, 20, 20, 120)
    texts = tuple(f"original {number}" for number in range(1, 5))
    panels = Panels(("", "", "", ""), tuple(images), texts)
    recipe = {"layout": "2x2", "theme": "a hero", "score": "0.5"}
    said: list[str] = []
    options: dict[str, Any] = {"gate": GATE, "redraw": redraw, "tries": 2, "say": said.append}
    document = repair_page(FinishedPage(page, panels, (), recipe), page, **options)
    files = [Path(entry["image"]) for entry in document["tries"]]
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        "tries/page-try-1-panel-4.png",
        "tries/page-try-2-panel-4.png",
    ]
    assert [png_texts(file)["verdict"] for file in files] == ["0.00, page 0.50, rejected", "0.99, page 0.99, accepted"]
    assert len(said) == 2
    assert (document["passed"], document["code"], "score" in png_texts(page)) == (True, 0, False)
    assert shades_of(split(open_image(page), Grid(2, 2))) == [20, 20, 20, 21]
    assert json.loads(png_texts(page)["redrawn"]).keys() == {"4"}
    assert png_texts(page)["theme"] == "a hero"
    panels = [tmp_path / f"page-panel-{number}.png" for number in range(1, 5)]
    assert shades_of([Image.open(file) for file in panels]) == [20, 20, 20, 21]
    assert [png_texts(file)["panel"] for file in panels] == ["original 1", "original 2", "original 3", "panel 3"]
