"""The reward of legible text, with stand-ins for its reader."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from pacorl.rewards import ocr
from pacorl.rewards.ocr import Ocr, edits_to_substring, quoted, share_read
from pacorl.testing import check_reward
from pacorl.types import Prompt


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A sign that says "Open 24 h".', ["Open 24 h"]),
        ("The dog's bowl and the cats' bed.", []),
        ("Menus in chalk reading 'Fresh Brew' and ‘Homemade’.", ["Fresh Brew", "Homemade"]),
        ('A “Sweet Treats” board, "!!".', ["Sweet Treats"]),
        ("招牌「咖啡」", ["咖啡"]),
        ("a “first “Open” sign” and ‘shut’", ["Open", "shut"]),
    ],
)
def test_what_is_quoted(text: str, words: list[str]) -> None:
    assert quoted(text) == words


def test_edits_equal_a_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        target, text = ("".join(rng.choice(list("abc"), rng.integers(1, 6))) for _ in range(2))
        pieces = {text[a:b] for a, b in combinations(range(len(text) + 1), 2)} | {""}
        assert edits_to_substring(target, text) == min(levenshtein(target, piece) for piece in pieces)


def levenshtein(first: str, second: str) -> int:
    if not first or not second:
        return len(first) + len(second)
    same = levenshtein(first[1:], second[1:])
    if first[0] == second[0]:
        return same
    return 1 + min(same, levenshtein(first[1:], second), levenshtein(first, second[1:]))


def test_case_spaces_and_other_words_do_not_count() -> None:
    assert share_read("Fresh Brew", "~ today: FRESHBREW, 3.50") == 1.0
    assert share_read("Fresh Brew", "Fresh Crew") == pytest.approx(8 / 9)
    assert share_read("abc", "") == 0.0


def test_ocr_needs_quoted_text() -> None:
    with pytest.raises(ValueError, match="prompt 4"):
        Ocr().check([Prompt(id=4, text="a fox")])


def test_ocr_scores_by_any_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that reads as many letters of a sign as the image is bright."""

    def read(image: Image.Image) -> str:
        return "OPEN NOW"[: int(np.asarray(image)[0, 0, 0]) // 30]

    monkeypatch.setattr(ocr, "open_reader", lambda: read)
    images = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (60, 240, 0, 150)]
    prompts = [Prompt(id=number, text='Signs reading "OPEN NOW" and "NOW".') for number in range(4)]
    reward = Ocr()
    expected = [(2 / 7 + 1 / 3) / 2, 1.0, 0.0, (4 / 7 + 1 / 3) / 2]  # "OP" has the O of NOW, and "OPEN" its N too
    assert reward(prompts, images) == pytest.approx(expected)
    check_reward(reward, prompts, images)
