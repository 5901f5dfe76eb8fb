"""Rankings → labelled pairs, and splits without leaks.

The paper does not publish its rule. Its numbers suggest `best_worst`: the best candidate of a ranking is consistent
with the reference, the worst is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import numpy as np

from pacorl.core import questions
from pacorl.core.batches import components, grouped
from pacorl.core.ranking import FEWEST, Interval, bootstrap
from pacorl.dataset.folder import final_answers
from pacorl.io.files import text_digest
from pacorl.records.rankings import Ranking
from pacorl.types import Comparison

Split = Literal["train", "test"]
AGREEMENT_DRAWS = 500
"""Resamples for the interval of people's agreement, which the administrator's page computes after each ranking."""


def best_worst(tiers: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
    """Label the best tier Yes and the worst tier No; the tiers between, or a single one, stay unlabelled."""
    if len(tiers) < 2:
        return []
    return [(name, True) for name in tiers[0]] + [(name, False) for name in tiers[-1]]


def tier_of(answer: Ranking) -> dict[str, int]:
    """Map each candidate to the number of its tier, best first; tied candidates share one."""
    return {name: number for number, tier in enumerate(answer.tiers) for name in tier}


def pair_orders(answers: Iterable[Ranking]) -> Iterator[int]:
    """Compare any two people on every pair of an instance's candidates.

    Yields:
        A number above 0 for the same order, below 0 for opposite orders, 0 for a tie in either ranking.
    """
    for tiers_a, tiers_b in combinations(map(tier_of, answers), 2):
        for first, second in combinations(tiers_a, 2):
            yield (tiers_a[first] - tiers_a[second]) * (tiers_b[first] - tiers_b[second])


def pair_agreement(answers: Sequence[Ranking]) -> Interval | None:
    """Agreement of any two people on the order of candidate pairs, as a share of the pairs that both order.

    Chance gives 0.5. The interval resamples instances. None if no two people ranked an instance.
    """
    # A decision is no second opinion.
    by_instance = grouped((answer.instance, answer) for answer in answers if not answer.adjudicated)
    alike = []
    compared = []
    for rankings in by_instance.values():
        both = same = 0
        for order in pair_orders(rankings):
            both += order != 0
            same += order > 0
        # Counts instead of shares: an instance with few ordered pairs must not weigh as much as one with many.
        if both:
            alike.append(same)
            compared.append(both)

    if not compared:
        return None
    alike_Q, compared_Q = np.array(alike), np.array(compared)
    (share,) = bootstrap(
        range(len(compared)),
        lambda index: np.array([alike_Q[index].sum() / compared_Q[index].sum()]),
        draws=AGREEMENT_DRAWS,
    )
    return share


class Concord(NamedTuple):
    """A person's pairs of candidates that others order too: in the same order, and all."""

    alike: int = 0
    compared: int = 0

    @property
    def doubt(self) -> str:
        """A doubt about the person: an order like chance, or a reversed one; empty without, or of few pairs."""
        if self.compared < FEWEST:
            return ""
        # Two standard deviations of the count that chance gives.
        wide = math.sqrt(self.compared)
        if self.alike < self.compared / 2 - wide:
            return "may rank backwards"
        if self.alike < self.compared / 2 + wide:
            return "ranks like chance"
        return ""


def agreement_by_person(answers: Iterable[Ranking]) -> dict[str, Concord]:
    """Compare each person with everybody who ranked the same instances."""
    alike: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    by_instance = grouped((answer.instance, answer) for answer in answers if not answer.adjudicated)
    for rankings in by_instance.values():
        for two in combinations(rankings, 2):
            orders = [order > 0 for order in pair_orders(two) if order]
            for answer in two:
                alike[answer.annotator] += sum(orders)
                compared[answer.annotator] += len(orders)
    return {person: Concord(alike[person], compared[person]) for person in compared}


def question_of(answer: Ranking) -> str:
    """Return the judge's question: the theme, else all criteria, else the general one."""
    if answer.theme:
        return questions.same_theme(answer.theme)
    # In one question: people ranked by all of them, so a label judges no single criterion.
    sentences = []
    for criteria in answer.criteria.values():
        for text in criteria.values():
            sentence = text.strip()
            if not sentence.endswith((".", "!", "?")):
                sentence += "."
            sentences.append(sentence)
    if sentences:
        return questions.meets_criterion(" ".join(sentences))
    return questions.consistent()


def label_pairs(answers: Sequence[Ranking]) -> tuple[list[Comparison], dict[str, int]]:
    """Pool the votes of all rankings for a question about an unordered pair; the majority is the label.

    A question's votes for a candidate count if at least half of its people gave the same one: of three people, two who
    put it in the middle outweigh one who put it first. An adjudicator's decision replaces the rankings of its instance.
    It also outvotes the instance that has the same pair from the other side.

    Returns:
        The pairs, whose images are named as in the rankings, and counts of votes and labels. `undecided` pairs have
        votes and no majority.
    """
    # Collect the votes. Decisions come first, so that later rankings of the same pair are skipped.
    voted: dict[str, Comparison] = {}
    votes: dict[str, list[int]] = {}  # No, Yes
    adjudicated: set[str] = set()
    by_instance = grouped((answer.instance, answer) for answer in final_answers(answers))
    for rankings in sorted(by_instance.values(), key=lambda rankings: not rankings[0].adjudicated):
        of_instance: dict[str, list[int]] = {}
        for answer in rankings:
            for pair in voted_pairs(answer):
                key = pair_key(pair)
                voted.setdefault(key, pair)
                of_instance.setdefault(key, [0, 0])[pair.consistent] += 1
        is_decision = rankings[0].adjudicated
        if is_decision:
            adjudicated |= of_instance.keys()
        for key, no_yes in of_instance.items():
            pooled = votes.setdefault(key, [0, 0])
            # Divided people cast no vote, and no vote outweighs a decision.
            if 2 * max(no_yes) >= len(rankings) and (is_decision or key not in adjudicated):
                pooled[False] += no_yes[False]
                pooled[True] += no_yes[True]

    # The majority decides. Sorted, so that the pairs do not depend on the order in which people answered.
    pairs = []
    for key in sorted(voted):
        no, yes = votes[key]
        if yes != no:
            pairs.append(replace(voted[key], consistent=yes > no))

    yes_count = sum(pair.consistent for pair in pairs)
    no_count = len(pairs) - yes_count
    counts = {"votes": sum(map(sum, votes.values())), "yes": yes_count, "no": no_count}
    return pairs, counts | {"undecided": len(voted) - len(pairs)}


def voted_pairs(answer: Ranking) -> Iterator[Comparison]:
    """Label the pairs of the reference with a ranking's best and worst candidates."""
    question = question_of(answer)
    for candidate, consistent in best_worst(answer.tiers):
        first, second = in_either_order(answer.reference, candidate)
        images = (Path(first), Path(second))
        yield Comparison(images, question, consistent, category=answer.category, group=answer.group)


def pair_key(pair: Comparison) -> str:
    """Key of a pair and its question, the same in both orders."""
    names = sorted(image.as_posix() for image in pair.images)
    return f"{_digest(*names)}-{_digest(pair.question)[:8]}"


def _digest(*texts: str) -> str:
    return text_digest("\n".join(texts))[:24]


def in_either_order(first: str, second: str) -> tuple[str, str]:
    """Order a pair by a hash of its names, so that no judge can learn from the order."""
    low, high = sorted((first, second))
    if int(_digest(low, high), 16) % 2:
        return low, high
    return high, low


def majority_rankings(answers: Sequence[Ranking]) -> list[Ranking]:
    """Merge the rankings of each instance into one, by decision or majority.

    A candidate wins against another that more people rank below it than above; the number of wins less losses is the
    order. An instance in which two candidates have the same number is left out.
    """
    by_instance = grouped((answer.instance, answer) for answer in final_answers(answers))
    merged = []
    for _, rankings in sorted(by_instance.items()):
        tiers_of_people = list(map(tier_of, rankings))
        wins = dict.fromkeys(rankings[0].candidates, 0)
        for first, second in permutations(wins, 2):
            better = sum(tiers[first] < tiers[second] for tiers in tiers_of_people)
            worse = sum(tiers[first] > tiers[second] for tiers in tiers_of_people)
            if better > worse:
                wins[first] += 1
                wins[second] -= 1
        if len(set(wins.values())) == len(wins):
            best_first = sorted(wins, key=wins.__getitem__, reverse=True)
            merged.append(replace(rankings[0], tiers=tuple((name,) for name in best_first)))
    return merged


def split_groups(ties: Iterable[tuple[str, str]], *, test_share: float, seed: int = 0) -> dict[str, Split]:
    """Map each group to its split; no tie connects the two. Deterministic, independent of the order of `ties`.

    Args:
        ties: (group, theme or image): groups that share a theme or an image belong to one split.
        test_share: share of the groups to test on.

    Returns:
        A split with a share above 0 is empty only if there is a single independent group.
    """
    # Sort before the shuffle: the splits depend on the groups and the seed, not on the order of the answers.
    clusters = sorted(sorted(groups) for groups in components(ties))
    Random(seed).shuffle(clusters)

    # The split that is farther behind its share receives the next cluster.
    total = sum(map(len, clusters))
    behind = {"train": (1 - test_share) * total, "test": test_share * total}
    members: dict[Split, list[list[str]]] = {"train": [], "test": []}
    for cluster in clusters:
        split: Split = "test" if behind["test"] > behind["train"] else "train"
        members[split].append(cluster)
        behind[split] -= len(cluster)

    # If there are too few clusters for a small share, it receives the smallest one of the other split.
    for empty, full in ((members["train"], members["test"]), (members["test"], members["train"])):
        if 0 < test_share < 1 and not empty and len(full) > 1:
            empty.append(full.pop(full.index(min(full, key=len))))
    split_of: dict[str, Split] = {}
    for split, families in members.items():
        split_of |= dict.fromkeys(chain(*families), split)
    return split_of
