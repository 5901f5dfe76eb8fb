"""Prompts that differ: an independent set of the graph of near prompts, and its spread."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.preprocessing import normalize

from pacorl.dataset.diversify import independent_set


@pytest.fixture
def vectors():
    return normalize(np.random.default_rng(0).normal(size=(300, 8)))


def distances(vectors):
    table = 1 - vectors @ vectors.T
    np.fill_diagonal(table, np.inf)
    return table


def test_the_set_is_independent_and_maximal(vectors):
    """Of a distance that it found itself: that of its nearest pair."""
    kept = independent_set(vectors, 40)
    assert len(set(kept)) == 40
    table = distances(vectors)
    nearest = table[np.ix_(kept, kept)].min()
    left = sorted(set(range(300)) - set(kept))
    # At a distance that is a little larger there are fewer: of the next prompts none is free.
    assert (table[np.ix_(left, kept)].min(1) < nearest + 0.02).all()
    assert independent_set(vectors, 40) == kept


def test_duplicates_go_first():
    base = normalize(np.random.default_rng(3).normal(size=(30, 16)))
    kept = independent_set(np.concatenate([base, base]), 30)
    assert {index % 30 for index in kept} == set(range(30))
    assert sorted(independent_set(base, 31)) == [*range(30)]
