"""Score of a set from the scores of its pairs, ties between scores, and the agreement between sets.

The mean over all pairs (arXiv 2512.04784, §3.3) is less sensitive in larger sets: one wrong panel of n spoils 2/n of
the pairs, so a set of eight with a wrong panel still reaches 0.75. The lowest panel's median is near 0 at any size, and
one wrong panel does not lower the median of the other panels if a set has four panels or more.

A generator that draws one hero for every set has equal panels within its sets, and earns any mean over pairs. Its sets
also agree with each other, which no mean over the pairs of a set shows. Comparing the agreement within sets with that
across the sets of one prompt separates learning from collapse.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import combinations
from math import ceil, comb
from operator import itemgetter
from random import Random
from statistics import fmean, median
from typing import TypeVar

from pacorl.core.batches import in_batches

Part = TypeVar("Part", bound=tuple[int, ...])
Pair = tuple[int, int]

TIE = 0.01
"""Scores that differ by less are a tie. A judge in bf16 resolves no less: between 8 and 16 its logits are 1/16 apart,
which moves P(Yes) by up to 1/64, and another batch rounds them otherwise. The pages print two digits."""


def median_with(score_of_pair: Mapping[Pair, float | None], panel: int, group: Collection[int]) -> float | None:
    """Compute a panel's median score with other images; None if one of these pairs has no score, or there is none."""
    scores: list[float] = []
    for other in group:
        score = score_of_pair.get((panel, other), score_of_pair.get((other, panel)))
        if score is None:
            return None
        scores.append(score)
    if not scores:
        return None
    return median(scores)


def whole_mean(scores: Collection[float | None]) -> float | None:
    """Average scores; None if one is missing, since the mean of the rest would reward it, or if there are none."""
    present = [score for score in scores if score is not None]
    if not present or len(present) < len(scores):
        return None
    return fmean(present)


def panel_shares(score_of_part: Mapping[Part, float | None], count: int) -> list[float | None]:
    """Split the mean over a set's parts by panel.

    Args:
        score_of_part: Of the panels that a part contains, such as two of a pair, its score; None if it is missing.

    Returns:
        Per panel the share of the mean that is due to its parts: their sum over the number of all parts. None if one of
        them is missing. A pair counts for both of its panels.
    """
    shares: list[float | None] = []
    for panel in range(count):
        scores = [score for panels, score in score_of_part.items() if panel in panels]
        present = [score for score in scores if score is not None]
        shares.append(sum(present) / len(score_of_part) if len(present) == len(scores) else None)
    return shares


def tied_groups(scores: Sequence[float | None]) -> list[list[int]]:
    """Order scores from the best down, in groups of ties.

    Returns:
        Indices in groups: a group holds the best score that is left and all that tie with it, in ascending order.
        Missing scores come last, each a group of its own.
    """
    scored: list[tuple[float, int]] = []
    missing: list[list[int]] = []
    for index, score in enumerate(scores):
        if score is None:
            missing.append([index])
        else:
            scored.append((score, index))

    groups: list[list[int]] = []
    lead = 0.0
    for score, index in sorted(scored, key=itemgetter(0), reverse=True):
        # A tie is with the best of a group, so that a chain of near scores is no tie.
        if groups and lead - score < TIE:
            groups[-1].append(index)
        else:
            lead = score
            groups.append([index])
    return [*map(sorted, groups), *missing]


def kappa(within: float, across: float) -> float:
    """Correct agreement for chance: (within − across)/(1 − across), 1 if panels agree within sets alone.

    It is 0 if panels of different sets agree as often.
    """
    if across < 1:
        return (within - across) / (1 - across)
    return 0.0


def equal_shares(sets: Sequence[Sequence[Hashable]]) -> tuple[float, float]:
    """Compute the share of equal pairs within sets, and that of equal pairs of different sets; 0 without a pair."""
    numbered = [(number, value) for number, values in enumerate(sets) for value in values]
    within: list[bool] = []
    across: list[bool] = []
    for (first_set, first_value), (second_set, second_value) in combinations(numbered, 2):
        pairs = within if first_set == second_set else across
        pairs.append(first_value == second_value)
    return sum(within) / max(1, len(within)), sum(across) / max(1, len(across))


def pairs_within(sets: int, panels: int) -> list[Pair]:
    """List the pairs of panels of each set; a panel's number is set · panels + position."""
    pairs: list[Pair] = []
    for first in range(0, sets * panels, panels):
        pairs += combinations(range(first, first + panels), 2)
    return pairs


def draw_pairs_across(seeds: Sequence[int], panels: int, *, partners: int) -> list[Pair]:
    """Draw pairs of panels of different sets of a group, numbered as in `pairs_within`.

    The sets form a circle, and each is paired in turn with the next `partners` sets. There are half as many
    pairs across as within, so that a judge's work grows by half; sets of two and three panels have more, so that each
    panel is in a pair. The panels of a set are in equally many pairs, up to one.

    Args:
        seeds: One per set, which decides its place in the circle and the order of its panels.
        partners: Largest number of sets that a set's pairs are spread over.
    """
    draws = []
    for number, seed in enumerate(seeds):
        rng = Random(seed)
        draws.append((rng.random(), number, rng.sample(range(panels), panels)))
    circle = sorted(draws)

    # A set has as many pairs again from the sets before it. There its other panels come first.
    pairs_of_set = max(ceil(panels / 2), comb(panels, 2) // 2)
    partners = min(partners, len(seeds) - 1)
    pairs = []
    for position, (_, number, order) in enumerate(circle):
        for turn in range(pairs_of_set):
            _, other, order_of_other = circle[(position + 1 + turn % partners) % len(circle)]
            # One further in each round of the panels, so that no pair comes twice.
            rounds_left = pairs_of_set // panels - turn // panels
            panel_of_other = order_of_other[(pairs_of_set + turn - rounds_left) % panels]
            pairs.append((number * panels + order[turn % panels], other * panels + panel_of_other))
    return pairs


def contrast_scores(
    score_of_pair: Mapping[Pair, float | None], *, sets: int, panels: int, weight: float
) -> list[Sequence[float | None]]:
    """Score each panel of a group's sets by ½(1 + within − weight · across), means over the pairs that contain it.

    The scale keeps the score of a P(Yes) with a weight up to 1 between 0 and 1, and its mean above 0: log-taming
    divides by the mean, which is near 0 for the plain difference.

    Args:
        score_of_pair: Of two panels, numbered as in `pairs_within`, the score; None if it is missing.
        weight: Of the agreement across sets; 1 removes the advantage of panels common to all sets.

    Returns:
        Per set and panel the score; None if one of the panel's pairs has none.
    """
    within: list[list[float | None]] = [[] for _ in range(sets * panels)]
    across: list[list[float | None]] = [[] for _ in range(sets * panels)]
    for (first, second), score in score_of_pair.items():
        # Panels are numbered set by set.
        scores_of_panel = within if first // panels == second // panels else across
        scores_of_panel[first].append(score)
        scores_of_panel[second].append(score)

    scores: list[float | None] = []
    for scores_within, scores_across in zip(within, across, strict=True):
        within_mean = whole_mean(scores_within)
        across_mean = whole_mean(scores_across)
        if within_mean is None or across_mean is None:
            scores.append(None)
        else:
            scores.append((1 + within_mean - weight * across_mean) / 2)
    return in_batches(scores, panels)
