"""Rankings → labelled pairs by a named rule, and splits that nothing leaks through.

A rule reads a ranking's tiers, best first, in which tied candidates stand together. The paper does not publish its
rule. `best_worst` is the one that its numbers suggest: the best candidate of a ranking is consistent with the
reference, the worst is not.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from pacorl.core import questions
from pacorl.dataset.folder import Answer, LabelledPair, final_answers


def best_worst(tiers: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
    """Yes for the best, No for the worst, nothing for those between; all of a tie are the best or the worst."""
    return [(name, True) for name in tiers[0]] + [(name, False) for name in tiers[-1]]


def halves(tiers: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
    """Yes for the better half, No for the worse; those whose mean rank is the middle are left out."""
    ranks = mean_ranks(tiers)
    middle = (len(ranks) + 1) / 2
    return [(name, rank < middle) for name, rank in ranks.items() if rank != middle]


def mean_ranks(tiers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Candidate → rank from 1; tied ones share the mean of the ranks that they take up."""
    ranks: dict[str, float] = {}
    for tier in tiers:
        ranks |= dict.fromkeys(tier, len(ranks) + (len(tier) + 1) / 2)
    return ranks


def _by_theme(answer: Answer) -> str:
    if answer.theme:
        return questions.same_theme(answer.theme)
    return _by_criteria(answer) if answer.criteria else questions.consistent()


def _by_criteria(answer: Answer) -> str:
    """All criteria in one question: people ranked by all of them, so a label says nothing about one alone."""
    texts = [text.strip() for criteria in answer.criteria.values() for text in criteria.values()]
    if not texts:
        raise ValueError(
            f"ranking {answer.instance} by {answer.annotator} has no criteria to ask for; give it some, or ask for its "
            "theme (--question theme)"
        )
    return questions.meets_criterion(" ".join(text if text.endswith((".", "!", "?")) else f"{text}." for text in texts))


RULES: dict[str, Callable[[Sequence[Sequence[str]]], list[tuple[str, bool]]]] = {
    "best_worst": best_worst,
    "halves": halves,
}
QUESTIONS: dict[str, Callable[[Answer], str]] = {
    "theme": _by_theme,
    "criteria": _by_criteria,
    "plain": lambda answer: questions.consistent(),
}
"""The question about a ranking's pairs. theme: by its theme; without one by its criteria; with neither, plainly."""


def label_pairs(
    answers: Sequence[Answer], *, rule: str = "best_worst", question: str = "theme"
) -> tuple[list[LabelledPair], dict[str, int]]:
    """Every vote of every ranking goes to its question about its unordered pair; the majority labels it.

    An adjudicator's decision stands in the place of the instance's rankings, and outvotes those of the instance that
    has the same pair from its other side.

    Returns:
        The pairs, and how many votes gave how many labels; `tied` pairs, with as many for Yes as for No, are dropped.
    """
    for table, name, what in ((RULES, rule, "rule"), (QUESTIONS, question, "question")):
        if name not in table:
            raise ValueError(f"unknown {what} {name!r}; there are {', '.join(table)}")
    voted: dict[tuple[str, str], LabelledPair] = {}
    adjudicated: set[tuple[str, str]] = set()
    for answer in sorted(final_answers(answers), key=lambda answer: not answer.adjudicated):  # decisions first
        text = QUESTIONS[question](answer)
        for candidate, consistent in RULES[rule](answer.tiers):
            images = in_either_order(answer.reference, candidate)
            pair = LabelledPair(pair_key(*images), answer.group, images, consistent, text, category=answer.category)
            if answer.adjudicated:
                adjudicated.add((pair.key, text))
            elif (pair.key, text) in adjudicated:
                continue
            yes, no = (pair := voted.setdefault((pair.key, text), pair)).votes
            voted[pair.key, text] = replace(pair, votes=(yes + consistent, no + (not consistent)))
    pairs = _decided(voted)
    return pairs, {
        "rankings": sum(not answer.adjudicated for answer in answers),
        "annotators": len({answer.annotator for answer in answers if not answer.adjudicated}),
        "adjudicated": sum(answer.adjudicated for answer in answers),
        "votes": sum(sum(pair.votes) for pair in voted.values()),
        "yes": sum(pair.consistent for pair in pairs),
        "no": sum(not pair.consistent for pair in pairs),
        "tied": len(voted) - len(pairs),
    }


def _decided(voted: Mapping[tuple[str, str], LabelledPair]) -> list[LabelledPair]:
    """The pairs with the label of the majority, without those that are tied."""
    question_counts, pairs = Counter(key for key, _ in voted), []
    # Sorted, so that the pairs do not depend on the order in which people answered.
    for (key, text), pair in sorted(voted.items(), key=lambda entry: entry[0]):
        yes, no = pair.votes
        # Only if there is need of it: explanations of older folders stand under the bare key.
        suffix = question_suffix(text) if question_counts[key] > 1 else ""
        pairs += [replace(pair, key=key + suffix, consistent=yes > no)] if yes != no else []
    return pairs


def question_suffix(question: str) -> str:
    """Tells pairs of the same images with different questions apart."""
    return "-" + pair_key(question, "")[:8]


def pair_key(first: str, second: str) -> str:
    """A name for both orders of a pair."""
    return sha256("\n".join(sorted((first, second))).encode()).hexdigest()[:24]


def in_either_order(first: str, second: str) -> tuple[str, str]:
    """The pair in an order that its names decide like a coin, so that no judge can learn from the order."""
    low, high = sorted((first, second))
    return (low, high) if int(pair_key(low, high), 16) % 2 else (high, low)


def mean_rankings(answers: Sequence[Answer]) -> tuple[list[Answer], int]:
    """One ranking per instance, its decision or else by mean rank; and how many instances were dropped for ties."""
    by_instance: dict[str, list[Answer]] = defaultdict(list)
    for answer in final_answers(answers):
        by_instance[answer.instance].append(answer)
    merged, dropped = [], 0
    for _, group in sorted(by_instance.items()):
        ranks = [mean_ranks(answer.tiers) for answer in group]
        rank = {name: sum(person[name] for person in ranks) for name in group[0].candidates}
        if len(set(rank.values())) < len(rank):
            dropped += 1
            continue
        order = tuple(sorted(rank, key=lambda name: rank[name]))
        merged.append(replace(group[0], annotator="mean", candidates=order, ranks=()))
    return merged, dropped


def split_groups(ties: Iterable[tuple[str, str]], *, shares: Mapping[str, float], seed: int = 0) -> dict[str, str]:
    """group → split, so that no tie runs between two splits; deterministic, whatever the order of `ties`.

    Args:
        ties: (group, anything that it holds): groups that share a theme or an image go to one split together.
        shares: split → share of the groups; they sum to 1.

    Returns:
        A split with a share above 0 is empty only if too few groups may be parted.
    """
    if abs(sum(shares.values()) - 1) > 1e-9 or min(shares.values()) < 0:
        raise ValueError(f"the shares of the splits {dict(shares)} must be positive and sum to 1")
    # Sorted before the shuffle: the splits depend on the groups and the seed, not on the order of the answers.
    clusters = sorted(_clusters(ties))
    random.Random(seed).shuffle(clusters)
    total = sum(map(len, clusters))
    dealt: dict[str, list[list[str]]] = {name: [] for name in shares}
    size = dict.fromkeys(shares, 0)
    for cluster in clusters:
        # The split that is farthest behind its share takes the next cluster.
        name = max(shares, key=lambda split: shares[split] * total - size[split])
        dealt[name].append(cluster)
        size[name] += len(cluster)
    for name in [name for name in shares if shares[name] > 0 and not dealt[name]]:
        # Too few clusters for so small a share: it gets the smallest of whoever has several.
        giver = max(dealt.values(), key=len)
        if len(giver) > 1:
            dealt[name].append(giver.pop(giver.index(min(giver, key=len))))
    return {group: name for name, assigned in dealt.items() for cluster in assigned for group in cluster}


def _clusters(ties: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups that share anything, together (union-find)."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for group, member in ties:
        parent[root(("group", group))] = root(("thing", member))
    clusters: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in sorted(parent):
        if node[0] == "group":
            clusters[root(node)].append(node[1])
    return list(clusters.values())
