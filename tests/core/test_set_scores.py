from __future__ import annotations

from itertools import combinations

import pytest

from pacorl.core.set_scores import TIE, LowestPanel, lowest_panel, panel_medians, panel_shares, tied_groups, whole_mean


def one_wrong(panels: int, wrong: int) -> dict[tuple[int, int], float | None]:
    """Pairs of a set in which one panel fits none of the others."""
    return {pair: 0.0 if wrong in pair else 1.0 for pair in combinations(range(panels), 2)}


@pytest.mark.parametrize("panels", [4, 8, 16])
def test_one_wrong_panel_is_the_lowest_at_any_size(panels: int) -> None:
    pairs = one_wrong(panels, wrong=2)
    assert lowest_panel(pairs) == LowestPanel(2, 0.0)
    assert panel_medians(pairs)[0] == 1.0, "the sound panels stay sound"
    assert whole_mean(pairs.values()) == pytest.approx(1 - 2 / panels)


def test_two_panels_have_one_pair() -> None:
    assert lowest_panel({(0, 1): 0.3}) == LowestPanel(0, 0.3)
    assert whole_mean([0.3]) == 0.3


def test_medians_by_hand() -> None:
    pairs = {(0, 1): 0.9, (0, 2): 0.5, (0, 3): 0.7, (1, 2): 0.1, (1, 3): 0.6, (2, 3): 0.2}
    assert panel_medians(pairs) == {0: 0.7, 1: 0.6, 2: 0.2, 3: 0.6}
    assert lowest_panel(pairs) == LowestPanel(2, 0.2)
    assert lowest_panel(pairs, among=[0, 1]) == LowestPanel(1, 0.6)


def test_a_missing_pair_is_no_score_and_no_zero() -> None:
    pairs = {(0, 1): 0.9, (0, 2): None, (1, 2): 0.8}
    assert whole_mean(pairs.values()) is None
    assert lowest_panel(pairs) == LowestPanel(2, 0.8)
    assert lowest_panel({(0, 1): None}) is None
    assert whole_mean([]) is None


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


def test_a_missing_pair_is_missing_for_its_panels_alone() -> None:
    pairs = {(0, 1): None, (0, 2): 0.6, (1, 2): 0.9, (0, 3): 0.3, (1, 3): 0.3, (2, 3): 0.3}
    assert panel_shares(pairs, 4) == [None, None, pytest.approx(0.3), pytest.approx(0.15)]
