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
    loss, metrics = decision_weighted(LOG_PROB.double(), ANSWER, alpha=alpha)
    expected = by_hand([[-0.5, -1.0, -2.0], [-0.25, -3.0], [-4.0]], alpha)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert metrics["decision_nll"] == pytest.approx((0.5 + 0.25 + 4) / 3)
    assert metrics["reasons_nll"] == pytest.approx((1.5 + 3.0 + 0.0) / 3)


def test_a_sample_without_an_answer_is_named() -> None:
    with pytest.raises(ValueError, match="sample 1 of the batch has no answer tokens"):
        decision_weighted(LOG_PROB, ANSWER & torch.tensor([[True], [False], [True]]), alpha=0.1)


def released(logits: torch.Tensor, labels: torch.Tensor, alpha: float) -> torch.Tensor:
    """The released code's loss, by its description.

    Cross-entropies of shifted logits, weighted by α at an answer's first token and by (1 − α)·n/(n − 1) at each further
    one; their sum over the batch's answer tokens.
    """
    total, tokens = torch.zeros((), dtype=logits.dtype), 0
    for row, wanted in zip(logits[:, :-1], labels[:, 1:], strict=True):
        positions = (wanted != -100).nonzero()[:, 0].tolist()
        n = len(positions)
        for number, position in enumerate(positions):
            weight = alpha if number == 0 else (1 - alpha) * n / (n - 1)
            total = total - weight * row[position].log_softmax(-1)[wanted[position]]
        tokens += n
    return total / tokens


def test_the_released_form_is_the_released_function_on_random_logits() -> None:
    draw = torch.Generator().manual_seed(0)
    for lengths in ([3, 12, 40], [2], [160, 3]):
        rows, width = len(lengths), max(lengths) + 7
        logits = torch.randn(rows, width, 50, generator=draw, dtype=torch.float64)
        ids = torch.randint(50, (rows, width), generator=draw)
        answer = torch.zeros(rows, width, dtype=torch.bool)
        for row, length in enumerate(lengths):
            answer[row, 4 : 4 + length] = True
        labels = ids.masked_fill(~answer, -100)
        log_prob = torch.zeros(rows, width, dtype=torch.float64)
        log_prob[:, 1:] = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        for alpha in (0.01, 0.1, 0.9):
            found, _ = decision_weighted(log_prob, answer, alpha=alpha, form="released")
            assert found.item() == pytest.approx(released(logits, labels, alpha).item(), abs=1e-6)


def test_the_sum_weighs_every_further_token_alike() -> None:
    answer = torch.tensor([[False, True, True, True], [False, True, True, False]])
    log_prob = -torch.tensor([[0.0, 1.0, 2.0, 4.0], [0.0, 3.0, 5.0, 0.0]])
    loss, _ = decision_weighted(log_prob, answer, alpha=0.1, form="sum")
    assert loss.item() == pytest.approx((0.1 * 1 + 0.9 * 6 + 0.1 * 3 + 0.9 * 5) / 2)
    plain, _ = decision_weighted(log_prob, answer, alpha=None, form="released")
    assert plain.item() == pytest.approx((1 + 2 + 4 + 3 + 5) / 5)
