"""The scores of what is being ranked, fitted again as rankings come in, and what the administrator sees of them."""

from __future__ import annotations

import threading
import time
from typing import Any

from pacorl.annotate.store import Person, Store, public_key, shown_order
from pacorl.dataset.scores import PairScore, Scores

PATIENCE = 10.0
"""A fit stands for so many times the seconds that it took: at most a tenth of a core goes into fits."""
SHOWN = 6
"""Pairs at each end of the scale on the administrator's page."""


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
