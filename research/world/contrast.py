"""Consistency with contrast, as a reward of one's own, to find its form: `research/world/contrast.py:Contrast`.

score = ½ (1 + mean P(within) − weight · mean P(across)), by panel. A generator that always draws the same hero raises
both means, and earns nothing by it. A call must hold whole groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import texts_about
from pacorl.rewards.reward import PanelScores, tempered
from pacorl.types import Prompt, Question


class Contrast:
    """Same looks within a set, other looks in other sets of the group, asked alike.

    Args:
        partners: other sets of the group that a set is compared with.
        criteria: how many criteria a cross pair is asked, in turn; 0: all.
        pairs: cross pairs of a set with each partner; 0: one for every panel.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        weight: float = 1.0,
        partners: int = 3,
        temperature: float = 1.0,
        criteria: int = 0,
        pairs: int = 0,
    ) -> None:
        self.judge, self.temperature = judge, temperature
        self.weight, self.partners, self.criteria, self.pairs = weight, partners, criteria, pairs

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[PanelScores]:
        panels = [split(image, prompt.grid) for prompt, image in zip(prompts, images, strict=True)]
        groups = defaultdict(list)
        for number, prompt in enumerate(prompts):
            groups[prompt.id].append(number)

        # (first set, its panel, second set, its panel, criterion) and the questions.
        keys, questions = [], []
        for group in groups.values():
            texts = list(texts_about(prompts[group[0]], "criteria").values())
            for place, first in enumerate(group):
                count = len(panels[first])
                pairs = [(first, a, b, range(len(texts))) for a, b in combinations(range(count), 2)]
                pairs += self._cross(group, place, count, len(texts))
                for other, a, b, numbers in pairs:
                    keys += [(first, a, other, b)] * len(numbers)
                    questions += [Question((panels[first][a], panels[other][b]), texts[number]) for number in numbers]
        return self._scores(panels, keys, questions)

    def _cross(
        self, group: Sequence[int], place: int, count: int, criteria: int
    ) -> list[tuple[int, int, int, Sequence[int]]]:
        """Pair panels of a set with other panels of its partners: (partner, panel, its panel, criteria)."""
        pairs: list[tuple[int, int, int, Sequence[int]]] = []
        for step in range(1, self.partners + 1):
            other = group[(place + step) % len(group)]
            for turn in range(self.pairs or count):
                a = (place + step + turn) % count
                asked = self.criteria or criteria
                numbers = [((a + place + step) * asked + number) % criteria for number in range(asked)]
                pairs.append((other, a, (a + step) % count, numbers))
        return pairs

    def _scores(
        self, panels: Sequence[Sequence[Image]], keys: Sequence[tuple[int, int, int, int]], questions: list[Question]
    ) -> list[PanelScores]:
        within: list[list[list[float]]] = [[[] for _ in group] for group in panels]
        across: list[list[list[float]]] = [[[] for _ in group] for group in panels]
        for (first, a, other, b), verdict in zip(keys, self.judge.verdicts(questions), strict=True):
            assert verdict.p_yes is not None
            table = within if first == other else across
            for number, panel in ((first, a), (other, b)):
                table[number][panel].append(tempered(verdict.p_yes, self.temperature))

        scores = []
        for inside, outside in zip(within, across, strict=True):
            parts = []
            for equal, chance in zip(inside, outside, strict=True):
                penalty = self.weight * float(np.mean(chance)) if chance else 0.0
                parts.append(0.5 * (1 + float(np.mean(equal)) - penalty))
            scores.append(PanelScores(float(np.mean(parts)), tuple(parts)))
        return scores

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return [scores.score for scores in self.panel_scores(prompts, images)]
