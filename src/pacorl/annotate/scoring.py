"""The scores of what is being ranked, fitted again as rankings come in, and what people still disagree on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from pacorl.annotate.store import Person, Store, Task, public_key, shown_order
from pacorl.dataset.records import Answer, Instance
from pacorl.dataset.scores import PairScore, Scores

PATIENCE = 10.0
"""A fit stands for so many times the seconds that it took: at most a tenth of a core goes into fits."""
SHOWN = 6
"""Pairs at each end of the scale on the administrator's page."""


SETTLED = 0.05
"""A contested order is settled once its posterior probability is beyond 1 − this: a careless person against careful
ones needs no adjudicator."""


class Disagreement(NamedTuple):
    """An instance of which people name different best or worst candidates."""

    instance: Instance
    doubt: float
    """The posterior probability that the likelier order of the most doubtful two of these is wrong, up to ½."""


def disagreements(scores: Scores, questions: Iterable[Instance]) -> list[Disagreement]:
    """What people disagree on and the scores leave open, the most doubtful first.

    Only the best and the worst count, since labels are made of them.
    """
    answers: dict[str, list[Answer]] = {}
    for answer in scores.answers:
        answers.setdefault(answer.instance, []).append(answer)
    contested = []
    for question in questions:
        given = answers.get(question.id, [])
        item = dict(zip(question.candidates, scores.items(question).tolist(), strict=True)) if len(given) > 1 else {}
        pairs = [pair for end in (0, -1) for pair in combinations(sorted({one.candidates[end] for one in given}), 2)]
        doubts = [min(p, 1 - p) for p in (scores.fit.better(item[one], item[other]) for one, other in pairs)]
        if max(doubts, default=0) > SETTLED:
            contested.append(Disagreement(question, max(doubts)))
    return sorted(contested, key=lambda one: (-one.doubt, one.instance.id))


class LiveScores:
    """The scores of a store's rankings, control questions aside."""

    def __init__(self, store: Store, *, patience: float = PATIENCE) -> None:
        self._store, self._patience = store, patience
        self._lock = threading.Lock()
        self._questions = [one for one in store.instances() if not one.is_control]
        self._version, self._stands_until = -1, 0.0
        self._scores: Scores | None = None

    def now(self) -> Scores:
        """The scores of all rankings so far, or of those a moment ago."""
        with self._lock:
            version = self._store.version()
            if self._scores is None or (version != self._version and time.monotonic() > self._stands_until):
                started = time.monotonic()
                self._scores = Scores(self._store.answers(), questions=self._questions, previous=self._scores)
                self._version = version
                self._stands_until = time.monotonic() + self._patience * (time.monotonic() - started)
            return self._scores

    def open_disagreements(self) -> list[Disagreement]:
        """What no adjudicator has answered."""
        answered = self._store.adjudicated()
        return [one for one in disagreements(self.now(), self._questions) if one.instance.id not in answered]

    def opinions(self, task: Task) -> list[dict[str, Any]]:
        """How people ranked it, without their names, and what all rankings together say: slots as they are shown."""
        scores, instance = self.now(), task.instance
        best_first = np.argsort(-scores.fit.score_I[scores.items(instance)], kind="stable")
        together = tuple(instance.candidates[index] for index in best_first)
        given = [answer.candidates for answer in scores.answers if answer.instance == instance.id]
        names = [*(f"Person {number}" for number in range(1, len(given) + 1)), "All rankings together"]
        slot_of = {instance.candidates[index]: slot for slot, index in enumerate(task.slots)}
        return [
            {"name": name, "order": [slot_of[candidate] for candidate in order]}
            for name, order in zip(names, [*given, together], strict=True)
        ]

    def summary(self, person: Person) -> dict[str, Any]:
        """Everybody's skill, and the pairs at both ends, with the addresses of their images for this person."""
        scores = self.now()
        ranked = [pair for pair in scores.pairs() if pair.rankings]
        places = {}
        for question in self._questions:
            for slot, index in enumerate(shown_order(person.name, question)):
                key = public_key(question.id)
                pair = frozenset((question.reference, question.candidates[index]))
                places[pair] = [f"/images/{key}/reference", f"/images/{key}/{slot}"]

        def shown(pair: PairScore) -> dict[str, Any]:
            addresses = places[frozenset(pair.images)]
            return {"score": pair.score, "deviation": pair.deviation, "images": addresses}

        least = ranked[::-1][: min(SHOWN, len(ranked) // 2)]
        return {
            "skills": {one.annotator: one.skill for one in scores.skills()},
            "most": [shown(pair) for pair in ranked[: min(SHOWN, len(ranked) // 2)]],
            "least": [shown(pair) for pair in least],
            "rankings": len(scores.answers),
        }
