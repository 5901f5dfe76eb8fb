"""PaCo-Reward as a reward: do the panels of a set belong together, does each show its own text, is it a grid at all?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pacorl.core import questions as wordings
from pacorl.core.grid import split
from pacorl.judges.judge import Judge
from pacorl.judges.pairwise import Ask, Pair, ask, ask_pairs, mean_over_dimensions, texts_about
from pacorl.rewards.reward import mean_of
from pacorl.types import Prompt, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image


class Consistency:
    """Mean P(Yes) over all pairs of panels (arXiv 2512.04784, §3.3): 6 questions per 2×2 grid.

    `ask="theme"` asks once per pair whether the two suit the set's theme (the paper's reward). `ask="criteria"` asks
    of every pair each written criterion of its record; a pair's P(Yes) is then the mean over a dimension's criteria,
    and over dimensions, so that the score is the mean over pairs, criteria and dimensions (T2IS-Bench's order).
    Criteria that are null in the record are not there.

    `temperature` divides the logit of each pair's P(Yes) before the mean: above 1 it keeps differences if a judge
    is sure, 1 is the paper's.
    """

    def __init__(self, judge: Judge, temperature: float = 1.0, ask: Ask = "theme") -> None:
        self.judge = judge
        self.temperature = _positive("consistency", temperature)
        self.ask = ask
        self.last_error = ""

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

    def pairs(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[dict[Pair, Verdict]]:
        """The verdict of every pair of panels, per image."""
        panels = [split(image, prompt.grid) for prompt, image in zip(prompts, images, strict=True)]
        answers = ask_pairs(self.judge, panels, [texts_about(prompt, self.ask) for prompt in prompts])
        by_pair = [{pair: mean_over_dimensions(verdicts) for pair, verdicts in pairs.items()} for pairs in answers]
        self.last_error = _first_error(verdict for pairs in by_pair for verdict in pairs.values()) or self.last_error
        return by_pair

    def reduce(self, pairs: Sequence[Mapping[Pair, Verdict]]) -> list[float | None]:
        """Verdicts of `pairs` → one score per image."""
        return [mean_of(list(verdicts.values()), temperature=self.temperature) for verdicts in pairs]


class PanelMatch:
    """Mean P(Yes) that a panel shows its own text: prompt fidelity, asked of the same judge.

    The released code rewards CLIP's text–image cosine here (`panel_clip_text`); a judge sees what a small CLIP does
    not, and one model serves both. Without such a reward, consistency alone is won by painting nothing four times.
    """

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        self.judge = judge
        self.temperature = _positive("panel_match", temperature)
        self.last_error = ""

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_panels("panel_match", prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        questions = {
            (sample, number): Question((panel,), wordings.shows_text(text))
            for sample, (prompt, image) in enumerate(zip(prompts, images, strict=True))
            for number, (panel, text) in enumerate(zip(split(image, prompt.grid), prompt.panels, strict=True))
        }
        answers = ask(self.judge, questions)
        self.last_error = _first_error(answers.values()) or self.last_error
        return [
            mean_of([answers[sample, number] for number in range(prompt.grid.count)], temperature=self.temperature)
            for sample, prompt in enumerate(prompts)
        ]


class GridLayout:
    """P(Yes) that the whole grid image is a grid of the record's rows and columns, by a judge."""

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        self.judge = judge
        self.temperature = _positive("grid_layout", temperature)
        self.last_error = ""

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if prompt.grid.count < 2:
                raise ValueError(f"prompt {prompt.id} is a {prompt.grid} grid, and grid_layout needs two panels")

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        questions = {
            sample: Question((image,), wordings.shows_grid(prompt.grid.rows, prompt.grid.cols))
            for sample, (prompt, image) in enumerate(zip(prompts, images, strict=True))
        }
        answers = ask(self.judge, questions)
        self.last_error = _first_error(answers.values()) or self.last_error
        return [mean_of([answers[sample]], temperature=self.temperature) for sample in questions]


def check_panels(name: str, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError if a prompt does not have one text per panel."""
    for prompt in prompts:
        if len(prompt.panels) != prompt.grid.count:
            raise ValueError(
                f"prompt {prompt.id} has {len(prompt.panels)} panel texts for a {prompt.grid} grid; "
                f"{name} needs one per panel"
            )


def _first_error(verdicts: Iterable[Verdict]) -> str:
    return next((verdict.error for verdict in verdicts if not verdict.valid), "")


def _positive(name: str, temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"rewards.{name}.args.temperature must be above 0, got {temperature}")
    return temperature
