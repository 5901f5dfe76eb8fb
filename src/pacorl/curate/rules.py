"""Rankings → labelled pairs by a named rule, and splits that nothing leaks through.

The paper does not publish its rule. `best_worst` is the one that its numbers suggest: the best candidate of a ranking
is consistent with the reference, the worst is not.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TypeVar

from pacorl.core import questions
from pacorl.curate.records import Answer, LabelledPair

Choice = TypeVar("Choice")


def best_worst(candidates: Sequence[str]) -> list[tuple[str, bool]]:
    """Yes for the best, No for the worst, nothing for those between."""
    return [(candidates[0], True), (candidates[-1], False)]


def halves(candidates: Sequence[str]) -> list[tuple[str, bool]]:
    """Yes for the better half, No for the worse; the middle one of an odd number is left out."""
    half = len(candidates) // 2
    return [(name, True) for name in candidates[:half]] + [(name, False) for name in candidates[-half:]]


RULES: dict[str, Callable[[Sequence[str]], list[tuple[str, bool]]]] = {"best_worst": best_worst, "halves": halves}
QUESTIONS: dict[str, Callable[[str], str]] = {
    "theme": questions.same_theme,
    "plain": lambda theme: questions.consistent(),
}


@dataclass(frozen=True, slots=True)
class Balance:
    """What became of the votes."""

    rankings: int
    annotators: int
    votes: int
    yes: int
    no: int
    tied: int
    """Unordered pairs with as many votes for Yes as for No: dropped."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def label_pairs(
    answers: Sequence[Answer], *, rule: str = "best_worst", question: str = "theme"
) -> tuple[list[LabelledPair], Balance]:
    """Every vote of every ranking goes to its unordered pair; the majority labels it, and ties are dropped.

    Raises ValueError for an unknown rule or question.
    """
    vote, ask = _choice(RULES, rule, "rule"), _choice(QUESTIONS, question, "question")
    votes: dict[str, Counter[bool]] = defaultdict(Counter)
    seen: dict[str, tuple[Answer, tuple[str, str]]] = {}
    for answer in answers:
        for candidate, consistent in vote(answer.candidates):
            key = pair_key(answer.reference, candidate)
            votes[key][consistent] += 1
            seen.setdefault(key, (answer, in_either_order(answer.reference, candidate)))
    pairs = [_pair(key, *seen[key], votes[key], ask) for key in sorted(votes) if votes[key][True] != votes[key][False]]
    yes = sum(pair.consistent for pair in pairs)
    balance = Balance(
        rankings=len(answers),
        annotators=len({answer.annotator for answer in answers}),
        votes=sum(count.total() for count in votes.values()),
        yes=yes,
        no=len(pairs) - yes,
        tied=len(votes) - len(pairs),
    )
    return pairs, balance


def _pair(
    key: str, answer: Answer, images: tuple[str, str], votes: Counter[bool], ask: Callable[[str], str]
) -> LabelledPair:
    return LabelledPair(
        key=key,
        group=answer.group,
        images=images,
        consistent=votes[True] > votes[False],
        question=ask(answer.theme),
        category=answer.category,
        votes=(votes[True], votes[False]),
    )


def pair_key(first: str, second: str) -> str:
    """One name for both orders of a pair."""
    return sha256("\n".join(sorted((first, second))).encode()).hexdigest()[:24]


def in_either_order(first: str, second: str) -> tuple[str, str]:
    """The pair in an order that its names decide like a coin, so that no judge can learn from the order."""
    low, high = sorted((first, second))
    return (low, high) if int(pair_key(low, high), 16) % 2 else (high, low)


def mean_rankings(answers: Sequence[Answer]) -> tuple[list[Answer], int]:
    """One ranking per instance, by mean rank over its annotators; and how many instances were dropped for ties."""
    by_instance: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_instance[answer.instance].append(answer)
    merged, dropped = [], 0
    for instance, group in sorted(by_instance.items()):
        rank = {name: sum(answer.candidates.index(name) for answer in group) for name in group[0].candidates}
        if len(set(rank.values())) < len(rank):
            dropped += 1
            continue
        order = tuple(sorted(rank, key=lambda name: rank[name]))
        first = group[0]
        merged.append(Answer(instance, "mean", first.group, first.reference, order, first.theme, first.category))
    return merged, dropped


def split_groups(ties: Iterable[tuple[str, str]], *, shares: Mapping[str, float], seed: int = 0) -> dict[str, str]:
    """group → split, so that no tie runs between two splits.

    ties: (group, anything it holds): groups that share a theme or a picture go to one split together.
    shares: split → share of the groups; they sum to 1. Deterministic, whatever the order of `ties`.
    """
    if abs(sum(shares.values()) - 1) > 1e-9 or min(shares.values()) < 0:
        raise ValueError(f"the shares of the splits {dict(shares)} must be positive and sum to 1")
    clusters = sorted(_clusters(ties))
    random.Random(seed).shuffle(clusters)
    total = sum(map(len, clusters))
    result: dict[str, str] = {}
    for cluster in clusters:
        # The split that is farthest behind its share takes the next cluster.
        filled = Counter(result.values())
        name = max(shares, key=lambda split: shares[split] * total - filled[split])
        result |= dict.fromkeys(cluster, name)
    return result


def _clusters(ties: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups that share anything, together (union-find)."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(node: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(node, node)
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for group, thing in ties:
        parent[root(("group", group))] = root(("thing", thing))
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in sorted(parent):
        if node[0] == "group":
            found[root(node)].append(node[1])
    return list(found.values())


def _choice(table: Mapping[str, Choice], name: str, what: str) -> Choice:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; there are {', '.join(table)}")
    return table[name]
