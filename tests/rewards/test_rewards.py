"""What is asked of the judge, how often, and what becomes of its answers."""

import math
from collections.abc import Sequence
from threading import Event

import numpy as np
import pytest
import torch
from asked import Asked
from PIL import Image
from scored import score
from tiny_sets import draw_grid, panels_of_prompt

from pacorl.core import questions
from pacorl.core.grid import shared_text
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import PanelScores, RewardError, panel_scores_of, refuse, smoke_test, tempered
from pacorl.tiny import world
from pacorl.types import Grid, Prompt, Size

PROMPT = world.set_prompts("dev", 1)[0]
SHEET = draw_grid(panels_of_prompt(PROMPT), PROMPT.grid, 32)


def test_consistency_asks_six_questions_of_a_sheet_of_four() -> None:
    answers = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    judge = Asked(lambda question: next(answers))
    assert Consistency(judge)([PROMPT], [SHEET]) == [pytest.approx(0.35)]
    assert len(judge.questions) == 6
    assert {question.text for question in judge.questions} == {questions.same_theme(shared_text(PROMPT.text))}
    first = judge.questions[0].images
    drawn = [world.draw(panel, 32) for panel in panels_of_prompt(PROMPT)[:2]]
    assert [image.tobytes() for image in first] == [image.tobytes() for image in drawn]


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.2, 0.5, 0.999, 1.0])
def test_a_temperature_divides_the_logit(p: float) -> None:
    logit = torch.logit(torch.tensor(p, dtype=torch.float64))
    assert tempered(p, 4.0) == pytest.approx(float(torch.sigmoid(logit / 4)), abs=1e-12)


class Parts:
    """A reward that returns `given`."""

    def __init__(self, given: object) -> None:
        self.given = given

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float | None]:
        return [1.0] * len(images)

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[PanelScores]:
        return [self.given] * len(images)  # type: ignore[list-item]


PAIR = Prompt(4, "two", grid=Grid(1, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1.0, r"returned 1.0 for prompt 4, 'two'; panel_scores must return PanelScores"),
        (PanelScores(1.0, [0.5]), r"returned 1 parts for 2 panels \(prompt 4, 'two'\)"),
        (PanelScores(1.0, 2), r"returned 2 for 2 panels \(prompt 4, 'two'\)"),  # type: ignore[arg-type]
        (PanelScores(1.0, [0.5, True]), r"returned True for prompt 4"),
        (PanelScores(1.0, [0.5, math.inf]), r"returned inf for prompt 4"),
    ],
)
def test_parts_that_are_none_are_named(given: object, message: str) -> None:
    image = Image.new("RGB", (4, 4))
    with pytest.raises(RewardError, match=f"reward 'mine' {message}"):
        panel_scores_of("mine", Parts(given), [PAIR], [image])
    with pytest.raises(RewardError, match=f"reward 'mine' {message}"):
        smoke_test("mine", Parts(given), [Prompt(3, "one"), PAIR], size=Size(4, 4))  # type: ignore[arg-type]


def test_a_reward_with_one_score_for_every_batch_fails_its_trial() -> None:
    with pytest.raises(RewardError, match="1 scores for 2 images"):
        smoke_test("mine", lambda prompts, images: [0.5], [PAIR], size=Size(4, 4))  # type: ignore[arg-type]


def test_a_reward_that_hangs_in_its_trial_is_given_up() -> None:
    over = Event()
    with pytest.raises(RewardError, match=r"'mine'.* has not returned for 0.2 s"):
        smoke_test("mine", lambda *given: over.wait(60), [PAIR], size=Size(4, 4), seconds=0.2)  # type: ignore[arg-type]
    over.set()


def test_a_fault_names_every_prompt_without_panels() -> None:
    with pytest.raises(RewardError, match=r"prompt 3, prompt 5: 'one' is one image"):
        refuse([Prompt(3, "one"), Prompt(5, "two")], "is one image")


def test_a_score_is_missing_if_one_of_its_parts_is() -> None:
    def found(*parts: object) -> PanelScores:
        return panel_scores_of(
            "mine",
            Parts(PanelScores(1.0, parts)),
            [PAIR],
            [Image.new("RGB", (4, 4))],
            masked=True,  # type: ignore[arg-type]
        )[0]

    part_P = found(np.float32(0.5), 1).part_P
    assert part_P == [0.5, 1.0]
    assert all(type(part) is float for part in part_P)
    assert found(0.5, None) == PanelScores(None, [0.5, None])
    assert math.isnan(found(0.5, math.nan).score or 0.0)


def test_scores_near_one_are_told_apart() -> None:
    """A sure judge's differ by less than single precision resolves there."""
    scores = [1 - 1e-9, 1 - 2e-9]
    prompts, images = [Prompt(0, "a"), Prompt(0, "a")], [Image.new("RGB", (8, 8))] * 2
    table = score({"sure": lambda prompts, images: scores}, prompts, images)
    assert table.score_RB.tolist() == [scores]
