"""PaCo-Reward as a reward: do the panels of a set belong together, does each show its own text, is it a grid at all?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from pacorl.core import questions
from pacorl.core.grid import shared_text, split
from pacorl.judges.judge import Judge
from pacorl.rewards.reward import RewardError, mean_of
from pacorl.types import Prompt, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image


class Consistency:
    """Mean P(Yes) over all pairs of panels (arXiv 2512.04784, §3.3): 6 questions per 2×2 sheet.

    `ask="theme"` asks once per pair whether the two suit the set's theme (the paper's reward). `ask="criteria"` asks
    of every pair each written criterion of its record; a pair's P(Yes) is then the mean over a dimension's criteria,
    and over dimensions, so that the score is the mean over pairs, criteria and dimensions (T2IS-Bench's order).
    Criteria that are null in the record are not there.

    `temperature` divides the logit of each pair's P(Yes) before the mean: above 1 it keeps differences where a judge
    is sure, 1 is the paper's.
    """

    def __init__(self, judge: Judge, temperature: float = 1.0, ask: Literal["theme", "criteria"] = "theme") -> None:
        self.judge = judge
        self.temperature = _positive("consistency", temperature)
        self.ask = ask
        self.trouble = ""

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if prompt.grid.count < 2:
                raise ValueError(
                    f"prompt {prompt.id} is a {prompt.grid} grid, and consistency needs at least two panels"
                )
            if self.ask == "criteria" and not any(prompt.criteria.values()):
                raise ValueError(
                    f"prompt {prompt.id} has no criteria, and consistency is to ask for them; "
                    "give the record 'criteria', or take ask: theme"
                )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return self.reduce(self.pairs(prompts, images))

    def pairs(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[list[Verdict]]:
        """The verdict of every pair of panels, in the order of `itertools.combinations`, per image."""
        panels = [split(image, prompt.grid) for prompt, image in zip(prompts, images, strict=True)]
        asked = [
            [Question(pair, text) for pair in combinations(sheet, 2) for text in self._texts(prompt)]
            for prompt, sheet in zip(prompts, panels, strict=True)
        ]
        answers = _answers(self.judge, asked)
        self.trouble = _first_error(answers) or self.trouble
        return [list(self._per_pair(prompt, several)) for prompt, several in zip(prompts, answers, strict=True)]

    def reduce(self, pairs: Sequence[Sequence[Verdict]]) -> list[float | None]:
        """Verdicts of `pairs` → one score per image."""
        return [mean_of(verdicts, temperature=self.temperature) for verdicts in pairs]

    def _texts(self, prompt: Prompt) -> list[str]:
        """What is asked of each pair."""
        if self.ask == "theme":
            return [questions.same_theme(shared_text(prompt.text))]
        return [questions.meets_criterion(text) for named in prompt.criteria.values() for text in named.values()]

    def _per_pair(self, prompt: Prompt, answers: Sequence[Verdict]) -> Iterator[Verdict]:
        """The answers of `_texts` of each pair → one verdict per pair; missing where an answer is."""
        counts = [1] if self.ask == "theme" else [len(named) for named in prompt.criteria.values() if named]
        rest = iter(answers)
        for _ in combinations(range(prompt.grid.count), 2):
            dimensions = [[next(rest) for _ in range(count)] for count in counts]
            failed = next((one for several in dimensions for one in several if not one.valid), None)
            yield failed or Verdict(fmean(fmean(one.p_yes or 0.0 for one in several) for several in dimensions))


class PanelMatch:
    """Mean P(Yes) that a panel shows its own text: prompt fidelity, asked of the same judge.

    The released code rewards CLIP's text–image cosine here (`panel_clip_text`); a judge sees what a small CLIP does
    not, and one model serves both. Without such a reward, consistency alone is won by painting nothing four times.
    """

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        self.judge = judge
        self.temperature = _positive("panel_match", temperature)
        self.trouble = ""

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_panels("panel_match", prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        asked = [
            [
                Question((panel,), questions.shows_text(text))
                for panel, text in zip(split(image, prompt.grid), prompt.panels, strict=True)
            ]
            for prompt, image in zip(prompts, images, strict=True)
        ]
        answers = _answers(self.judge, asked)
        self.trouble = _first_error(answers) or self.trouble
        return [mean_of(several, temperature=self.temperature) for several in answers]


class GridLayout:
    """P(Yes) that the whole sheet is a grid of the record's rows and columns, by a judge."""

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        self.judge = judge
        self.temperature = _positive("grid_layout", temperature)
        self.trouble = ""

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if prompt.grid.count < 2:
                raise ValueError(f"prompt {prompt.id} is a {prompt.grid} grid, and grid_layout needs two panels")

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        asked = [
            [Question((image,), questions.shows_grid(prompt.grid.rows, prompt.grid.cols))]
            for prompt, image in zip(prompts, images, strict=True)
        ]
        answers = _answers(self.judge, asked)
        self.trouble = _first_error(answers) or self.trouble
        return [mean_of(several, temperature=self.temperature) for several in answers]


def check_panels(name: str, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError where a prompt does not have one text per panel."""
    for prompt in prompts:
        if len(prompt.panels) != prompt.grid.count:
            raise ValueError(
                f"prompt {prompt.id} has {len(prompt.panels)} panel texts for a {prompt.grid} grid; "
                f"{name} needs one per panel"
            )


def _answers(judge: Judge, asked: Sequence[Sequence[Question]]) -> list[list[Verdict]]:
    """All questions in one call, handed back in their nesting."""
    flat = [question for several in asked for question in several]
    verdicts = judge.verdicts(flat)
    if len(verdicts) != len(flat):
        raise RewardError(f"the judge returned {len(verdicts)} verdicts for {len(flat)} questions")
    rest = iter(verdicts)
    return [[next(rest) for _ in several] for several in asked]


def _first_error(answers: Sequence[Sequence[Verdict]]) -> str:
    return next((one.error for several in answers for one in several if not one.valid), "")


def _positive(name: str, temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"rewards.{name}.args.temperature must be above 0, got {temperature}")
    return temperature
