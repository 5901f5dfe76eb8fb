"""The judge over HTTP against a real vLLM, compared with transformers in this process (both fp32)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from pacorl.core.questions import consistent, same_theme
from pacorl.judge.http import HttpJudge
from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import all_panels, draw
from pacorl.types import Question

if TYPE_CHECKING:
    from conftest import Served

pytestmark = pytest.mark.nightly

SIDE = 32  # of which no image processor changes a pixel, so that no two resizers are compared
PANELS = [draw(panel, SIDE) for panel in all_panels()[::5000]]
QUESTIONS = [
    Question(pair, text)
    for pair in itertools.permutations(PANELS, 2)
    for text in (consistent(), same_theme("red round hero, crown, sunset"))
]


def p_yes(judge: LocalJudge) -> list[float]:
    return [verdict.p_yes for verdict in judge.verdicts(QUESTIONS) if verdict.p_yes is not None]


def test_the_base_agrees_with_transformers(served: Served) -> None:
    with HttpJudge.connect(f"{served.url}#judge") as judge:
        assert [v.p_yes for v in judge.verdicts(QUESTIONS)] == pytest.approx(p_yes(served.base), abs=1e-4)


def test_the_adapter_agrees_with_merged_weights(served: Served) -> None:
    with HttpJudge.connect(f"{served.url}#judge-lora") as judge:
        found = [v.p_yes for v in judge.verdicts(QUESTIONS)]
    assert found == pytest.approx(p_yes(served.merged), abs=1e-4)
    changed = max(abs(a - b) for a, b in zip(p_yes(served.base), p_yes(served.merged), strict=True))
    assert changed > 1e-2


def test_token_ids_are_those_of_the_tokenizer(served: Served) -> None:
    with HttpJudge.connect(f"{served.url}#judge") as judge:
        assert judge.ids == (served.base.yes_ids, served.base.no_ids)


def test_read_by_text_a_verdict_is_right_or_missing(served: Served) -> None:
    with HttpJudge.connect(f"{served.url}#judge") as judge:
        judge.ids = None
        for found, expected in zip(judge.verdicts(QUESTIONS), p_yes(served.base), strict=True):
            assert found.error or found.p_yes == pytest.approx(expected, abs=1e-3)
