"""PaCo-Reward as a reward: do the panels of a set belong together, and does each show its own text?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from pacorl.core import questions
from pacorl.core.grid import shared_text, split
from pacorl.rewards.reward import mean_of
from pacorl.types import Prompt, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.judge import Judge


class Consistency:
    """Mean P(Yes) over all pairs of panels (arXiv 2512.04784, §3.3): 6 questions per 2×2 sheet.

    `temperature` divides the logit of each P(Yes) before the mean: above 1 it keeps differences where a judge is
    sure, 1 is the paper's.
    """

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        self.judge = judge
        self.temperature = temperature

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if prompt.grid.count < 2:
                raise ValueError(
                    f"prompt {prompt.id} is a {prompt.grid} grid, and consistency needs at least two panels"
                )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return self.reduce(self.pairs(prompts, images))

    def pairs(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[list[Verdict]]:
        """The verdict of every pair of panels, in the order of `itertools.combinations`, per image."""
        asked = [
            [
                Question(pair, questions.same_theme(shared_text(prompt.text)))
                for pair in combinations(split(image, prompt.grid), 2)
            ]
            for prompt, image in zip(prompts, images, strict=True)
        ]
        return _answers(self.judge, asked)

    def reduce(self, pairs: Sequence[Sequence[Verdict]]) -> list[float | None]:
        """Verdicts of `pairs` → one score per image."""
        return [mean_of(verdicts, temperature=self.temperature) for verdicts in pairs]


class PanelMatch:
    """Mean P(Yes) that a panel shows its own text: prompt fidelity, asked of the same judge.

    The released code rewards CLIP's text–image cosine here; a judge sees what a small CLIP does not, and one model
    serves both. Without such a reward, consistency alone is won by painting nothing four times.
    """

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        self.judge = judge
        self.temperature = temperature

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if len(prompt.panels) != prompt.grid.count:
                raise ValueError(
                    f"prompt {prompt.id} has {len(prompt.panels)} panel texts for a {prompt.grid} grid; "
                    "panel_match needs one per panel"
                )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        asked = [
            [
                Question((panel,), questions.shows_text(text))
                for panel, text in zip(split(image, prompt.grid), prompt.panels, strict=True)
            ]
            for prompt, image in zip(prompts, images, strict=True)
        ]
        return [mean_of(answers, temperature=self.temperature) for answers in _answers(self.judge, asked)]


def _answers(judge: Judge, asked: Sequence[Sequence[Question]]) -> list[list[Verdict]]:
    """All questions in one call, handed back in their nesting."""
    verdicts = iter(judge.verdicts([question for several in asked for question in several]))
    return [[next(verdicts) for _ in several] for several in asked]
