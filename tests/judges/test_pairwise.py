from __future__ import annotations

from PIL import Image

from pacorl.judges.pairwise import both_orders
from pacorl.types import Question, Verdict

FIRST, SECOND = (Image.new("L", (4, 4), shade) for shade in (10, 200))


def test_the_mean_and_the_gap_of_both_orders_in_one_call() -> None:
    calls = []

    def ask(questions: list[Question]) -> list[Verdict]:
        calls.append(questions)
        return [Verdict(0.9 if question.images[0] is FIRST else 0.4) for question in questions]

    pair, single = Question((FIRST, SECOND), "Same?"), Question((SECOND,), "A hero?")
    assert both_orders(ask, [single, pair]) == [Verdict(0.4), Verdict(0.65, order_gap=0.5)]
    assert [[question.images for question in call] for call in calls] == [
        [(SECOND,), (FIRST, SECOND), (SECOND, FIRST)],
    ]


def test_a_pair_is_missing_where_one_order_is() -> None:
    said = [Verdict(0.5), Verdict(None, "no answer")]
    assert both_orders(lambda _: said, [Question((FIRST, SECOND), "Same?")]) == [Verdict(None, "no answer")]
