"""Uncertainty sampling of questions (Lewis & Gale 1994): the least predictable ranking first.

A ranking orders the pairs of its reference with each candidate. choix fits a Plackett–Luce score to each such pair
(Bradley–Terry for two candidates), group by group, because questions of two groups have no pair in common.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import choix
import numpy as np
from numpy.typing import NDArray

from pacorl.dataset.folder import Instance
from pacorl.records.rankings import Ranking
from pacorl.studio.annotate.store import Person, Store, Task

Pair = frozenset[str]
"""Two images in any order."""

PENALTY = 1 / 8
"""Weight of Σ s² in choix's objective: the prior N(0, 2²) of each score."""


def fit_scores(rankings: Sequence[Ranking]) -> dict[Pair, float]:
    """Fit the Plackett–Luce score of every pair that the rankings of one group order."""
    index: dict[Pair, int] = {}
    orders: list[tuple[int, ...]] = []
    # The model has no ties: a tied ranking counts half in either order, and then every ranking counts as two halves.
    steps = (1, -1) if any(answer.has_ties for answer in rankings) else (1,)
    for answer, step in product(rankings, steps):
        names = chain.from_iterable(tier[::step] for tier in answer.tiers)
        pairs = [frozenset((answer.reference, name)) for name in names]
        orders.append(tuple(index.setdefault(pair, len(index)) for pair in pairs))
    scores = choix.opt_rankings(len(index), orders, alpha=PENALTY * len(steps))
    return dict(zip(index, scores.tolist(), strict=True))


def log_probability(score_M: NDArray[np.float64]) -> float:
    """Compute the log-probability of the most likely ranking of M candidates: low if the order is uncertain."""
    best_first = np.sort(score_M)[::-1]
    negative = 0.0
    for rank, best in enumerate(best_first):
        negative += float(np.logaddexp.reduce(best_first[rank:] - best))
    return -negative


def disagrees(rankings: Sequence[Ranking]) -> bool:
    """Check whether the best or the worst candidate of a question has no majority: labels are made of these two."""
    for end in (0, -1):
        tally = Counter(chain.from_iterable(answer.tiers[end] for answer in rankings))
        if 2 * max(tally.values()) <= len(rankings):
            return True
    return False


class LiveScores:
    """Scores of a store's rankings, control questions and decisions aside; a group is fitted again if it changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._instances = {instance.id: instance for instance in store.instances()}
        self._version = -1
        self._rankings: dict[str, list[Ranking]] = {}
        """Group → its rankings."""
        self._scores: dict[str, dict[Pair, float]] = {}

    def following(self, person: Person) -> list[Instance]:
        """List an annotator's or adjudicator's next questions: undone questions, then the most uncertain first."""
        self._refresh()
        undone = self._store.undone(person.name)
        if person.adjudicates:
            answered = self._store.adjudicated()
            names = [name for name in undone if name not in answered]
            names += [instance.id for instance in self.open_disagreements()]
        else:
            unanswered = self._store.open_assignments(person.name)
            present = {name for name, _, _ in unanswered}
            names = [name for name in undone if name in present]
            names += self._by_uncertainty(person.name, unanswered)
        return [self._instances[name] for name in dict.fromkeys(names)]

    def open_disagreements(self) -> list[Instance]:
        """List the disputed questions without an adjudicator's answer, the most uncertain first."""
        self._refresh()
        decided = self._store.adjudicated()
        rankings: dict[str, list[Ranking]] = {}
        for answer in chain(*self._rankings.values()):
            rankings.setdefault(answer.instance, []).append(answer)
        contested = []
        for name, answers in rankings.items():
            if name not in decided and disagrees(answers):
                contested.append((self._certainty(self._instances[name]), name))
        return [self._instances[name] for _, name in sorted(contested)]

    def opinions(self, task: Task) -> list[dict[str, Any]]:
        """List people's rankings of a question, without their names, and the order by score, all as shown slots."""
        self._refresh()
        instance = task.instance
        slot_of = {instance.candidates[index]: slot for slot, index in enumerate(task.slots)}
        opinions: list[dict[str, Any]] = []
        for answer in self._rankings.get(instance.group, []):
            if answer.instance == instance.id:
                order = []
                for tier in answer.tiers:
                    slots = [slot_of[candidate] for candidate in tier]
                    order.append(slots if len(slots) > 1 else slots[0])
                opinions.append({"name": f"Person {len(opinions) + 1}", "order": order})

        # Stable: candidates of equal score keep their order on every visit.
        best_first = np.argsort(-self._scores_of(instance), kind="stable")
        together = [slot_of[instance.candidates[index]] for index in best_first]
        return [*opinions, {"name": "All rankings together", "order": together}]

    def _refresh(self) -> None:
        with self._lock:
            version = self._store.version()
            if version == self._version:
                return
            groups: dict[str, list[Ranking]] = {}
            for answer in self._store.answers():
                if not answer.adjudicated:
                    groups.setdefault(answer.group, []).append(answer)
            scores = {}
            for name, rankings in groups.items():
                # A fit takes far longer than a comparison, and an answer changes the rankings of one group.
                if self._rankings.get(name) == rankings:
                    scores[name] = self._scores[name]
                else:
                    scores[name] = fit_scores(rankings)
            self._scores = scores
            self._rankings = groups
            self._version = version

    def _scores_of(self, instance: Instance) -> NDArray[np.float64]:
        """Look up the (M,) scores of a question's candidates; 0 for an unranked pair."""
        scores = self._scores.get(instance.group, {})
        return np.array([scores.get(frozenset((instance.reference, name)), 0.0) for name in instance.candidates])

    def _certainty(self, instance: Instance) -> float:
        # Rounded, since equal questions differ in the last bits.
        return round(log_probability(self._scores_of(instance)), 6)

    def _by_uncertainty(self, person: str, unanswered: Sequence[tuple[str, int, bool]]) -> list[str]:
        """Order the due control questions, then questions by uncertainty, then the other control questions."""
        progress = self._store.progress(person)
        answered = progress["ranked"] + progress["skipped"]
        # A control question keeps its turn: uncertainty would place it first or last, and so give it away.
        due: list[str] = []
        later: list[str] = []
        questions: list[str] = []
        for name, position, is_control in unanswered:
            if not is_control:
                questions.append(name)
            elif position <= answered:
                due.append(name)
            else:
                later.append(name)
        # A stable sort: equally uncertain questions keep the order of the shares.
        return [*due, *sorted(questions, key=lambda name: self._certainty(self._instances[name])), *later]
