from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from asked import Asked
from PIL import Image

from pacorl.gate.paco_reward import PacoReward
from pacorl.gate.panels import open_panels
from pacorl.gate.scores import UNCALIBRATED, score_set
from pacorl.io.images import ImageError
from pacorl.types import Question

SHADES = [100, 110, 240, 105]
IMAGES = [Image.new("RGB", (16, 16), (shade, shade, shade)) for shade in SHADES]


def grey_judge(*, silent_about: str = "nothing") -> Any:
    """Says how alike two grey images are; a brighter first image costs .1."""

    def answer(question: Question) -> float | None:
        first, second = (image.getpixel((0, 0))[0] for image in question.images)
        p = 1 - abs(first - second) / 255 - 0.1 * (first > second)
        return None if silent_about in question.text else p

    judge: Any = Asked(answer)
    judge.verdicts = Mock(wraps=judge.verdicts)
    return judge


def p(first: int, second: int) -> float:
    return 1 - abs(SHADES[first] - SHADES[second]) / 255 - 0.1 * (SHADES[first] > SHADES[second])


def test_a_set_is_scored_in_one_call_pair_by_pair() -> None:
    judge = grey_judge()
    scores = score_set(judge, IMAGES)
    assert judge.verdicts.call_count == 1
    assert len(judge.questions) == len(scores.pairs) == 6
    assert scores.matrix[0][1] == scores.matrix[1][0] == pytest.approx(p(0, 1))
    assert [scores.matrix[i][i] for i in range(4)] == [None] * 4
    first, *_, note = str(scores).splitlines()
    assert (first, note) == (f" {p(0, 1):.4f}  image 1  image 2", UNCALIBRATED)
    assert not any(pair.reasons for pair in scores.pairs), "words cost a whole answer each"
    assert scores.mean == pytest.approx(sum(p(a, b) for a, b in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]) / 6)


def test_a_pair_without_an_answer_has_no_score() -> None:
    scores = score_set(grey_judge(silent_about="consistency"), IMAGES)
    assert scores.mean is None
    assert len(scores.missing) == 6
    assert scores.pairs[0].error == "no connection"


def test_ranking_compares_with_the_first_only() -> None:
    scores = score_set(grey_judge(), IMAGES, names="wxyz", ranking=True)
    assert [scores.names[pair.second] for pair in scores.ranked] == ["z", "x", "y"]
    assert scores.matrix[1][2] is None
    assert str(scores).splitlines()[0] == f" {p(0, 3):.4f}  w  z"


# --- images ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, image in zip("abcd", IMAGES, strict=True):
        image.save(tmp_path / f"{name}.png")
    (tmp_path / "bad.png").write_bytes(b"hello")
    return tmp_path


def test_an_unusable_image_is_named(folder: Path) -> None:
    for name in ("bad.png", "none.png"):
        with pytest.raises(ValueError, match=name):
            open_panels([folder / "a.png", folder / name])


def test_a_page_is_cut_into_panels(folder: Path) -> None:
    Image.new("RGB", (64, 32)).save(folder / "page.png")
    names, panels, _ = open_panels([folder / "page.png"], grid="1x2")
    assert names == (f"{folder}/page.png[1]", f"{folder}/page.png[2]")
    assert [panel.size for panel in panels] == [(32, 32)] * 2
    with pytest.raises(ImageError, match=r"panel 1 of .*page\.png"):
        open_panels([folder / "page.png"], grid="16x1")


# --- the Python door -------------------------------------------------------------------------------------------


def test_a_script_scores_two_images(folder: Path) -> None:
    reward = PacoReward(grey_judge())
    assert reward.score(folder / "a.png", IMAGES[1]) == pytest.approx(p(0, 1))
    assert reward.score_set([folder / "a.png", *IMAGES[1:]], ranking=True).ranked[0].second == 3
    with pytest.raises(ValueError, match="one path"):
        reward.score_set("abc")
    silent = grey_judge(silent_about="Do")
    with pytest.raises(RuntimeError, match="no connection"):
        PacoReward(silent).score(*IMAGES[:2])
    silent.is_silent = True
    with pytest.raises(ConnectionError, match="no connection"):
        PacoReward(silent).score(*IMAGES[:2])


@pytest.mark.parametrize("options", [{}, {"theme": "a fox"}, {"ranking": True}, {"reasons": True}])
def test_a_script_has_the_scores_of_the_command_by_every_option(options: dict[str, Any]) -> None:
    judge = grey_judge()
    assert PacoReward(judge).score_set(IMAGES, **options) == score_set(judge, IMAGES, **options)


def test_pairs_are_scored_together_each_by_its_theme(folder: Path) -> None:
    judge = grey_judge(silent_about="blue")
    pairs = [(folder / "a.png", IMAGES[1]), (IMAGES[2], IMAGES[3]), ("no.png", IMAGES[0]), (IMAGES[0], IMAGES[1])]
    verdicts = PacoReward(judge).score_pairs(pairs, themes=["red", "blue", "", ""])
    assert judge.verdicts.call_count == 1
    assert [verdict.p_yes for verdict in verdicts] == [pytest.approx(p(0, 1)), None, None, pytest.approx(p(0, 1))]
    assert verdicts[1].error == "no connection"
    assert "no.png" in verdicts[2].error
    with pytest.raises(ValueError, match="4 pairs and 1 themes"):
        PacoReward(judge).score_pairs(pairs, themes=["red"])


def test_many_pairs_are_asked_in_several_calls_and_counted() -> None:
    judge, counts = grey_judge(), list[tuple[int, int]]()
    images = [Image.new("RGB", (8, 8), (shade,) * 3) for shade in range(30)]
    scores = score_set(judge, images, progress=lambda done, total: counts.append((done, total)))
    assert [len(call.args[0]) for call in judge.verdicts.call_args_list] == [256, 179]
    assert counts == [(0, 435), (256, 435), (435, 435)]
    assert len(scores.pairs) == 435
