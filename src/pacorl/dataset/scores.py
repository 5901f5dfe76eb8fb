"""Scores of pairs of images, and the skill of those who ranked them, by `pacorl.core.plackett_luce`.

What is scored is how consistent two images are. A ranking orders the pairs of its reference with each candidate, so a
pair that two instances share, one from each side, ties them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pacorl.core.plackett_luce import Choices, Fit, fit
from pacorl.core.ranking import Indices
from pacorl.dataset.records import Answer, Instance
from pacorl.dataset.rules import in_either_order


@dataclass(frozen=True, slots=True)
class PairScore:
    """How consistent people find two images, on a scale on which 0 is the average of those compared with each other."""

    images: tuple[str, str]
    group: str
    score: float
    deviation: float
    """The posterior standard deviation of the score."""
    rankings: int
    """How many rankings it was part of."""


@dataclass(frozen=True, slots=True)
class AnnotatorSkill:
    """How well a person's rankings fit those of all: 1 is the average, 0 chance."""

    annotator: str
    skill: float
    rankings: int


class Scores:
    """The fit of all rankings of a dataset. Decisions about disagreements are no part of it: they come after it.

    Args:
        answers: the rankings.
        questions: further instances whose pairs are to have a score, though nobody may have ranked them.
        previous: scores of fewer answers about the same questions, from which this fit starts.
    """

    def __init__(
        self, answers: Sequence[Answer], *, questions: Iterable[Instance] = (), previous: Scores | None = None
    ) -> None:
        self.answers = [answer for answer in answers if not answer.adjudicated]
        self._decisions = [answer for answer in answers if answer.adjudicated]
        self.people = sorted({answer.annotator for answer in self.answers})
        self._item: dict[tuple[str, str], int] = {}
        self._group: list[str] = []
        ranked: list[Instance | Answer] = [*questions, *self.answers]
        for question in ranked:
            for name in question.candidates:
                pair = _pair(question.reference, name)
                if self._item.setdefault(pair, len(self._item)) == len(self._group):
                    self._group.append(question.group)
        person = {name: number for number, name in enumerate(self.people)}
        rankings = ((person[answer.annotator], self._tiers(answer)) for answer in self.answers)
        alike = previous is not None and (previous._item, previous.people) == (self._item, self.people)
        start = previous.fit if previous is not None and alike else None
        self.fit: Fit = fit(Choices.of(rankings), items=len(self._item), people=len(self.people), start=start)

    def items(self, question: Instance | Answer) -> Indices:
        """The items of a question's candidates, in their order."""
        return np.array([self._item[_pair(question.reference, name)] for name in question.candidates])

    def skill(self, annotator: str) -> float:
        """1 for somebody who has ranked nothing."""
        known = annotator in self.people
        return float(self.fit.skill_K[self.people.index(annotator)]) if known else 1.0

    def consensus(self) -> list[Answer]:
        """One ranking of each instance that was ranked, by its candidates' scores, and the decisions."""
        rankings = []
        for answer in {answer.instance: answer for answer in self.answers}.values():
            # Rounded, since the same ties make scores that differ in the last bits.
            score = dict(
                zip(answer.candidates, np.round(self.fit.score_I[self.items(answer)], 6).tolist(), strict=True)
            )
            best_first = tuple(sorted(score, key=lambda name: -score[name]))
            ranks = tuple(1 + sum(other > score[name] for other in score.values()) for name in best_first)
            tied = len(set(ranks)) < len(ranks)
            rankings.append(replace(answer, annotator="scores", candidates=best_first, ranks=ranks if tied else ()))
        return [*rankings, *self._decisions]

    def pairs(self) -> list[PairScore]:
        """Every pair, best first."""
        counts = Counter(item for answer in self.answers for item in self.items(answer).tolist())
        deviation = self.fit.deviation
        scores = [
            PairScore(
                in_either_order(*pair),
                self._group[item],
                round(float(self.fit.score_I[item]), 4),
                round(float(deviation[item]), 4),
                counts[item],
            )
            for pair, item in self._item.items()
        ]
        return sorted(scores, key=lambda pair: (-pair.score, pair.images))

    def skills(self) -> list[AnnotatorSkill]:
        """Every annotator, by name."""
        counts = Counter(answer.annotator for answer in self.answers)
        return [AnnotatorSkill(name, round(self.skill(name), 4), counts[name]) for name in self.people]

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The pairs and the annotators, as they are exported."""
        return [asdict(pair) for pair in self.pairs()], [asdict(skill) for skill in self.skills()]

    def _tiers(self, answer: Answer) -> list[list[int]]:
        return [[self._item[_pair(answer.reference, name)] for name in tier] for tier in answer.tiers]


def _pair(first: str, second: str) -> tuple[str, str]:
    """The pair's key, whichever of the two was the reference."""
    return (first, second) if first < second else (second, first)
