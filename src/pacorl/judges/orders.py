"""Asking about a pair in both orders: a judge is trained on ordered pairs, and consistency has no order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pacorl.types import Question, Verdict


def both_orders(ask: Callable[[Sequence[Question]], Sequence[Verdict]], questions: Sequence[Question]) -> list[Verdict]:
    """Asks about the images in both orders, in one call: the mean, with the gap between the orders.

    A question about one image is asked once. A verdict is missing where either order's is.
    """
    return mean_of_orders(questions, ask(with_turned(questions)))


def with_turned(questions: Sequence[Question]) -> list[Question]:
    """The questions, then those about several images once more with their order reversed."""
    several = [question for question in questions if len(question.images) > 1]
    return [*questions, *(replace(question, images=question.images[::-1]) for question in several)]


def mean_of_orders(questions: Sequence[Question], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts of `with_turned(questions)` → one per question."""
    turned = iter(verdicts[len(questions) :])
    return [
        _mean(verdict, next(turned)) if len(question.images) > 1 else verdict
        for question, verdict in zip(questions, verdicts[: len(questions)], strict=True)
    ]


def _mean(one: Verdict, other: Verdict) -> Verdict:
    if one.p_yes is None or other.p_yes is None:
        errors = "; ".join(dict.fromkeys(filter(None, (one.error, other.error))))
        return Verdict(None, errors, declined=one.declined or other.declined)
    return Verdict((one.p_yes + other.p_yes) / 2, order_gap=abs(one.p_yes - other.p_yes))
