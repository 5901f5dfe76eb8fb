"""ConsistencyRank's arithmetic against scipy and against counting by hand, on every pair of orders of four."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from pacorl.core.ranking import Interval, bootstrap, difference, order_of, rank_agreement

ORDERS = list(permutations(range(4)))


def counted(predicted: tuple[int, ...], true: tuple[int, ...]) -> dict[str, float]:
    """The same measures from their definitions: pairs of candidates, distances, places."""
    place, truth = [predicted.index(c) for c in range(4)], [true.index(c) for c in range(4)]
    pairs = [(a, b) for a in range(4) for b in range(4) if a < b]
    agree = sum((place[a] - place[b]) * (truth[a] - truth[b]) > 0 for a, b in pairs)
    listed = sum((predicted[a] - predicted[b]) * (true[a] - true[b]) > 0 for a, b in pairs)
    return {
        "accuracy": sum(predicted[i] == true[i] for i in range(4)) / 4,
        "rank_tau": (2 * agree - 6) / 6,
        "order_tau": (2 * listed - 6) / 6,
        "rank_rho": float(np.corrcoef(place, truth)[0, 1]),
        "order_rho": float(np.corrcoef(predicted, true)[0, 1]),
        "top1_bottom1": ((predicted[0] == true[0]) + (predicted[3] == true[3])) / 2,
    }


def test_every_pair_of_orders_of_four_by_hand_and_by_scipy() -> None:
    taus = rhos = 0
    for predicted in ORDERS:
        for true in ORDERS:
            found = rank_agreement(predicted, true)
            assert found == pytest.approx(counted(predicted, true), abs=1e-12), (predicted, true)
            if true in ORDERS[:2]:  # scipy takes a millisecond for each
                assert found["order_tau"] == pytest.approx(kendalltau(predicted, true).statistic, abs=1e-12)
                assert found["order_rho"] == pytest.approx(spearmanr(predicted, true).statistic, abs=1e-12)
                ranks = np.argsort(predicted), np.argsort(true)
                assert found["rank_tau"] == pytest.approx(kendalltau(*ranks).statistic, abs=1e-12)
                assert found["rank_rho"] == pytest.approx(spearmanr(*ranks).statistic, abs=1e-12)
            taus += abs(found["order_tau"] - found["rank_tau"]) > 1e-9
            rhos += abs(found["order_rho"] - found["rank_rho"]) > 1e-9
    assert (taus, rhos) == (296, 328)


def test_orders_are_those_of_the_released_evaluation_ties_included() -> None:
    assert order_of([0.1, 0.9, 0.4, 0.2]) == (1, 2, 3, 0)
    assert order_of([0.5, 0.5, 0.7, 0.5]) == tuple(np.argsort([0.5, 0.5, 0.7, 0.5], kind="stable")[::-1])
    assert order_of([0.5, 0.5, 0.7, 0.5]) == (2, 3, 1, 0)


def test_an_interval_leaves_half_of_what_it_may_miss_at_each_end() -> None:
    """Of 100 halves it is the normal one: .5 ± 1.96·.05."""
    values = np.repeat([0.0, 1.0], 50)
    (found,) = bootstrap(range(100), lambda chosen: np.array([values[chosen].mean()]))
    assert (found.low, found.high) == (pytest.approx(0.402, abs=0.012), pytest.approx(0.598, abs=0.012))


def test_groups_are_drawn_whole() -> None:
    values = np.repeat(np.arange(8) % 4, 25)
    (single,) = bootstrap(range(200), lambda chosen: np.array([values[chosen].mean()]))
    (grouped,) = bootstrap([n // 25 for n in range(200)], lambda chosen: np.array([values[chosen].mean()]))
    assert single.mean == grouped.mean == 1.5
    assert single.low is not None
    assert grouped.low is not None
    assert grouped.low < single.low - 0.3


def test_a_draw_without_a_figure_is_left_out() -> None:
    (found,) = bootstrap(range(8), lambda chosen: np.array([1.0 if 0 in chosen else np.nan]))
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)


def test_fewer_than_eight_groups_have_no_interval() -> None:
    """Of two groups it would be their two values, and [0.500, 0.500] where these are equal."""
    values = np.repeat([0.0, 1.0], 8)
    for count in (7, 8):
        (found,) = bootstrap([*range(count)] * 2, lambda chosen: np.array([values[chosen].mean()]))
        assert (found.low is None, found.groups) == (count < 8, count)


def test_a_difference_of_two_figures_is_paired() -> None:
    """The items differ much, and the sides by a constant: the difference is certain."""
    before = np.random.default_rng(0).normal(size=20)
    sides = [bootstrap(range(20), lambda rows, v=v: np.array([v[rows].mean()]))[0] for v in (before, before + 0.25)]
    found = difference(*sides)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    assert sides[0].low is not None
    assert sides[0].high is not None
    assert sides[0].high - sides[0].low > 0.5
    few = [bootstrap(range(4), lambda rows, v=v: np.array([v[rows].mean()]))[0] for v in (before, before + 0.25)]
    assert difference(*few) == Interval(pytest.approx(0.25), groups=4)
