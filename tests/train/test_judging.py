"""The judge that a run's config describes."""

from __future__ import annotations

import pytest
import torch
from fake_server import FakeServer, p_of_images
from PIL import Image

from pacorl.core.questions import consistent
from pacorl.data.characters import all_panels, draw
from pacorl.judges.http.judge import HttpOptions
from pacorl.judges.judge import VARIANTS, close_judge
from pacorl.judges.local import LocalJudge, LocalOptions
from pacorl.train.judging import load_judge, reach_judge
from pacorl.types import Question

PANELS = tuple(draw(panel, 32) for panel in all_panels()[:4000:3000])
PAIR = Question(PANELS, consistent())


def local(**keys: bool) -> LocalJudge:
    config = LocalOptions(checkpoint="tiny", dtype="float32", **keys)
    judge = load_judge(config, device=torch.device("cpu"))
    assert isinstance(judge, LocalJudge)
    return judge


def test_a_judge_of_this_process_asks_in_both_orders_where_the_config_says_so() -> None:
    there, back = local().verdicts([PAIR, Question(PANELS[::-1], PAIR.text)])
    (both,) = local(symmetric=True).verdicts([PAIR])
    assert (there.order_gap, both.p_yes) == (None, pytest.approx((there.p_yes + back.p_yes) / 2, abs=1e-6))
    assert both.order_gap == pytest.approx(abs(there.p_yes - back.p_yes), abs=1e-6)


def test_a_judge_of_this_process_adds_up_spellings_where_the_config_says_so() -> None:
    tokenizer = local().processor.tokenizer
    known = tuple(
        tuple(ids[0] for word in words if len(ids := tokenizer.encode(word, add_special_tokens=False)) == 1)
        for words in VARIANTS
    )
    judge = local(variants=True)
    assert (judge.yes_ids, judge.no_ids) == known
    assert (local().yes_ids, local().no_ids) == tuple(ids[:1] for ids in known)


def test_a_judge_over_http_does_both_too() -> None:
    red, blue = (Image.new("RGB", (8, 6), colour) for colour in ("red", "blue"))
    with FakeServer(tokens={"Yes": [7], "yes": [17], "No": [9]}).running() as server:
        keys = {"backend": "http", "checkpoint": server.url, "model": "judge"}
        judge = reach_judge(HttpOptions(**keys, symmetric=True, variants=True), processes=1)
        assert judge is not None
        both, alone = judge.verdicts([Question((red, blue), "Same?"), Question((red,), "Red?")])
        close_judge(judge)
    there, back = p_of_images([red, blue], "Same?"), p_of_images([blue, red], "Same?")
    assert there != back
    assert both.p_yes == pytest.approx((there + back) / 2, abs=1e-12)
    assert both.order_gap == pytest.approx(abs(there - back), abs=1e-12)
    assert (alone.p_yes, alone.order_gap) == (pytest.approx(p_of_images([red], "Red?"), abs=1e-12), None)
    assert {tuple(chat["logprob_token_ids"]) for chat in server.chats} == {(7, 17, 9)}
