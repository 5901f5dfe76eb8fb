"""What makes two images one, and what a judge remembers of the last call."""

from __future__ import annotations

import pytest
from judges import build, panels, plain_p_yes, processor_of_any_size
from PIL import Image

from pacorl.core import questions
from pacorl.judge.images import DistinctImage
from pacorl.judge.local import LocalJudge
from pacorl.types import Question


def asked_of(*images: Image.Image) -> Question:
    return Question(images, questions.consistent())


@pytest.fixture(scope="module")
def judge() -> LocalJudge:
    processor = processor_of_any_size()
    return LocalJudge(build("qwen2_5_vl", processor).double().train(), processor)


def test_images_of_one_shape_and_pixels_are_one() -> None:
    wide, high, same = (DistinctImage.of(Image.new("RGB", size), name="it") for size in ((16, 4), (4, 16), (16, 4)))
    assert wide == same != high
    assert len({wide, high, same}) == 2


def test_a_judge_neither_trains_nor_learns(judge: LocalJudge) -> None:
    assert not judge.model.training
    assert not any(weight.requires_grad for weight in judge.model.parameters())


def test_images_of_one_area_and_two_shapes_have_positions_of_their_own(judge: LocalJudge) -> None:
    wide, high = Image.linear_gradient("L").resize((96, 64)), Image.linear_gradient("L").resize((64, 96))
    together = [verdict.p_yes for verdict in judge.verdicts([asked_of(wide), asked_of(high)])]
    apart = [judge.verdicts([asked_of(image)])[0].p_yes for image in (wide, high)]
    assert together == pytest.approx(apart, abs=1e-10)


@pytest.mark.parametrize(("family", "tolerance"), [("qwen2_5_vl", 1e-10), ("qwen3_5", 1e-5)])
def test_questions_below_beginnings_of_two_lengths_are_answered_as_alone(family: str, tolerance: float) -> None:
    """Two first images, the one longer, with two and with three second ones: keys are padded beside each other, and
    states are of whole runs alone."""
    processor = processor_of_any_size()
    judge = LocalJudge(build(family, processor).double(), processor)
    (long, short), seconds = panels(2, sizes=[(128, 128), (128, 80)]), panels(3, sizes=[(48, 48)])
    pairs = [(long, seconds[0]), (long, seconds[1]), *((short, second) for second in seconds)]
    asked = [Question(pair, questions.same_theme("a red hero")) for pair in pairs]
    together = [verdict.p_yes for verdict in judge.verdicts(asked)]
    apart = [plain_p_yes(judge.model, processor, question) for question in asked]
    assert together == pytest.approx(apart, abs=tolerance)
    assert len({round(p_yes, 4) for p_yes in apart}) == 5
