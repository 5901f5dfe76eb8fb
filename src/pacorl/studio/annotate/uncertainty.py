"""Uncertainty sampling of questions (Lewis & Gale 1994): which ranking can be foretold least.

A ranking orders the pairs of its reference with each candidate. choix fits a Plackett–Luce score to each such pair
(Bradley–Terry for two candidates), group by group, because questions of two groups have no pair in common.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import choix
import numpy as np
from numpy.typing import NDArray

from pacorl.dataset.folder import Answer, Instance
from pacorl.studio.annotate.store import Person, Store, Task

Pair = frozenset[str]
"""Two images, whichever of them was the reference."""

PENALTY = 1 / 8
"""Weight of Σ s² in choix's objective: the prior N(0, 2²) of each score."""


def fit_scores(rankings: Sequence[Answer]) -> dict[Pair, float]:
    """Fit the Plackett–Luce score of every pair that the rankings of one group order."""
    pairs = {frozenset((answer.reference, name)): 0 for answer in rankings for name in answer.candidates}
    index = {pair: number for number, pair in enumerate(pairs)}
    orders = [tuple(index[frozenset((answer.reference, name))] for name in answer.candidates) for answer in rankings]
    scores = choix.opt_rankings(len(index), orders, alpha=PENALTY)
    return dict(zip(index, scores.tolist(), strict=True))


def log_probability(score_M: NDArray[np.float64]) -> float:
    """Compute the log-probability of the most likely ranking of M candidates: low if the order is uncertain."""
    best_first = np.sort(score_M)[::-1]
    return -sum(float(np.logaddexp.reduce(best_first[rank:] - best)) for rank, best in enumerate(best_first))


def disagrees(rankings: Sequence[Answer]) -> bool:
    """Check whether the best or the worst candidate of a question has no majority: labels are made of these two."""
    tallies = [Counter(answer.candidates[end] for answer in rankings) for end in (0, -1)]
    return any(2 * max(tally.values()) <= len(rankings) for tally in tallies)


class LiveScores:
    """Scores of a store's rankings, control questions and decisions aside; a group is fitted again if it changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._instances = {one.id: one for one in store.instances()}
        self._version = -1
        self._rankings: dict[str, list[Answer]] = {}
        """Group → its rankings."""
        self._scores: dict[str, dict[Pair, float]] = {}

    def following(self, person: Person) -> list[Instance]:
        """List an annotator's or adjudicator's next questions: taken back ones, then the most uncertain first."""
        self._refresh()
        undone = self._store.undone(person.name)
        if person.adjudicates:
            answered = self._store.adjudicated()
            names = [name for name in undone if name not in answered]
            names += [instance.id for instance in self.open_disagreements()]
        else:
            unanswered = self._store.open_assignments(person.name)
            present = {name for name, _, _ in unanswered}
            names = [*(name for name in undone if name in present), *self._by_uncertainty(person.name, unanswered)]
        return [self._instances[name] for name in dict.fromkeys(names)]

    def open_disagreements(self) -> list[Instance]:
        """List the questions that people disagree on and no adjudicator has answered, the most uncertain first."""
        self._refresh()
        decided = self._store.adjudicated()
        rankings: dict[str, list[Answer]] = {}
        for answer in chain(*self._rankings.values()):
            rankings.setdefault(answer.instance, []).append(answer)
        contested = [self._instances[name] for name, given in rankings.items() if disagrees(given)]
        return sorted(
            (one for one in contested if one.id not in decided), key=lambda one: (self._certainty(one), one.id)
        )

    def opinions(self, task: Task) -> list[dict[str, Any]]:
        """List how people ranked a question, without their names, and the order by score: slots as they are shown."""
        self._refresh()
        instance = task.instance
        rankings = [one for one in self._rankings.get(instance.group, []) if one.instance == instance.id]
        orders: list[Iterable[str]] = [answer.candidates for answer in rankings]
        orders.append(instance.candidates[index] for index in np.argsort(-self._scores_of(instance), kind="stable"))
        names = [*(f"Person {number}" for number in range(1, len(rankings) + 1)), "All rankings together"]
        slot_of = {instance.candidates[index]: slot for slot, index in enumerate(task.slots)}
        return [
            {"name": name, "order": [slot_of[candidate] for candidate in order]}
            for name, order in zip(names, orders, strict=True)
        ]

    def _refresh(self) -> None:
        with self._lock:
            version = self._store.version()
            if version == self._version:
                return
            groups: dict[str, list[Answer]] = {}
            for answer in self._store.answers():
                if not answer.adjudicated:
                    groups.setdefault(answer.group, []).append(answer)
            unchanged = {name for name, rankings in groups.items() if self._rankings.get(name) == rankings}
            self._scores = {
                name: self._scores[name] if name in unchanged else fit_scores(rankings)
                for name, rankings in groups.items()
            }
            self._rankings = groups
            self._version = version

    def _scores_of(self, instance: Instance) -> NDArray[np.float64]:
        """(M,) scores of a question's candidates; 0 for a pair that nobody has ranked."""
        scores = self._scores.get(instance.group, {})
        return np.array([scores.get(frozenset((instance.reference, name)), 0.0) for name in instance.candidates])

    def _certainty(self, instance: Instance) -> float:
        # Rounded, since equal questions differ in the last bits.
        return round(log_probability(self._scores_of(instance)), 6)

    def _by_uncertainty(self, person: str, unanswered: Sequence[tuple[str, int, bool]]) -> list[str]:
        """Order control questions that are due, then questions by uncertainty, then the other control questions."""
        progress = self._store.progress(person)
        answered = progress["ranked"] + progress["skipped"]
        # A control question keeps its turn: uncertainty would place it first or last, and so give it away.
        due = [name for name, place, is_control in unanswered if is_control and place <= answered]
        later = [name for name, place, is_control in unanswered if is_control and place > answered]
        questions = [name for name, _, is_control in unanswered if not is_control]
        # A stable sort: equally uncertain questions keep the order of the shares.
        return [*due, *sorted(questions, key=lambda name: self._certainty(self._instances[name])), *later]
