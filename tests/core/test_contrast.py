"""Pairs across sets, scores of panels by them, and agreement corrected for chance."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import ceil, comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacorl.core.contrast import contrast_scores, draw_pairs_across, equal_shares, kappa, pairs_within


def test_kappa_tells_a_shared_look_from_one_look_for_all() -> None:
    assert (kappa(1.0, 0.25), kappa(0.25, 0.25), kappa(1.0, 1.0)) == (1.0, 0.0, 0.0)
    assert kappa(0.7, 0.4) == pytest.approx(0.5)


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=5))
def test_equal_shares_are_those_of_all_pairs(sets: list[list[str]]) -> None:
    within = [a == b for values in sets for a, b in combinations(values, 2)]
    across = [a == b for first, second in combinations(sets, 2) for a in first for b in second]
    expected = [fmean(pairs) if pairs else 0.0 for pairs in (within, across)]
    assert equal_shares(sets) == pytest.approx(expected)


@given(
    st.lists(st.integers(0, 2**63), min_size=2, max_size=12, unique=True),
    st.integers(2, 16),
    st.integers(1, 9),
)
def test_every_panel_is_compared_with_other_sets(seeds: list[int], panels: int, partners: int) -> None:
    pairs = draw_pairs_across(seeds, panels, partners=partners)
    assert len(set(pairs)) == len(pairs) == len(seeds) * max(comb(panels, 2) // 2, ceil(panels / 2))
    assert all(first // panels != second // panels for first, second in pairs)
    others = {first // panels: set() for first, _ in pairs}
    for first, second in pairs:
        others[first // panels].add(second // panels)
    assert max(map(len, others.values())) <= partners
    counts = Counter(panel for pair in pairs for panel in pair)
    for first in range(0, len(seeds) * panels, panels):
        of_set = [counts[panel] for panel in range(first, first + panels)]
        assert 1 <= min(of_set) <= max(of_set) <= min(of_set) + 1


def test_the_draw_follows_from_the_seeds_alone() -> None:
    drawn = [draw_pairs_across([seed, 7, 8, 9], 4, partners=3) for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_panel_loses_what_it_has_in_common_with_other_sets() -> None:
    """Two sets of two panels: the first set's agree by 0.9, the second's by 0.5."""
    assert pairs_within(2, 2) == [(0, 1), (2, 3)]
    scores = {(0, 1): 0.9, (2, 3): 0.5, (0, 2): 0.2, (3, 1): 0.6, (2, 1): 0.4}
    first, second = contrast_scores(scores, sets=2, panels=2, weight=0.5)
    assert first == pytest.approx([(1 + 0.9 - 0.5 * 0.2) / 2, (1 + 0.9 - 0.5 * 0.5) / 2])
    assert second == pytest.approx([(1 + 0.5 - 0.5 * 0.3) / 2, (1 + 0.5 - 0.5 * 0.6) / 2])


def test_a_missing_pair_makes_its_panels_missing() -> None:
    scores = {(0, 1): 0.9, (2, 3): 0.5, (0, 2): None, (3, 1): 0.6}
    found = contrast_scores(scores, sets=2, panels=2, weight=1.0)
    assert [[score is None for score in of_set] for of_set in found] == [[True, False], [True, False]]
