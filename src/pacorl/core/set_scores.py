"""Score of a set from the scores of its pairs, and ties between scores.

The mean over all pairs (arXiv 2512.04784, §3.3) says less the larger the set is: one wrong panel of n spoils 2/n of the
pairs, so a set of eight with a wrong panel still reaches 0.75. The lowest panel's median is near 0 at any size, and one
wrong panel does not lower the median of the other panels if a set has four panels or more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

Part = TypeVar("Part", bound=tuple[int, ...])

TIE = 0.01
"""Scores that differ by less are a tie. A judge in bf16 resolves no less: between 8 and 16 its logits are 1/16 apart,
which moves P(Yes) by up to 1/64, and another batch rounds them otherwise. The pages print two digits."""


@dataclass(frozen=True, slots=True)
class LowestPanel:
    """The panel that fits the other panels least.

    Attributes:
        panel: Index of the panel; of equal panels the first.
        median: Median score of its pairs.
    """

    panel: int
    median: float


def panel_medians(score_of_pair: Mapping[tuple[int, int], float | None]) -> dict[int, float]:
    """Compute the median score of each panel's pairs; panels without a scored pair are left out."""
    scores_of: dict[int, list[float]] = {}
    for pair, score in score_of_pair.items():
        for panel in pair:
            if score is not None:
                scores_of.setdefault(panel, []).append(score)
    return {panel: median(scores) for panel, scores in sorted(scores_of.items())}


def median_with(
    score_of_pair: Mapping[tuple[int, int], float | None], panel: int, group: Collection[int]
) -> float | None:
    """Compute a panel's median score with other images; None if one of these pairs has no score, or there is none."""
    scores: list[float] = []
    for other in group:
        score = score_of_pair.get((panel, other), score_of_pair.get((other, panel)))
        if score is None:
            return None
        scores.append(score)
    return median(scores) if scores else None


def lowest_panel(
    score_of_pair: Mapping[tuple[int, int], float | None], *, among: Collection[int] | None = None
) -> LowestPanel | None:
    """Find the panel with the lowest median; None if no pair has a score.

    Args:
        among: The panels to choose from; all of them by default.
    """
    medians = panel_medians(score_of_pair)
    panels = [panel for panel in medians if among is None or panel in among]
    if not panels:
        return None
    lowest = min(panels, key=lambda panel: medians[panel])
    return LowestPanel(lowest, medians[lowest])


def whole_mean(scores: Collection[float | None]) -> float | None:
    """Average scores; None if one is missing, since the mean of the rest would reward it, or if there are none."""
    present = [score for score in scores if score is not None]
    return fmean(present) if present and len(present) == len(scores) else None


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
    for score, index in sorted(scored, key=lambda entry: -entry[0]):
        # A tie is with the best of a group, so that a chain of near scores is no tie.
        if groups and lead - score < TIE:
            groups[-1].append(index)
        else:
            lead = score
            groups.append([index])
    return [*map(sorted, groups), *missing]
