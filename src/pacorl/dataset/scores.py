"""Scores of pairs of images, and the skill of those who ranked them, by `pacorl.core.plackett_luce`.

What is scored is how consistent two images are. A ranking orders the pairs of its reference with each candidate, so a
pair that two instances share, one from each side, ties them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from pacorl.core.plackett_luce import PRIOR_DEVIATION, Choices, Fit, fit
from pacorl.core.ranking import Floats, Indices
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
        p_yes: a judge's P(Yes) of pairs, by `pair_of`: its logits, standardized, are the means of the scores' priors,
            and as far apart as these are wide.
    """

    def __init__(
        self,
        answers: Sequence[Answer],
        *,
        questions: Sequence[Instance] = (),
        previous: Scores | None = None,
        p_yes: Mapping[tuple[str, str], float] = MappingProxyType({}),
    ) -> None:
        self.answers = [answer for answer in answers if not answer.adjudicated]
        self._decisions = [answer for answer in answers if answer.adjudicated]
        self.people = sorted({answer.annotator for answer in self.answers})
        self._questions = questions
        self._item: dict[tuple[str, str], int] = {}
        self._group: list[str] = []
        ranked: list[Instance | Answer] = [*questions, *self.answers]
        for question in ranked:
            for name in question.candidates:
                pair = pair_of(question.reference, name)
                if self._item.setdefault(pair, len(self._item)) == len(self._group):
                    self._group.append(question.group)
        person = {name: number for number, name in enumerate(self.people)}
        rankings = ((person[answer.annotator], self._tiers(answer)) for answer in self.answers)
        alike = previous is not None and (previous._item, previous.people) == (self._item, self.people)
        start = previous.fit if previous is not None and alike else None
        sizes = {"items": len(self._item), "people": len(self.people)}
        self.fit: Fit = fit(Choices.of(rankings), **sizes, start=start, prior_I=self._prior(p_yes))

    def _prior(self, p_yes: Mapping[tuple[str, str], float]) -> Floats:
        """The mean of each score's prior; 0 for a pair that the judge has not judged."""
        judged = [item for pair, item in self._item.items() if pair in p_yes]
        prior_I = np.zeros(len(self._item))
        if judged:
            p = np.clip([p_yes[pair] for pair in self._item if pair in p_yes], 1e-6, 1 - 1e-6)
            logit = np.log(p / (1 - p))
            # A judge that says the same of all has no opinion.
            prior_I[judged] = PRIOR_DEVIATION * (logit - logit.mean()) / max(float(logit.std()), 1e-6)
        return prior_I

    def items(self, question: Instance | Answer) -> Indices:
        """The items of a question's candidates, in their order."""
        return np.array([self._item[pair_of(question.reference, name)] for name in question.candidates])

    def skill(self, annotator: str) -> float:
        """1 for somebody who has ranked nothing."""
        known = annotator in self.people
        return float(self.fit.skill_K[self.people.index(annotator)]) if known else 1.0

    def consensus(self) -> list[Answer]:
        """One ranking by score of each instance that was ranked, or whose pairs all were, and the decisions."""
        rankings = []
        for answer in [*{answer.instance: answer for answer in self.answers}.values(), *self._answered_by_others()]:
            # Rounded, since the same ties make scores that differ in the last bits.
            score = dict(
                zip(answer.candidates, np.round(self.fit.score_I[self.items(answer)], 6).tolist(), strict=True)
            )
            best_first = tuple(sorted(score, key=lambda name: -score[name]))
            ranks = tuple(1 + sum(other > score[name] for other in score.values()) for name in best_first)
            tied = len(set(ranks)) < len(ranks)
            rankings.append(replace(answer, annotator="scores", candidates=best_first, ranks=ranks if tied else ()))
        return [*rankings, *self._decisions]

    def _answered_by_others(self) -> list[Answer]:
        """The questions that nobody has ranked, but of whose pairs each was part of some ranking."""
        asked = {answer.instance for answer in self.answers}
        ranked = {item for answer in self.answers for item in self.items(answer).tolist()}
        return [
            Answer.to(one, one.candidates, annotator="scores")
            for one in self._questions
            if one.id not in asked and ranked.issuperset(self.items(one).tolist())
        ]

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
        return [[self._item[pair_of(answer.reference, name)] for name in tier] for tier in answer.tiers]


def pair_of(first: str, second: str) -> tuple[str, str]:
    """The pair's key, whichever of the two was the reference."""
    return (first, second) if first < second else (second, first)
