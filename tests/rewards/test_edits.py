"""√(kept·followed), and what becomes of a missing half."""

from pathlib import Path

import pytest
from asked import Asked
from PIL import Image

from pacorl.core import questions
from pacorl.rewards.consistency import EditConsistency
from pacorl.types import Prompt


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    Image.new("RGB", (40, 20), "red").save(tmp_path / "a.png")
    return Prompt(0, "Paint it blue.", sources=(tmp_path / "a.png",))


def judged(prompt: Prompt, kept: float | None, followed: float | None, **options: float) -> list[float | None]:
    answers = {questions.edit_kept(prompt.text): kept, questions.edit_followed(prompt.text): followed}
    judge = Asked(lambda question: answers[question.text])
    return EditConsistency(judge, **options)([prompt], [Image.new("RGB", (80, 40), "blue")])


def test_the_score_is_the_geometric_mean(prompt: Prompt) -> None:
    assert judged(prompt, 0.9, 0.4) == [pytest.approx(0.6)]
    assert judged(prompt, 1.0, 0.0) == [0.0]
    assert judged(prompt, 0.9, 0.1, temperature=2) == [pytest.approx((0.75 * 0.25) ** 0.5)]


def test_the_judge_sees_the_source_first_at_the_edit_s_size(prompt: Prompt) -> None:
    judge = Asked(lambda question: 0.5)
    reward = EditConsistency(judge)
    edited = Image.new("RGB", (80, 40), "blue")
    assert reward([prompt, prompt], [edited, edited]) == [0.5, 0.5]
    assert len(judge.questions) == 4
    for question in judge.questions:
        source, second = question.images
        assert source.size == (80, 40)
        assert source.getpixel((0, 0)) == (255, 0, 0)
        assert second is edited
