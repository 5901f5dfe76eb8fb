"""The judge's weighted likelihood against the paper's sum, token by token."""

import pytest
import torch

from pacorl.core.objectives.decision_weighted import decision_weighted

LOG_PROB = torch.tensor([[9.0, -0.5, -1.0, -2.0, 9.0], [9.0, 9.0, -0.25, -3.0, 9.0], [9.0, -4.0, 9.0, 9.0, 9.0]])
ANSWER = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0]]).bool()


def by_hand(rows: list[list[float]], alpha: float | None) -> float:
    losses = []
    for row in rows:
        n = len(row)
        first = 1 / n if alpha is None else (1.0 if n == 1 else alpha)
        rest = sum((1 - first) / (n - 1) * value for value in row[1:])
        losses.append(-(first * row[0] + rest))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("alpha", [None, 0.01, 0.1, 0.9, 1.0])
def test_it_is_the_papers_sum(alpha: float | None) -> None:
    loss = decision_weighted(LOG_PROB.double(), ANSWER, alpha=alpha)
    expected = by_hand([[-0.5, -1.0, -2.0], [-0.25, -3.0], [-4.0]], alpha)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_a_sample_without_an_answer_is_named() -> None:
    with pytest.raises(ValueError, match="sample 1 of the batch has no answer tokens"):
        decision_weighted(LOG_PROB, ANSWER & torch.tensor([[True], [False], [True]]), alpha=0.1)


def test_the_sum_and_the_released_form_by_hand() -> None:
    """Released: a further token weighs (1 − α)·n/(n − 1), and the batch is divided by all its answer tokens."""
    answer = torch.tensor([[False, True, True, True], [False, True, True, False]])
    log_prob = -torch.tensor([[0.0, 1.0, 2.0, 4.0], [0.0, 3.0, 5.0, 0.0]])
    loss = decision_weighted(log_prob, answer, alpha=0.1, form="sum")
    assert loss.item() == pytest.approx((0.1 * 1 + 0.9 * 6 + 0.1 * 3 + 0.9 * 5) / 2)
    released = decision_weighted(log_prob, answer, alpha=0.1, form="released")
    assert released.item() == pytest.approx((0.1 * 1 + 0.9 * 1.5 * 6 + 0.1 * 3 + 0.9 * 2 * 5) / 5)
    plain = decision_weighted(log_prob, answer, alpha=None, form="released")
    assert plain.item() == pytest.approx((1 + 2 + 4 + 3 + 5) / 5)
