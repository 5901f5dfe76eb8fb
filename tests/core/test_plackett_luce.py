"""Scores and skills against the density written out by its definition, against simulated people, and at the edges."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import exp, log
from statistics import NormalDist

import numpy as np
import pytest
from scipy.optimize import minimize

from pacorl.core.plackett_luce import PRIOR_DEVIATION, Choices, fit

Ranking = tuple[int, list[list[int]]]


def drawn(scores: list[float], skills: list[float], *, count: int, size: int, seed: int = 0) -> list[Ranking]:
    """Rankings of people who follow the model: the Gumbel noise's order has Plackett and Luce's probabilities."""
    rng = np.random.default_rng(seed)
    rankings = []
    for number in range(count):
        items = rng.choice(len(scores), size, replace=False)
        utility = skills[number % len(skills)] * np.array(scores)[items] + rng.gumbel(size=size)
        rankings.append((number % len(skills), [[int(item)] for item in items[np.argsort(-utility)]]))
    return rankings


def log_density(score: np.ndarray, rankings: list[Ranking], skills: np.ndarray) -> float:
    """By the definition, choice by choice."""
    total = -float((score**2).sum()) / (2 * PRIOR_DEVIATION**2)
    for person, tiers in rankings:
        logit = skills[person] * score
        for place, tier in enumerate(tiers):
            worse = [item for lower in tiers[place + 1 :] for item in lower]
            for item in tier:
                total += logit[item] - log(sum(exp(logit[other]) for other in [item, *worse])) if worse else 0.0
    return total


@pytest.mark.parametrize("skills", [[1.0], [2.0, 0.4]])
def test_scores_are_the_peak_of_the_density_and_deviations_its_curvature(skills: list[float]):
    rankings = drawn([1.5, 0.5, 0, -0.4, -2, 1], skills, count=9, size=3)
    rankings += [(0, [[0, 1], [2, 3], [4]])]  # with ties
    result = fit(Choices.of(rankings), items=6, people=len(skills))
    skill_K = result.skill_K
    peak = minimize(lambda score: -log_density(score, rankings, skill_K), np.zeros(6), options={"gtol": 1e-8}).x
    assert result.score_I == pytest.approx(peak, abs=1e-3)
    step, every = 1e-3, np.eye(6) * 1e-3
    curvature = [
        [
            -sum(a * b * log_density(peak + a * one + b * two, rankings, skill_K) for a in (1, -1) for b in (1, -1))
            / (4 * step**2)
            for one in every
        ]
        for two in every
    ]
    covariance = np.linalg.inv(curvature)
    assert result.deviation == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-4)
    items = np.array([[4, 0], [2, 5]])
    assert result.covariances(items)[0] == pytest.approx(covariance[np.ix_([4, 0], [4, 0])], rel=1e-3, abs=1e-5)
    spread = np.sqrt(covariance[0, 0] + covariance[4, 4] - 2 * covariance[0, 4])
    assert result.better(0, 4) == pytest.approx(NormalDist(0, spread).cdf(peak[0] - peak[4]), abs=1e-3)
    assert result.better(0, 4) + result.better(4, 0) == pytest.approx(1)


def test_skills_are_found_and_those_of_the_careless_count_for_less():
    """Of the same two items, a careful person's order beats that of two careless ones."""
    truth, skills = list(np.random.default_rng(1).normal(0, 2, 40)), [1.5, 1.5, 0.5]
    scale = float(np.exp(np.log(skills).mean()))
    rankings = drawn(truth, [skill / scale for skill in skills], count=600, size=4)
    rankings += [(0, [[40], [41]]), (2, [[41], [40]]), (2, [[41], [40]])]
    result = fit(Choices.of(rankings), items=42, people=3)
    assert result.skill_K / result.skill_K[2] == pytest.approx([3, 3, 1], rel=0.25)
    assert np.exp(np.log(result.skill_K).mean()) == pytest.approx(1)
    assert np.corrcoef(result.score_I[:40], truth)[0, 1] > 0.97
    assert result.better(40, 41) > 0.5


def test_few_rankings_part_no_people_further_than_they_are():
    """At the best scores alone, each of few rankings would look as if its person had made no fault."""
    ratios = []
    for seed in range(3):
        truth = list(np.random.default_rng(seed + 5).normal(0, 2, 40))
        rankings = drawn(truth, [2.0, 1.0, 0.5], count=120, size=3, seed=seed)
        skill_K = fit(Choices.of(rankings), items=40, people=3).skill_K
        ratios.append(log(skill_K[0] / skill_K[2]))
    assert 1.5 < exp(sum(ratios) / 3) < 4  # 5 without the expectation


def test_items_that_nothing_ties_together_are_independent():
    """Each block alone has the scores that it has among others, whichever way round it is numbered."""
    rankings = drawn([1.0, 0, -1], [1.0], count=5, size=3)
    alone = fit(Choices.of(rankings), items=3, people=1)
    moved = [(0, [[9 - item for item in tier] for tier in tiers]) for _, tiers in rankings]
    chain = [(0, [[n], [n + 1]]) for n in range(3, 6)]
    both = fit(Choices.of([*chain, *moved]), items=12, people=1)
    assert both.score_I[[9, 8, 7]] == pytest.approx(alone.score_I, abs=1e-6)
    sizes = both.blocks.size_I.tolist()
    assert sizes == [1, 1, 1, 4, 4, 4, 4, 3, 3, 3, 1, 1]
    assert (both.score_I[[0, 11]], both.deviation[0]) == (pytest.approx(0), PRIOR_DEVIATION)
    assert both.covariances(np.array([[3, 9]]))[0, 0, 1] == 0


def test_nothing_ranked_is_the_prior():
    result = fit(Choices.of([]), items=2, people=1)
    assert (result.score_I.tolist(), result.deviation.tolist()) == ([0, 0], [PRIOR_DEVIATION] * 2)
    assert (result.skill_K.tolist(), result.better(0, 1)) == ([1], 0.5)


def test_scores_begin_at_the_means_of_their_priors():
    prior_I = np.array([2.0, -1.0, 0.5])
    assert fit(Choices.of([]), items=3, people=0, prior_I=prior_I).score_I == pytest.approx(prior_I, abs=1e-9)
    rankings: list[Ranking] = [(0, [[1], [0]])] * 3

    def loss(score: np.ndarray) -> float:
        moved = (score**2).sum() - ((score - prior_I) ** 2).sum()
        return -log_density(score, rankings, np.ones(1)) - moved / (2 * PRIOR_DEVIATION**2)

    peak = minimize(loss, prior_I, options={"gtol": 1e-8}).x
    assert fit(Choices.of(rankings), items=3, people=1, prior_I=prior_I).score_I == pytest.approx(peak, abs=1e-3)


def test_whoever_contradicts_themselves_has_little_skill_and_nothing_grows_beyond_bounds():
    rankings = [(0, [[a], [b], [c]]) for a, b, c in permutations(range(3))] * 5
    rankings += [(1, [[0], [1], [2]])] * 30
    result = fit(Choices.of(rankings), items=3, people=2)
    assert result.skill_K[0] < 0.3
    assert 3 < result.skill_K[1] < 30
    assert np.isfinite(result.score_I).all()


def test_an_earlier_fit_is_a_start_and_changes_nothing():
    rankings = drawn([1.0, 0, -1, 2], [1.0, 0.5], count=40, size=3)
    earlier = fit(Choices.of(rankings[:30]), items=4, people=2)
    cold, warm = (fit(Choices.of(rankings), items=4, people=2, start=start) for start in (None, earlier))
    assert warm.score_I == pytest.approx(cold.score_I, abs=2e-3)
    assert warm.skill_K == pytest.approx(cold.skill_K, abs=2e-3)


def test_a_start_far_away_leads_to_the_same_scores():
    """A whole Newton step from there overshoots: choices are certain there, and curvature is the prior's."""
    choices = Choices.of(drawn([1.0, 0, -1, 2], [1.0], count=200, size=3))
    near = fit(choices, items=4, people=1)
    far = replace(near, score_I=np.array([-9.0, 9, -9, 9]))
    assert fit(choices, items=4, people=1, start=far).score_I == pytest.approx(near.score_I, abs=2e-3)


def test_information_of_two_items_by_hand_and_what_it_prefers():
    """½ log(1 + β² p(1 − p) var(s₁ − s₂)): of nothing known, ½ log(1 + ¼ · 8)."""
    known = fit(Choices.of([(0, [[0], [1]])] * 12 + [(0, [[2], [3]]), (0, [[3], [2]])] * 6), items=6, people=1)
    certain, undecided, new = known.information(np.array([[0, 1], [2, 3], [4, 5]]))
    assert new == pytest.approx(0.5 * log(3))
    assert new > undecided > certain > 0
    careless, careful = (known.information(np.array([[4, 5]]), skill=skill)[0] for skill in (0.3, 2.0))
    assert careful > new > careless
    # ½ log det(1 + F V) of the best first, for three: F is that of the first choice among all, and the second's.
    items = np.array([[3, 0, 1]])
    order = items[0][np.argsort(-known.score_I[items[0]])]
    fisher = np.zeros((3, 3))
    for place in range(2):
        share = np.exp(known.score_I[order[place:]])
        share /= share.sum()
        fisher[place:, place:] += np.diag(share) - np.outer(share, share)
    expected = 0.5 * log(np.linalg.det(np.eye(3) + fisher @ known.covariances(order[None])[0]))
    assert known.information(items)[0] == pytest.approx(expected)
    # The order in which the candidates are listed says nothing, and more candidates say more.
    assert known.information(np.array([[5, 0, 4]])) == pytest.approx(known.information(np.array([[0, 4, 5]])))
    assert known.information(np.array([[0, 4, 5]]))[0] > new
