"""The scores of what is being ranked, fitted again as rankings come in, and what people still disagree on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from pacorl.annotate.store import Person, Store, Task, public_key, shown_order
from pacorl.core.ranking import Floats
from pacorl.dataset.prior import read_prior
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


def information(scores: Scores, questions: Sequence[Instance], *, skill: float = 1.0) -> Floats:
    """How much a ranking of each question by somebody of this skill is expected to tell about the scores, in nats."""
    gains = np.zeros(len(questions))
    by_count: dict[int, list[int]] = {}
    for index, question in enumerate(questions):
        by_count.setdefault(len(question.candidates), []).append(index)
    for indices in by_count.values():
        items_QM = np.stack([scores.items(questions[index]) for index in indices])
        gains[indices] = scores.fit.information(items_QM, skill=skill)
    return gains


class LiveScores:
    """The scores of a store's rankings, control questions aside."""

    def __init__(self, store: Store, *, patience: float = PATIENCE) -> None:
        self._store, self._patience = store, patience
        self._lock = threading.Lock()
        self._instances = {one.id: one for one in store.instances()}
        self._questions = [one for one in self._instances.values() if not one.is_control]
        self._p_yes = read_prior(store.path.parent)
        self._version, self._stands_until = -1, 0.0
        self._scores: Scores | None = None

    def now(self) -> Scores:
        """The scores of all rankings so far, or of those a moment ago."""
        # Whoever comes during a fit gets the last one: of 34,000 rankings a fit takes seconds.
        if (last := self._scores) is not None and self._lock.locked():
            return last
        with self._lock:
            version = self._store.version()
            if self._scores is None or (version != self._version and time.monotonic() > self._stands_until):
                started = time.monotonic()
                self._scores = Scores(
                    self._store.answers(), questions=self._questions, previous=self._scores, p_yes=self._p_yes
                )
                self._version = version
                self._stands_until = time.monotonic() + self._patience * (time.monotonic() - started)
            return self._scores

    def open_disagreements(self) -> list[Disagreement]:
        """What no adjudicator has answered."""
        answered = self._store.adjudicated()
        return [one for one in disagreements(self.now(), self._questions) if one.instance.id not in answered]

    def following(self, person: Person) -> list[Instance]:
        """What an adjudicator, or somebody who ranks in the informative order, does next, the first thing first."""
        undone = self._store.undone(person.name)
        if person.adjudicates:
            answered = self._store.adjudicated()
            names = [name for name in undone if name not in answered]
            names += [one.instance.id for one in self.open_disagreements()]
        else:
            unanswered = self._store.open_assignments(person.name)
            present = {name for name, _, _ in unanswered}
            names = [*(name for name in undone if name in present), *self._by_information(person.name, unanswered)]
        return [self._instances[name] for name in dict.fromkeys(names)]

    def _by_information(self, person: str, unanswered: Sequence[tuple[str, int, bool]]) -> list[str]:
        """Control questions that are due, then what tells most; of what tells the same, in the order of the shares."""
        progress = self._store.progress(person)
        answered = progress["ranked"] + progress["skipped"]
        # A control question keeps its turn: the model would ask it first or last, and so give it away.
        due = [name for name, place, is_control in unanswered if is_control and place <= answered]
        later = [name for name, place, is_control in unanswered if is_control and place > answered]
        questions = [name for name, _, is_control in unanswered if not is_control]
        scores = self.now()
        gains = information(scores, [self._instances[name] for name in questions], skill=scores.skill(person))
        # Rounded, since equal questions differ in the last bits.
        order = np.argsort(-np.round(gains, 6), kind="stable")
        return [*due, *(questions[index] for index in order), *later]

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
        addresses = {}
        for question in self._questions:
            key = public_key(question.id)
            for slot, index in enumerate(shown_order(person.name, question)):
                pair = frozenset((question.reference, question.candidates[index]))
                addresses[pair] = [f"/images/{key}/reference", f"/images/{key}/{slot}"]

        def shown(pair: PairScore) -> dict[str, Any]:
            images = addresses[frozenset(pair.images)]
            return {"score": pair.score, "deviation": pair.deviation, "images": images}

        count = min(SHOWN, len(ranked) // 2)  # no pair is at both ends
        return {
            "skills": {one.annotator: one.skill for one in scores.skills()},
            "most": [shown(pair) for pair in ranked[:count]],
            "least": [shown(pair) for pair in ranked[::-1][:count]],
            "rankings": len(scores.answers),
        }
