"""Measures of a judge against scikit-learn and sums by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from pacorl.judge_training.loop import auc, decision_metrics, read_answers


def test_auc_is_scikit_learns_ties_included() -> None:
    rng = np.random.default_rng(0)
    for size in (5, 50, 500):
        p = rng.random(size).round(1)
        y = rng.random(size) < 0.4
        y[:2] = True, False
        assert auc(p, y) == pytest.approx(roc_auc_score(y, p), abs=1e-12)
    assert math.isnan(auc(np.array([0.1, 0.9]), np.array([True, True])))


def test_order_gaps_of_both_signs_add_up() -> None:
    measured = decision_metrics(np.array([0.2, 0.4]), np.array([True, False]), swapped_N=np.array([0.5, 0.3]))
    assert measured["order_gap"] == pytest.approx(0.2)


class Scripted:
    """A model that says given logits, at those positions that it is asked for."""

    def __init__(self, logits_BLV: Tensor) -> None:
        self.logits_BLV = logits_BLV

    def __call__(self, *, logits_to_keep: Tensor, **inputs: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits_BLV[logits_to_keep])


def test_answers_are_read_one_position_before_them() -> None:
    """Against a softmax over all positions; the second answer is of one token."""
    logits_BLV = torch.randn(2, 6, 10, dtype=torch.float64)
    ids_BL = torch.randint(10, (2, 6))
    answer_BL = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    log_prob_BL, p_yes_B = read_answers(Scripted(logits_BLV), {"input_ids": ids_BL, "answer": answer_BL}, yes=7, no=3)
    for row, positions in ((0, (3, 4, 5)), (1, (2,))):
        for position in range(6):
            said = logits_BLV[row, position - 1].log_softmax(-1)[ids_BL[row, position]]
            assert float(log_prob_BL[row, position]) == pytest.approx(float(said) if position in positions else 0.0)
        yes, no = logits_BLV[row, positions[0] - 1, [7, 3]]
        assert float(p_yes_B[row]) == pytest.approx(1 / (1 + math.exp(no - yes)))
