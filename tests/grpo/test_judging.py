"""The judge that a run's config describes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judges import serving
from PIL import Image

from pacorl.core.questions import consistent
from pacorl.judge import open_judge
from pacorl.judge.judge import JudgeSettings, close_judge
from pacorl.judge.local import LocalJudge
from pacorl.rewards.consistency import Consistency, PanelMatch
from pacorl.tiny import world
from pacorl.tiny.world import all_panels, draw
from pacorl.types import Question

PANELS = tuple(draw(panel, 32) for panel in all_panels()[:4000:3000])
PAIR = Question(PANELS, consistent())


def local(**keys: bool) -> LocalJudge:
    config = JudgeSettings(checkpoint="tiny", **keys)
    judge = open_judge(config, device="cpu")
    assert isinstance(judge, LocalJudge)
    return judge


def test_a_judge_of_this_process_asks_in_both_orders_where_the_config_says_so() -> None:
    there, back = local().verdicts([PAIR, Question(PANELS[::-1], PAIR.text)])
    (both,) = local(symmetric=True).verdicts([PAIR])
    assert (there.order_gap, both.p_yes) == (None, pytest.approx((there.p_yes + back.p_yes) / 2, abs=1e-6))
    assert both.order_gap == pytest.approx(abs(there.p_yes - back.p_yes), abs=1e-6)


# --- a reward judges whatever it is shown -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_server() -> Iterator[str]:
    """The built-in server over the tiny judge."""
    with serving({"tiny": LocalJudge.from_pretrained("tiny")}) as url:
        yield f"{url}/v1"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "http"])
def test_noise_is_never_missing_in_a_reward(backend: str, tiny_server: str) -> None:
    options = {
        "local": JudgeSettings(checkpoint="tiny"),
        "http": JudgeSettings(checkpoint=f"{tiny_server}#tiny"),
    }
    judge = open_judge(options[backend], device="cpu")
    prompts = world.set_prompts("train", 2)
    noise = [Image.effect_noise((64, 64), sigma).convert("RGB") for sigma in (30, 90)]
    scores = [reward(prompts, noise) for reward in (Consistency(judge), PanelMatch(judge))]
    close_judge(judge)
    assert all(score is not None and 0 < score < 0.2 for several in scores for score in several), scores
