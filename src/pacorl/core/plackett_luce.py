"""Scores of items from people's rankings, and the skill of the people: Plackett–Luce with a discrimination for each.

A ranking comes down to choices: the best of all, then the best of the others, and so on. Person k chooses item i of a
set C with probability

    P(i | C) = exp(β_k s_i) / Σ_{j ∈ C} exp(β_k s_j)

(Luce 1959; Plackett 1975; for two items it is Bradley & Terry 1952). β is a person's skill: 0 chooses by chance, and 1
is the average, since the geometric mean of all is held at 1. Scores have the prior N(0, PRIOR_DEVIATION²), log skills
N(0, SKILL_DEVIATION²). Expectation and maximization find both: Newton's steps and Laplace's approximation give the
scores' posterior, Fisher's scoring the skills. Items that no chain of rankings ties together are independent, so every
matrix is a block of tied items.

Letters of dimensions: I items, K people, S choices, E alternatives of all choices, P pairs of alternatives of a choice,
Q questions of M items each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import erf, sqrt

import numpy as np

from pacorl.core.ranking import Floats, Indices

PRIOR_DEVIATION = 2.0
"""Of a score. With a skill of 1 it puts the better of two items first in 84 of 100 cases."""
SKILL_DEVIATION = 1.0
"""Of the log of a skill: two in three people are within a factor of e of the average."""
TOLERANCE = 1e-4
MAX_ROUNDS = 300
"""It takes some 30. If people contradict each other at random it may take more, and the last round is close enough."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Who chose which item of which others; the chosen one is the first of its alternatives."""

    item_E: Indices
    start_S: Indices
    """Where the alternatives of a choice begin in `item_E`."""
    person_S: Indices

    @classmethod
    def of(cls, rankings: Iterable[tuple[int, Sequence[Sequence[int]]]]) -> Choices:
        """Takes rankings apart.

        Args:
            rankings: (person, tiers of items, best first); items of one tier are tied and not compared.
        """
        items: list[int] = []
        starts: list[int] = []
        people: list[int] = []
        for person, tiers in rankings:
            for rank, tier in enumerate(tiers[:-1], 1):
                worse = [item for lower in tiers[rank:] for item in lower]
                for best in tier:
                    starts.append(len(items))
                    people.append(person)
                    items += [best, *worse]
        return cls(*(np.array(column, dtype=np.int64) for column in (items, starts, people)))

    @property
    def counts(self) -> Indices:
        """How many alternatives each choice has."""
        return np.diff(self.start_S, append=len(self.item_E))

    def pairs(self) -> tuple[Indices, Indices]:
        """Every ordered pair of alternatives of one choice, themselves included, as positions in `item_E`."""
        first, second = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for count in np.unique(self.counts):
            starts = self.start_S[self.counts == count]
            row, column = np.divmod(np.arange(count * count), count)
            first.append((starts[:, None] + row).ravel())
            second.append((starts[:, None] + column).ravel())
        return np.concatenate(first), np.concatenate(second)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Square matrices, one for each set of tied items, one after the other in a flat array."""

    offset_I: Indices
    """Where the matrix of an item's block begins."""
    size_I: Indices
    place_I: Indices
    """The item's row in it."""
    items_by_size: tuple[Indices, ...]
    """(blocks, size) items, by growing size: in the order of the flat array."""

    @classmethod
    def of(cls, choices: Choices, items: int) -> Blocks:
        label_I = _connected(choices, items)
        _, block_I, size_of = np.unique(label_I, return_inverse=True, return_counts=True)
        size_I = size_of[block_I]
        order = np.lexsort((block_I, size_I))
        by_size, offset_I, place_I, offset = [], np.empty(items, np.int64), np.empty(items, np.int64), 0
        for size in np.unique(size_I):
            members = order[size_I[order] == size].reshape(-1, size)
            offset_I[members] = offset + size * size * np.arange(len(members))[:, None]
            place_I[members] = np.arange(size)
            offset += size * size * len(members)
            by_size.append(members)
        return cls(offset_I, size_I, place_I, tuple(by_size))

    @property
    def length(self) -> int:
        return sum(members.shape[0] * members.shape[1] ** 2 for members in self.items_by_size)

    def index(self, first: Indices, second: Indices) -> Indices:
        """Where the entry of two items of one block stands in the flat array."""
        return self.offset_I[first] + self.place_I[first] * self.size_I[first] + self.place_I[second]

    def split(self, flat: Floats) -> list[tuple[Indices, Floats]]:
        """(items, their matrices) by size."""
        matrices, start = [], 0
        for members in self.items_by_size:
            blocks, size = members.shape
            matrices.append((members, flat[start : start + blocks * size * size].reshape(blocks, size, size)))
            start += blocks * size * size
        return matrices


def _connected(choices: Choices, items: int) -> Indices:
    """A label for each item, the same for items that a chain of choices ties together."""
    label_I = np.arange(items)
    choice_E = np.repeat(np.arange(len(choices.start_S)), choices.counts)
    while len(choices.start_S):
        lowest_S = np.minimum.reduceat(label_I[choices.item_E], choices.start_S)
        spread_I = label_I.copy()
        np.minimum.at(spread_I, choices.item_E, lowest_S[choice_E])
        # A label is an item too: taking its label halves the length of a chain, as in union-find.
        np.minimum.at(spread_I, label_I, spread_I[spread_I[np.arange(items)]])
        spread_I = spread_I[spread_I]
        if (spread_I == label_I).all():
            break
        label_I = spread_I
    return label_I


@dataclass(frozen=True, slots=True)
class Fit:
    """Scores and skills, with the scores' posterior covariance given the skills."""

    score_I: Floats
    skill_K: Floats
    blocks: Blocks
    covariance: Floats
    """Flat, as `blocks` has it."""

    @property
    def deviation(self) -> Floats:
        """The posterior standard deviation of each score."""
        every = np.arange(len(self.score_I))
        return np.sqrt(self.covariance[self.blocks.index(every, every)])

    def covariances(self, items_QM: Indices) -> Floats:
        """The posterior covariance of the items of each question; 0 between items of different blocks."""
        first, second = items_QM[:, :, None], items_QM[:, None, :]
        tied = self.blocks.offset_I[first] == self.blocks.offset_I[second]
        # Of untied items the index means nothing, and may lie beyond the end.
        index = np.where(tied, self.blocks.index(first, second), 0)
        return np.where(tied, self.covariance[index], 0.0)

    def better(self, first: int, second: int) -> float:
        """The posterior probability that the first item's score is the higher."""
        covariance = self.covariances(np.array([[first, second]]))[0]
        variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
        return 0.5 + 0.5 * erf(float(self.score_I[first] - self.score_I[second]) / sqrt(2 * max(variance, 1e-12)))

    def information(self, items_QM: Indices, *, skill: float = 1.0) -> Floats:
        """How much a ranking of each question's items is expected to tell about their scores, in nats.

        ½ log det(1 + F V), with V the posterior covariance and F Fisher's information of the most likely ranking: what
        Lindley's (1956) expected gain becomes for a Gaussian posterior.
        """
        score_QM = np.take_along_axis(self.score_I[items_QM], order := np.argsort(-self.score_I[items_QM]), axis=1)
        covariance_QMM = self.covariances(np.take_along_axis(items_QM, order, axis=1))
        fisher_QMM, count = np.zeros_like(covariance_QMM), items_QM.shape[1]
        for best in range(count - 1):
            weight = np.exp(skill * (score_QM[:, best:] - score_QM[:, best : best + 1]))
            share = weight / weight.sum(1, keepdims=True)
            fisher_QMM[:, best:, best:] += share[:, :, None] * (np.eye(count - best) - share[:, None, :])
        gain_QMM = np.eye(count) + skill**2 * fisher_QMM @ covariance_QMM
        return 0.5 * np.asarray(np.linalg.slogdet(gain_QMM)[1])


def fit(choices: Choices, *, items: int, people: int, start: Fit | None = None, prior_I: Floats | None = None) -> Fit:
    """The scores of the highest posterior density given the skills, and the skills by expectation and maximization.

    Args:
        prior_I: the means of the scores' priors; 0 for all without it.
        start: an earlier fit of the same items and people, from which it is not far.

    Example:
        >>> two = Choices.of([(0, [[0], [1], [2]]), (0, [[0], [2], [1]])])
        >>> fit(two, items=3, people=1).score_I.round(2).tolist()
        [1.46, -0.73, -0.73]
    """
    prior_I = np.zeros(items) if prior_I is None else prior_I
    model = _Model(choices, prior_I, people)
    score_I, log_skill_K = prior_I, np.zeros(people)
    if start is not None:
        score_I, log_skill_K = start.score_I, np.log(start.skill_K)
    for _ in range(MAX_ROUNDS):
        before = score_I, log_skill_K
        score_I = model.better_scores(score_I, log_skill_K)
        covariance = model.covariance(score_I, log_skill_K)
        log_skill_K = model.better_skills(score_I, log_skill_K, covariance)
        moved = [np.abs(new - old).max(initial=0) for new, old in zip((score_I, log_skill_K), before, strict=True)]
        if max(moved) < TOLERANCE:
            break
    return Fit(score_I, np.exp(log_skill_K), model.blocks, model.covariance(score_I, log_skill_K))


class _Model:
    """The posterior density of the scores, and steps towards the best scores and skills."""

    def __init__(self, choices: Choices, prior_I: Floats, people: int) -> None:
        self.choices, self.prior_I, self.people = choices, prior_I, people
        self.items = items = len(prior_I)
        self.blocks = Blocks.of(choices, items)
        self.person_E = np.repeat(choices.person_S, choices.counts)
        self.first_P, self.second_P = choices.pairs()
        self.person_P = self.person_E[self.first_P]
        self.index_P = self.blocks.index(choices.item_E[self.first_P], choices.item_E[self.second_P])

    def better_scores(self, score_I: Floats, log_skill_K: Floats) -> Floats:
        """One Newton step, or the first half, quarter … of one that does not lead downhill."""
        share_E, density = self._shares(score_I, log_skill_K)
        pull_E = -share_E
        pull_E[self.choices.start_S] += 1
        pull_E *= np.exp(log_skill_K)[self.person_E]
        pull_I = np.bincount(self.choices.item_E, pull_E, minlength=self.items)
        gradient_I = pull_I - (score_I - self.prior_I) / PRIOR_DEVIATION**2
        step_I = np.empty(self.items)
        for members, matrix in self.blocks.split(self._curvature(score_I, log_skill_K)):
            step_I[members] = np.linalg.solve(matrix, gradient_I[members][:, :, None])[:, :, 0]
        # The density is strictly concave in the scores, so some part of the step leads uphill.
        while self._shares(score_I + step_I, log_skill_K)[1] < density - 1e-9 * abs(density):
            step_I /= 2
        return score_I + step_I

    def covariance(self, score_I: Floats, log_skill_K: Floats) -> Floats:
        """Laplace's approximation: the inverse of the curvature, flat."""
        blocks = self.blocks.split(self._curvature(score_I, log_skill_K))
        return np.concatenate([np.empty(0), *(np.linalg.inv(matrix).ravel() for _, matrix in blocks)])

    def better_skills(self, score_I: Floats, log_skill_K: Floats, covariance: Floats) -> Floats:
        """One step of Fisher's scoring in the log skills, in expectation over the scores' posterior.

        At the scores of the highest density alone, whoever ranked an item last of all others would have ranked it
        without a fault, and skills would grow beyond all bounds: of three people who differ by a factor of 4 in noise
        it made 10⁶. The second-order term of the expectation is tr(β²(diag(p) − p pᵀ) V).
        """
        share_E, _ = self._shares(score_I, log_skill_K)
        if not len(share_E):
            return log_skill_K
        start_S, person_S = self.choices.start_S, self.choices.person_S
        score_E, skill_S = score_I[self.choices.item_E], np.exp(log_skill_K)[person_S]
        mean_S = np.add.reduceat(share_E * score_E, start_S)
        variance_S = np.add.reduceat(share_E * score_E**2, start_S) - mean_S**2
        spread_P = self._choice_curvature(share_E, log_skill_K) * covariance[self.index_P]
        spread_K = np.bincount(self.person_P, spread_P, minlength=self.people)
        pull_K = np.bincount(person_S, skill_S * (score_E[start_S] - mean_S), minlength=self.people)
        gradient_K = pull_K - spread_K - log_skill_K / SKILL_DEVIATION**2
        fisher_K = np.bincount(person_S, skill_S**2 * variance_S, minlength=self.people)
        curvature_K = fisher_K + 2 * spread_K + 1 / SKILL_DEVIATION**2
        # Lagrange: of the common factor of all skills only the scores' prior would have an opinion.
        common = (gradient_K / curvature_K).sum() / (1 / curvature_K).sum()
        return np.asarray(log_skill_K + np.clip((gradient_K - common) / curvature_K, -1, 1))

    def _shares(self, score_I: Floats, log_skill_K: Floats) -> tuple[Floats, float]:
        """P(i | C) of every alternative, and the scores' log posterior density."""
        prior = -float(((score_I - self.prior_I) ** 2).sum()) / PRIOR_DEVIATION**2 / 2
        if not len(self.choices.start_S):
            return np.empty(0), prior
        logit_E = np.exp(log_skill_K)[self.person_E] * score_I[self.choices.item_E]
        counts_S, start_S = self.choices.counts, self.choices.start_S
        logit_E -= np.repeat(np.maximum.reduceat(logit_E, start_S), counts_S)
        total_S = np.add.reduceat(np.exp(logit_E), start_S)
        density = float((logit_E[start_S] - np.log(total_S)).sum()) + prior
        return np.exp(logit_E) / np.repeat(total_S, counts_S), density

    def _choice_curvature(self, share_E: Floats, log_skill_K: Floats) -> Floats:
        """β²(diag(p) − p pᵀ) of each choice."""
        same_P = self.first_P == self.second_P
        weight_P = share_E[self.first_P] * (same_P - share_E[self.second_P])
        return np.asarray(weight_P * np.exp(2 * log_skill_K)[self.person_P])

    def _curvature(self, score_I: Floats, log_skill_K: Floats) -> Floats:
        """The negative Hessian in the scores, prior included, flat."""
        share_E, _ = self._shares(score_I, log_skill_K)
        flat, every = np.zeros(self.blocks.length), np.arange(self.items)
        flat[self.blocks.index(every, every)] = 1 / PRIOR_DEVIATION**2
        return flat + np.bincount(self.index_P, self._choice_curvature(share_E, log_skill_K), minlength=len(flat))
