"""Rankings → labelled pairs, and splits without leaks.

The paper does not publish its rule. Its numbers suggest `best_worst`: the best candidate of a ranking is consistent
with the reference, the worst is not.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations
from pathlib import Path
from random import Random
from typing import Literal

from pacorl.core import questions
from pacorl.core.batches import components, grouped
from pacorl.dataset.folder import final_answers
from pacorl.io.files import text_digest
from pacorl.records.rankings import Ranking
from pacorl.types import Comparison

Split = Literal["train", "test"]


def best_worst(tiers: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
    """Label the best tier Yes and the worst tier No; the tiers between, or a single one, stay unlabelled."""
    if len(tiers) < 2:
        return []
    return [(name, True) for name in tiers[0]] + [(name, False) for name in tiers[-1]]


def tier_of(answer: Ranking) -> dict[str, int]:
    """Map each candidate to the number of its tier, best first; tied candidates share one."""
    return {name: number for number, tier in enumerate(answer.tiers) for name in tier}


def alike_pairs(answers: Iterable[Ranking], *, decided: bool = False) -> dict[str, tuple[int, int]]:
    """Compare each person with everybody who ranked the same instances, or with their decisions.

    Returns:
        Person → the number of pairs of candidates in the same order, of which chance gives half, and of all pairs that
        both order. A tie does not count.
    """
    orders: dict[str, list[bool]] = defaultdict(list)
    by_instance = grouped((answer.instance, answer) for answer in answers)
    for rankings in by_instance.values():
        for one, other in combinations(rankings, 2):
            # A decision is no second opinion.
            if (one.adjudicated or other.adjudicated) != decided:
                continue
            tiers_a, tiers_b = tier_of(one), tier_of(other)
            for first, second in combinations(tiers_a, 2):
                order = (tiers_a[first] - tiers_a[second]) * (tiers_b[first] - tiers_b[second])
                if order:
                    orders[one.annotator].append(order > 0)
                    orders[other.annotator].append(order > 0)
    return {person: (sum(alike), len(alike)) for person, alike in orders.items()}


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
        The pairs, whose images are named as in the rankings, and counts of votes and labels. `contradicted` pairs have
        counted votes for both labels, of people or of both directions; `undecided` ones have votes and no majority.
    """
    final = final_answers(answers)
    decisions = [answer for answer in final if answer.adjudicated]
    votes = _votes(answer for answer in final if not answer.adjudicated) | _votes(decisions)
    # Sorted, so that the pairs do not depend on the order in which people answered.
    pairs = []
    contradicted = 0
    for key in sorted(votes):
        yes = sum(pair.consistent for pair in votes[key])
        no = len(votes[key]) - yes
        contradicted += bool(yes and no)
        if yes != no:
            pairs.append(replace(votes[key][0], consistent=yes > no))

    yes_count = sum(pair.consistent for pair in pairs)
    counts = {"votes": sum(map(len, votes.values())), "yes": yes_count, "no": len(pairs) - yes_count}
    return pairs, counts | {"contradicted": contradicted, "undecided": len(votes) - len(pairs)}


def _votes(answers: Iterable[Ranking]) -> dict[str, list[Comparison]]:
    """Map the key of each pair to the votes that count, none if people are divided."""
    votes: dict[str, list[Comparison]] = defaultdict(list)
    by_instance = grouped((answer.instance, answer) for answer in answers)
    for rankings in by_instance.values():
        of_instance: dict[str, list[Comparison]] = defaultdict(list)
        for ranking in rankings:
            for pair in voted_pairs(ranking):
                of_instance[pair_key(pair)].append(pair)
        for key, pairs in of_instance.items():
            yes = sum(pair.consistent for pair in pairs)
            is_majority = 2 * max(yes, len(pairs) - yes) >= len(rankings)
            votes[key] += pairs if is_majority else []
    return votes


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
