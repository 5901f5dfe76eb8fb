from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress

import pytest
from asked import Asked
from hypothesis import given, settings
from hypothesis import strategies as st
from judges import by_grey, grey
from PIL import Image, ImageDraw, ImageStat

from pacorl.config.options import INCOMPLETE
from pacorl.gate.check import CONTROL_FIGURE, ControlError, check_lines, check_page, check_set
from pacorl.io.images import open_image
from pacorl.types import Question


def test_a_panel_is_compared_with_its_own_characters_alone() -> None:
    characters = [("dark", grey(20)), ("light", grey(90))]
    casts = [("dark",), ("light",), ("dark", "light")]
    judge = Asked(by_grey)
    result = check_set(judge, grey(20, 90, 20), least=0.5, characters=characters, casts=casts)
    assert len(judge.questions) == result.question_count == 4 + 3 + 3
    assert [panel.score for panel in result.panels] == pytest.approx([1, 1, 0.3])
    document = result.to_dict()
    assert [panel["character"] for panel in document["panels"]] == ["dark", "light", "light"]
    assert "image 3 (light)" in check_lines(result, judge="grey")[2]
    both = check_set(judge, grey(20, 90, 20), least=0.5).with_lower(result)
    assert [panel.character for panel in both.panels] == [None, None, "light"]
    assert (both.question_count, len(both.controls)) == (10 + 9, 6 + 6)


@pytest.mark.parametrize(("sure", "control"), [(0.9, "a drawn figure of another character"), (0.1, "the same image")])
def test_a_judge_that_fails_a_control_of_every_image_is_refused(sure: float, control: str) -> None:
    judge = Asked(lambda question: sure)
    with pytest.raises(ControlError, match=rf"cannot judge these images.*image 1 with {control} has P\(Yes\) {sure}"):
        check_set(judge, grey(20, 20), least=0.5)
    assert len(judge.questions) == 2 * 3, "no panel was judged"


FIGURE_GREY = round(ImageStat.Stat(open_image(CONTROL_FIGURE).convert("L")).mean[0])
"""A shade that the judge cannot tell from the drawn figure, so that a control of it fails."""


@settings(deadline=None)
@given(st.permutations((0, 20, 30, 75, FIGURE_GREY)), st.floats(0, 1))
def test_the_verdict_is_the_same_in_every_order(shades: list[int], least: float) -> None:
    def verdict(shades: Sequence[int]) -> dict[int, tuple[float | None, str]] | str:
        try:
            check = check_set(Asked(by_grey), grey(*shades), least=least)
        except ControlError:
            return "refused"
        scores = [round(panel.score or 0, 6) for panel in check.panels]
        return {shade: (scores[number], check.status(number)) for number, shade in enumerate(shades)}

    assert verdict(shades) == verdict(sorted(shades))


def test_the_images_whose_controls_fail_are_named() -> None:
    check = check_set(Asked(by_grey), grey(FIGURE_GREY, 20, 20, 25), least=0.5)
    assert check_lines(check, judge="grey")[-1] == "12 questions to grey, 5 of 6 controls passed."
    assert (check.passed, check.failed, check.unsure, check.odd_one_out) == (None, (), (0,), None)
    assert re.search(r"image 1 with a drawn figure.*P\(Yes\) .* below 0.5", check_lines(check, judge="grey")[-2])
    page = check_page(check, judge="grey")
    assert re.search("image 1 with a drawn figure.*<b>failed</b>", page)
    assert "<b>unsure</b>" in page
    # A broken reference is passed over too.
    hero = [("hero", grey(FIGURE_GREY))]
    check = check_set(Asked(by_grey), grey(20, 25), least=0.5, characters=hero)
    assert [control.image for control in check.controls[::3]] == ["hero, reference 1", "image 1"]
    assert check.unsure == (0, 1)


@pytest.mark.parametrize(("width", "height"), [(16, 16), (200, 20), (20, 200), (320, 256)])
def test_the_three_controls_of_an_image_of_any_size_are_three_images(width: int, height: int) -> None:
    """The crop loses columns and rows: every line at the edge of the image is gone from it."""
    judge = Asked(by_grey)
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).rectangle((0, 0, width - 1, height - 1), outline="black")
    with suppress(ControlError):  # a judge of greys may not pass them
        check_set(judge, [image, image], least=0.5)
    same, crop, figure = (question.images[1] for question in judge.questions[:3])
    assert same.tobytes() == image.tobytes()
    assert crop.size == image.size
    edges = [crop.crop(box) for box in ((0, 0, width, 1), (0, 0, 1, height))]
    assert all(max(edge.convert("L").tobytes()) > 200 for edge in edges)
    assert len({control.tobytes() for control in (same, crop, figure)}) == 3
    assert figure.tobytes() == open_image(CONTROL_FIGURE).tobytes()


def test_without_an_answer_no_panel_passes() -> None:
    def answer(question: Question) -> float | None:
        """None about the first panel and the third."""
        shades = {image.getpixel((0, 0))[0] for image in question.images}
        return None if shades == {20, 22} else by_grey(question)

    check = check_set(Asked(answer), grey(20, 21, 22), least=0.5)
    assert [panel.score for panel in check.panels] == [None, pytest.approx(0.99), None]
    assert check.unsure == (0, 2)
    document = check.to_dict()
    assert (document["passed"], document["code"]) == (None, INCOMPLETE)
    assert [panel["passed"] for panel in document["panels"]] == [None, True, None]
    assert [pair.error for pair in check.scores.missing] == ["no connection"]
    # Nor if other comparisons have all of their answers.
    whole = check_set(Asked(by_grey), grey(20, 21, 22), least=0.5)
    for both in (whole.with_lower(check), check.with_lower(whole)):
        assert both.unsure == (0, 2)


def test_of_panels_that_are_equally_low_none_is_the_odd_one_out() -> None:
    check = check_set(Asked(by_grey), grey(20, 120), least=0.5)
    assert (check.passed, check.odd_one_out, check.to_dict()["odd_one_out"]) == (False, None, None)
    assert "these panels do not belong together" in check_lines(check, judge="grey")[-2]


def test_at_the_threshold_a_panel_passes() -> None:
    (score,) = {panel.score for panel in check_set(Asked(by_grey), grey(20, 30), least=0.5).panels}
    assert score is not None
    assert check_set(Asked(by_grey), grey(20, 30), least=score).passed
    for least in (-0.1, 2, math.nan):
        with pytest.raises(ValueError, match=f"least {least}"):
            check_set(Asked(by_grey), grey(20, 30), least=least)


def test_the_page_is_whole() -> None:
    result = check_set(Asked(by_grey), grey(20, 20, 20, 120), least=0.5, names=["a<b", "b", "p.png[3]", "d"])
    page = check_page(result, judge="grey")
    assert "Odd one out: d" in page
    assert "a&lt;b" in page
    assert len(result.controls) == 6
    assert check_lines(result, judge="grey")[-1].endswith("6 of 6 controls passed.")
    assert "Panel 3" in page
    marked = re.findall(r'<figure class="failed">.*?</figure>', page, flags=re.DOTALL)
    assert [re.findall(r'alt="(.*?)"', figure) for figure in marked] == [["d"]]
    assert "uncalibrated" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
