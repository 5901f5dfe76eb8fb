"""A person's rankings as a reward: laid out whole, waited for, never asked twice, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from pacorl.io.documents import write_json
from pacorl.rewards.human import (
    HumanRanking,
    asked_groups,
    prepare,
    read_group,
    read_ranks,
    scores_of_ranks,
    write_ranks,
)
from pacorl.rewards.reward import RewardError
from pacorl.types import Grid, Prompt

HERO = Prompt(0, "a hero in four scenes", theme="a hero", grid=Grid(2, 2), panels=("a", "b", "c", "d"))
FOX = Prompt(1, "a fox")


def images(*reds: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (red, 0, 0)) for red in reds]


@pytest.mark.parametrize(
    ("ranks", "scores"),
    [
        ([1, 2, 3], [1.0, 0.5, 0.0]),
        ([3, 1, 2], [0.0, 1.0, 0.5]),
        ([1, 1, 2], [0.75, 0.75, 0.0]),
        ([1, 1, 1], [0.5, 0.5, 0.5]),
        ([1, 7, 7, 7], [1.0, 1 / 3, 1 / 3, 1 / 3]),
        ([4], [0.5]),
    ],
)
def test_ranks_are_scores_and_ties_share_their_mean(ranks, scores):
    assert scores_of_ranks(ranks) == pytest.approx(scores)


def test_a_round_is_waited_for_as_a_whole(tmp_path):
    reward = HumanRanking(str(tmp_path))
    first = reward.begin([HERO, HERO], images(1, 2))
    assert asked_groups(tmp_path) == [], "of a group that may go on nothing is shown"
    second = reward.begin([HERO, FOX], images(3, 4))
    (hero,) = asked_groups(tmp_path)
    assert read_group(tmp_path, hero) == {
        "prompt": HERO.text,
        "theme": "a hero",
        "panels": list("abcd"),
        "grid": "2x2",
        "images": 3,
    }
    third = reward.begin([FOX], images(5))
    write_ranks(tmp_path, hero, [1, 3, 2])
    assert first() is None
    _, fox = asked_groups(tmp_path)
    write_ranks(tmp_path, hero, [3, 1, 2])  # mended before the round ends
    assert first() is second() is third() is None
    write_ranks(tmp_path, fox, [2, 1])
    assert (first(), second(), third()) == ([0.0, 1.0], [0.5, 0.0], [1.0])
    # The next round begins anew, also with the prompt that the last one ended with.
    reward.begin([FOX, FOX], images(6, 7))()
    (again,) = asked_groups(tmp_path)
    assert read_ranks(tmp_path, again) == []
    with pytest.raises(ValueError, match="is not of this round any more"):
        write_ranks(tmp_path, fox, [1, 2])


def test_nobody_is_asked_twice_by_a_run_that_was_stopped(tmp_path):
    reward = HumanRanking(str(tmp_path))
    scores = reward.begin([FOX, FOX], images(1, 2))
    assert scores() is None
    (group,) = asked_groups(tmp_path)
    write_ranks(tmp_path, group, [2, 1])
    prepare(tmp_path)
    assert asked_groups(tmp_path) == []
    again = HumanRanking(str(tmp_path))
    assert again.begin([FOX, FOX], images(1, 2))() == [0.0, 1.0]
    assert again.begin([FOX, FOX], images(2, 1))() is None, "other images are another group"


def test_outside_of_training_nobody_is_asked(tmp_path):
    assert HumanRanking(str(tmp_path))([HERO, FOX], images(1, 2)) == [0.5, 0.5]
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch):
    reward = HumanRanking(str(tmp_path))
    scores = reward.begin([FOX, FOX], images(1, 2))
    assert scores() is None
    (group,) = asked_groups(tmp_path)
    for name, ranks, fault in [
        (group, [1], "the group has 2 images, and 1 ranks are given"),
        (group, [0, 1], r"ranks are whole numbers from 1, one per image, got \[0, 1\]"),
        (group, [], "ranks are whole numbers"),
        ("../x", [1, 2], "is not of this round any more"),
    ]:
        with pytest.raises(ValueError, match=fault):
            write_ranks(tmp_path, name, ranks)
    write_json(Path(tmp_path / group / "ranks.json"), [1, True])
    with pytest.raises(ValueError, match="ranks are whole numbers"):
        scores()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RewardError, match="this run has 4 processes; launch one"):
        reward.check([FOX])
