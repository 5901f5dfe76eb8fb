"""Rankings → labelled pairs, and splits without leaks.

The paper does not publish its rule. Its numbers suggest `best_worst`: the best candidate of a ranking is consistent
with the reference, the worst is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import numpy as np

from pacorl.core import questions
from pacorl.core.ranking import FEWEST_FOR_INTERVAL, Interval, bootstrap
from pacorl.dataset.folder import OWN_QUESTION, LabelledPair, final_answers
from pacorl.io.files import text_digest
from pacorl.records.rankings import Ranking

AGREEMENT_DRAWS = 500
"""Resamples for the interval of people's agreement, which the administrator's page computes after each ranking."""


def best_worst(tiers: Sequence[Sequence[str]]) -> list[tuple[str, bool]]:
    """Label the best tier Yes and the worst tier No; the tiers between, or a single one, stay unlabelled."""
    if len(tiers) < 2:
        return []
    return [(name, True) for name in tiers[0]] + [(name, False) for name in tiers[-1]]


def mean_ranks(tiers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Candidate → rank from 1; tied candidates share the mean of their ranks."""
    ranks: dict[str, float] = {}
    for tier in tiers:
        ranks |= dict.fromkeys(tier, len(ranks) + (len(tier) + 1) / 2)
    return ranks


def shared_rankings(answers: Sequence[Ranking]) -> list[list[Ranking]]:
    """Rankings of each instance that several people ranked; a decision is no second opinion."""
    by_instance = defaultdict(list)
    for answer in answers:
        if not answer.adjudicated:
            by_instance[answer.instance].append(answer)
    return [rankings for rankings in by_instance.values() if len(rankings) > 1]


def pair_agreement(answers: Sequence[Ranking]) -> Interval | None:
    """Share of pairs of candidates that any two people put in the same order, of those that both put in an order.

    Chance gives 0.5. The interval resamples instances. None if no two people ranked an instance.
    """
    alike = []
    compared = []
    for rankings in shared_rankings(answers):
        both = same = 0
        for one, other in combinations([mean_ranks(answer.tiers) for answer in rankings], 2):
            for first, second in combinations(one, 2):
                # 0 for a tie in either ranking, which leaves the pair without an order.
                order = (one[first] - one[second]) * (other[first] - other[second])
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
        fewest=FEWEST_FOR_INTERVAL,
    )
    return share


def _by_theme(answer: Ranking) -> str:
    if answer.theme:
        return questions.same_theme(answer.theme)
    if answer.criteria:
        return _by_criteria(answer)
    return questions.consistent()


def _by_criteria(answer: Ranking) -> str:
    """Join all criteria into one question: people ranked by all of them, so a label judges no single criterion."""
    sentences = []
    for criteria in answer.criteria.values():
        for text in criteria.values():
            sentence = text.strip()
            if not sentence.endswith((".", "!", "?")):
                sentence += "."
            sentences.append(sentence)

    if not sentences:
        raise ValueError(
            f"ranking {answer.instance} by {answer.annotator} has no criteria to ask for; give it some, or ask for its "
            "theme (--question theme)"
        )
    return questions.meets_criterion(" ".join(sentences))


def _as_asked(answer: Ranking) -> str:
    """Take people's own question as a criterion, as `pacorl score --criterion` asks it."""
    if answer.question in ("", OWN_QUESTION):
        return _by_theme(answer)
    return questions.meets_criterion(answer.question)


QUESTIONS: dict[str, Callable[[Ranking], str]] = {
    "theme": _by_theme,
    "criteria": _by_criteria,
    "plain": lambda answer: questions.consistent(),
    "asked": _as_asked,
}
"""Question of a ranking's pairs. theme: its theme, else its criteria, else the plain question. asked: the lead's own
wording of the page's question, else as theme."""


def other_questions(answers: Sequence[Ranking], question: str) -> dict[str, int]:
    """Count rankings by a wording of the user's own that the judge's question does not contain."""
    counts: dict[str, int] = defaultdict(int)
    for answer in answers:
        own = answer.question not in ("", OWN_QUESTION)
        if own and answer.question.casefold().rstrip(".!?") not in QUESTIONS[question](answer).casefold():
            counts[answer.question] += 1
    return dict(counts)


def label_pairs(answers: Sequence[Ranking], *, question: str = "theme") -> tuple[list[LabelledPair], dict[str, int]]:
    """Count every vote of every ranking for its question about an unordered pair; the majority is the label.

    An adjudicator's decision replaces the rankings of its instance. It also outvotes the instance that has the same
    pair from the other side.

    Returns:
        The pairs, and counts of votes and labels. A `tied` pair has as many votes for Yes as for No and is dropped.
    """
    if question not in QUESTIONS:
        raise ValueError(f"unknown question {question!r}; there are {', '.join(QUESTIONS)}")

    # Collect the votes. Decisions come first, so that later rankings of the same pair are skipped.
    voted: dict[str, LabelledPair] = {}
    adjudicated: set[str] = set()
    for answer in sorted(final_answers(answers), key=lambda answer: not answer.adjudicated):
        # The question of this ranking, and a pair per vote.
        text = QUESTIONS[question](answer)
        for images, consistent in _voted_pairs(answer):
            key = pair_key(*images, text)
            if answer.adjudicated:
                adjudicated.add(key)
            elif key in adjudicated:
                continue

            new = LabelledPair(key, answer.group, images, consistent, text, category=answer.category)
            pair = voted.setdefault(key, new)
            yes, no = pair.votes
            voted[key] = replace(pair, votes=(yes + consistent, no + (not consistent)))

    # The majority decides. Sorted, so that the pairs do not depend on the order in which people answered.
    pairs = []
    for _, pair in sorted(voted.items()):
        yes, no = pair.votes
        if yes != no:
            pairs.append(replace(pair, consistent=yes > no))

    # Statistics of people's rankings: decisions are counted apart.
    ranked = [answer for answer in answers if not answer.adjudicated]
    yes_count = sum(pair.consistent for pair in pairs)
    return pairs, {
        "rankings": len(ranked),
        "annotators": len({answer.annotator for answer in ranked}),
        "adjudicated": len(answers) - len(ranked),
        "votes": sum(sum(pair.votes) for pair in voted.values()),
        "yes": yes_count,
        "no": len(pairs) - yes_count,
        "tied": len(voted) - len(pairs),
    }


def _voted_pairs(answer: Ranking) -> Iterator[tuple[tuple[str, str], bool]]:
    """Yield a ranking's votes, each for a candidate with the reference."""
    for candidate, consistent in best_worst(answer.tiers):
        yield in_either_order(answer.reference, candidate), consistent


def pair_key(first: str, second: str, question: str) -> str:
    """Key of a pair and its question, the same in both orders."""
    return f"{_digest(*sorted((first, second)))}-{_digest(question)[:8]}"


def _digest(*texts: str) -> str:
    return text_digest("\n".join(texts))[:24]


def in_either_order(first: str, second: str) -> tuple[str, str]:
    """Order a pair by a hash of its names, so that no judge can learn from the order."""
    low, high = sorted((first, second))
    if int(_digest(low, high), 16) % 2:
        return low, high
    return high, low


def mean_rankings(answers: Sequence[Ranking]) -> tuple[list[Ranking], int]:
    """One ranking per instance, by decision or mean rank, and the number of instances dropped for ties."""
    # Rankings by instance.
    by_instance: dict[str, list[Ranking]] = defaultdict(list)
    for answer in final_answers(answers):
        by_instance[answer.instance].append(answer)

    merged = []
    dropped = 0
    # The sum of ranks orders as their mean does.
    for _, group in sorted(by_instance.items()):
        rank_sum = dict.fromkeys(group[0].candidates, 0.0)
        for answer in group:
            for name, rank in mean_ranks(answer.tiers).items():
                rank_sum[name] += rank

        if len(set(rank_sum.values())) < len(rank_sum):
            dropped += 1
            continue
        order = tuple(sorted(rank_sum, key=rank_sum.__getitem__))
        merged.append(replace(group[0], annotator="mean", candidates=order, ranks=()))
    return merged, dropped


def split_groups(ties: Iterable[tuple[str, str]], *, shares: Mapping[str, float], seed: int = 0) -> dict[str, str]:
    """group → split; no tie connects two splits. Deterministic, independent of the order of `ties`.

    Args:
        ties: (group, theme or image): groups that share a theme or an image belong to one split.
        shares: split → share of the groups; they sum to 1.

    Returns:
        A split with a share above 0 is empty only if there are too few independent groups.
    """
    if abs(sum(shares.values()) - 1) > 1e-9 or min(shares.values()) < 0:
        raise ValueError(f"the shares of the splits {dict(shares)} must be positive and sum to 1")

    # Sort before the shuffle: the splits depend on the groups and the seed, not on the order of the answers.
    clusters = sorted(_clusters(ties))
    Random(seed).shuffle(clusters)

    # The split that is farthest behind its share receives the next cluster.
    total = sum(len(cluster) for cluster in clusters)
    dealt: dict[str, list[list[str]]] = {name: [] for name in shares}
    size = dict.fromkeys(shares, 0)
    for cluster in clusters:
        name = max(shares, key=lambda split: shares[split] * total - size[split])
        dealt[name].append(cluster)
        size[name] += len(cluster)

    # If there are too few clusters for a small share, it receives the smallest cluster of a split with several.
    for name, share in shares.items():
        giver = max(dealt.values(), key=len)
        if share > 0 and not dealt[name] and len(giver) > 1:
            dealt[name].append(giver.pop(giver.index(min(giver, key=len))))

    # All groups of a cluster get its split.
    split_of = {}
    for name, assigned in dealt.items():
        for cluster in assigned:
            split_of.update(dict.fromkeys(cluster, name))
    return split_of


def _clusters(ties: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Find the connected components of the groups (union-find)."""
    parent: dict[str, str] = {}
    first_group: dict[str, str] = {}

    def root(group: str) -> str:
        parent.setdefault(group, group)
        while parent[group] != group:
            # Halving the path keeps later searches short.
            parent[group] = parent[parent[group]]
            group = parent[group]
        return group

    for group, member in ties:
        parent[root(group)] = root(first_group.setdefault(member, group))

    clusters: dict[str, list[str]] = defaultdict(list)
    # Sorted, so that the clusters do not depend on the order of the ties.
    for group in sorted(parent):
        clusters[root(group)].append(group)
    return list(clusters.values())
