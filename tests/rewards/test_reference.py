"""The reference reward: against the judge's answers in plain Python, pasted references, missing answers, credit."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from asked import Answer, Asked
from PIL import Image

from pacorl.core import questions
from pacorl.core.grid import join, split
from pacorl.records.characters import characters_of
from pacorl.rewards.consistency import Consistency, PanelMatch
from pacorl.rewards.reference import Reference
from pacorl.rewards.reward import PanelScores, RewardError, panel_scores_of
from pacorl.types import Character, Grid, Prompt, Question

SIDE = 16


def shade(image: Image.Image) -> int:
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return int(pixel[0])


def flat(value: int, *, side: int = SIDE) -> Image.Image:
    return Image.new("RGB", (side, side), (value, 0, 0))


def by_shade(question: Question) -> float:
    """Any value from 0.1 to 0.9 that depends on the text and on the first pixels."""
    shades = [shade(image) for image in question.images]
    return 0.1 + 0.8 * ((sum(map(ord, question.text)) + 7 * shades[0] + 3 * shades[-1]) % 101) / 101


@pytest.fixture
def cast(tmp_path: Path) -> tuple[Character, Character]:
    """Ann with two images, Bob with one."""
    for name, value in {"ann1": 10, "ann2": 20, "bob": 30}.items():
        flat(value, side=2 * SIDE).save(tmp_path / f"{name}.png")
    ann = Character("ann", "a cook with a red cap", (tmp_path / "ann1.png", tmp_path / "ann2.png"))
    return ann, Character("old_bob", "", (tmp_path / "bob.png",))


@pytest.fixture
def prompt(cast: tuple[Character, Character]) -> Prompt:
    panels = ("A cook with a red cap stirs.", "Ann and old Bob eat.", "An empty street in Annecy.", "Old Bob sleeps.")
    return Prompt(3, "2x2 grid", grid=Grid(2, 2), panels=panels, characters=cast)


SHEET = join([flat(value) for value in (100, 120, 140, 160)], Grid(2, 2))


def by_hand(prompt: Prompt, answer: Answer) -> list[float]:
    """The panels' scores from the answers to questions asked one by one."""
    ann, bob = prompt.characters
    scores = []
    for panel, characters in zip(split(SHEET, prompt.grid), ([ann], [ann, bob], [], [bob]), strict=True):
        of_characters = []
        for character in characters:
            looks = character.description or character.name.replace("_", " ")
            images = [Image.open(path).resize((SIDE, SIDE)) for path in character.images]
            present = answer(Question((panel,), questions.shows_text(looks)))
            same = [answer(Question((image, panel), questions.same_theme(looks))) for image in images]
            copied = [answer(Question((image, panel), questions.same_pose())) for image in images]
            of_characters.append(present * fmean(same) * (1 - max(copied)))  # type: ignore
        if of_characters:
            scores.append(fmean(of_characters))
    return scores


def test_a_character_without_images_is_not_replaced_by_another(cast: tuple[Character, Character]) -> None:
    prompt = Prompt(0, "Cleo waves", characters=(*cast, Character("cleo", "")))
    assert characters_of(prompt) == [[]]
    with pytest.raises(RewardError, match=r"^prompt 0: 'Cleo waves' has no panel of a character with images, .* give"):
        Reference(Asked(by_shade)).check([prompt])


def test_the_score_is_that_of_plain_python_and_has_parts(prompt: Prompt) -> None:
    judge = Asked(by_shade)
    reward = Reference(judge)
    reward.check([prompt])
    results = panel_scores_of("reference", reward, [prompt, prompt], [SHEET, SHEET])
    first, second, last = (score / 3 for score in by_hand(prompt, by_shade))
    parts = [pytest.approx(first), pytest.approx(second), 0, pytest.approx(last)]
    assert results == [PanelScores(pytest.approx(first + second + last), parts)] * 2
    assert len(judge.questions) == 2 * 16


def test_a_missing_answer_stays_missing(prompt: Prompt) -> None:
    """In its own panel's part and in the whole score."""

    def answer(question: Question) -> float | None:
        asks_bob = "old bob" in question.text
        return None if asks_bob and shade(question.images[-1]) == 160 else by_shade(question)

    reward = Reference(Asked(answer))
    (result,) = reward.panel_scores([prompt], [SHEET])
    assert result.score is None
    assert reward.last_error == "no connection"
    assert isinstance(result, PanelScores)
    assert [part is None for part in result.part_P or ()] == [False, False, False, True]


def looks(question: Question) -> float:
    """Sure of a character drawn at all, nearly sure of one drawn again, and sure of equal pixels."""
    if question.text == questions.same_pose():
        return float(shade(question.images[0]) == shade(question.images[1]))
    if question.text == questions.same_theme("a cook with a red cap"):
        return 1.0 if shade(question.images[0]) == shade(question.images[1]) else 0.8
    return 1.0


def test_a_list_of_separate_images_is_scored_like_their_grid_image(prompt: Prompt) -> None:
    """By every reward that asks about panels; images of several sizes need no grid image."""
    rewards: list[Reference | Consistency | PanelMatch] = [
        reward(Asked(by_shade)) for reward in (Reference, Consistency, PanelMatch)
    ]
    for reward in rewards:
        assert reward([prompt], [split(SHEET, prompt.grid)]) == reward([prompt], [SHEET])
    sizes = [flat(100, side=side) for side in (8, 16, 24, 40)]
    assert all(reward([prompt], [sizes])[0] is not None for reward in rewards)
    with pytest.raises(ValueError, match="a 2x2 grid has 4 panels, and 3 images are given; give one each"):
        rewards[0]([prompt], [sizes[:3]])
