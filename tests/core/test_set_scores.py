from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import ceil, comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacorl.core.set_scores import (
    TIE,
    contrast_scores,
    draw_pairs_across,
    equal_shares,
    kappa,
    median_with,
    pairs_within,
    panel_shares,
    tied_groups,
    whole_mean,
)


@pytest.mark.parametrize("panels", [4, 8, 16])
def test_one_wrong_panel_is_the_lowest_at_any_size(panels: int) -> None:
    pairs = {pair: 0.0 if 2 in pair else 1.0 for pair in combinations(range(panels), 2)}
    medians = [median_with(pairs, panel, set(range(panels)) - {panel}) for panel in range(panels)]
    assert medians == [0.0 if panel == 2 else 1.0 for panel in range(panels)]
    assert whole_mean(pairs.values()) == pytest.approx(1 - 2 / panels)


def test_a_missing_pair_is_no_score_and_no_zero() -> None:
    pairs = {(0, 1): 0.9, (0, 2): None, (1, 2): 0.8}
    assert whole_mean(pairs.values()) is None
    assert [median_with(pairs, panel, {0, 1, 2} - {panel}) for panel in range(3)] == [None, pytest.approx(0.85), None]
    assert median_with(pairs, 0, []) is whole_mean([]) is None


def test_ties_are_in_the_order_of_their_indices() -> None:
    best = 0.99
    assert tied_groups([None, best - TIE / 2, 0.5, best, 0.5 + TIE / 2, best - 2 * TIE]) == [[1, 3], [5], [2, 4], [0]]
    assert tied_groups([0.2, 0.9, 0.2]) == [[1], [0, 2]]
    assert tied_groups([None, None]) == [[0], [1]]


def test_a_chain_of_near_scores_is_no_tie_with_the_best() -> None:
    assert tied_groups([0.98, 0.986, 0.992]) == [[1, 2], [0]]


def test_a_pair_counts_for_both_of_its_panels_and_a_text_for_one() -> None:
    pairs = {(0, 1): 0.3, (0, 2): 0.6, (1, 2): 0.9}
    assert panel_shares(pairs, 3) == pytest.approx([0.3, 0.4, 0.5])
    assert panel_shares({(0,): 0.3, (1,): 0.6, (2,): 0.9}, 3) == pytest.approx([0.1, 0.2, 0.3])
    assert panel_shares({(0, 1): 0.7}, 2) == [0.7, 0.7], "of two panels each has the whole score"


def test_kappa_tells_a_shared_look_from_one_look_for_all() -> None:
    assert (kappa(1.0, 0.25), kappa(0.25, 0.25), kappa(1.0, 1.0)) == (1.0, 0.0, 0.0)
    assert kappa(0.7, 0.4) == pytest.approx(0.5)


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), max_size=5))
def test_equal_shares_are_those_of_all_pairs(sets: list[list[str]]) -> None:
    within = [a == b for values in sets for a, b in combinations(values, 2)]
    across = [a == b for first, second in combinations(sets, 2) for a in first for b in second]
    expected = [fmean(pairs) if pairs else 0.0 for pairs in (within, across)]
    assert equal_shares(sets) == pytest.approx(expected)


@given(st.lists(st.integers(0, 2**63), min_size=2, max_size=12, unique=True), st.integers(2, 16), st.integers(1, 9))
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
