"""PaCo-Reward as a reward: questions to a judge.

Do the panels of a set belong together, does each show its own text, is it a grid at all? Of an edit: is all kept that
should stay, and was the instruction followed?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from PIL.Image import Image

from pacorl.core import questions as wordings
from pacorl.core.grid import SetImages, split
from pacorl.core.set_scores import Statistic, panel_shares, set_score
from pacorl.io.images import open_image
from pacorl.judge import pairwise
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import Ask, Key, Pair
from pacorl.rewards.reward import PanelScores, RewardError, check_pairs, check_panels, mean_of, named, tempered
from pacorl.types import Prompt, Question, Verdict


class JudgedReward:
    """Base class of rewards with a judge.

    `temperature` divides the logit of each P(Yes) before the mean: above 1 it keeps differences if a judge is sure,
    1 is the paper's.
    """

    name: ClassVar[str]

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"rewards.{self.name}.args.temperature must be above 0, got {temperature}")
        self.judge = judge
        self.temperature = temperature
        self.last_error = ""

    def questions(self, prompt: Prompt) -> int:
        """Count the judge's questions about an image of the prompt."""
        raise NotImplementedError

    def tempered(self, verdicts: Mapping[Key, Verdict]) -> dict[Key, float | None]:
        """Apply the temperature to each P(Yes); None if it is missing."""
        return {
            key: None if verdict.p_yes is None else tempered(verdict.p_yes, self.temperature)
            for key, verdict in verdicts.items()
        }

    def _mean(self, verdicts: Sequence[Verdict]) -> float | None:
        self._remember(verdicts)
        return mean_of(verdicts, temperature=self.temperature)

    def _remember(self, verdicts: Sequence[Verdict]) -> None:
        self.last_error = next((verdict.error for verdict in verdicts if not verdict.valid), self.last_error)


class Consistency(JudgedReward):
    """Mean P(Yes) over all pairs of panels (arXiv 2512.04784, §3.3): 6 questions per 2×2 grid.

    `ask="theme"` asks once per pair whether the two suit the set's theme (the paper's reward). `ask="criteria"` asks
    of every pair each written criterion of its record; a pair's P(Yes) is then the mean over a dimension's criteria,
    and over dimensions, so that the score is the mean over pairs, criteria and dimensions (T2IS-Bench's order).
    Criteria that are null in the record are not there.

    `statistic="worst"` takes the lowest panel's median P(Yes) with the other panels instead of the mean over all pairs,
    which one wrong panel of many hardly lowers.
    """

    name = "consistency"

    def __init__(
        self, judge: Judge, temperature: float = 1.0, ask: Ask = "theme", statistic: Statistic = "mean"
    ) -> None:
        super().__init__(judge, temperature)
        self.ask = ask
        self.statistic = statistic

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_pairs(self.name, prompts)
        for prompt in prompts:
            if self.ask == "criteria" and not any(prompt.criteria.values()):
                raise ValueError(
                    f"{prompt.place} has no criteria, and consistency is to ask for them; "
                    "give the record 'criteria', or take ask: theme"
                )

    def questions(self, prompt: Prompt) -> int:
        per_pair = sum(map(len, prompt.criteria.values())) if self.ask == "criteria" else 1
        return math.comb(prompt.grid.count, 2) * per_pair

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[float | None]:
        return [self.score(verdicts) for verdicts in self.pairs(prompts, images)]

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[PanelScores]:
        """Score each image, with its pairs as parts; the statistic `worst` is no sum of parts."""
        scored = []
        for prompt, verdicts in zip(prompts, self.pairs(prompts, images), strict=True):
            parts = panel_shares(self.tempered(verdicts), prompt.grid.count) if self.statistic == "mean" else None
            scored.append(PanelScores(self.score(verdicts), parts))
        return scored

    def pairs(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[dict[Pair, Verdict]]:
        """Ask about every pair of panels, per image."""
        # All sets in one call: their questions share batches.
        panels = [split(image, prompt.grid) for prompt, image in zip(prompts, images, strict=True)]
        texts = [pairwise.texts_about(prompt, self.ask) for prompt in prompts]
        means = []
        for answers in pairwise.ask_pairs(self.judge, panels, texts):
            means.append({pair: pairwise.mean_over_dimensions(verdicts) for pair, verdicts in answers.items()})
        return means

    def score(self, verdicts: Mapping[Pair, Verdict]) -> float | None:
        """Score one image by its pairs."""
        self._remember(list(verdicts.values()))
        return set_score(self.tempered(verdicts), self.statistic)


class PanelMatch(JudgedReward):
    """Mean P(Yes) that a panel shows its own text: prompt fidelity, asked of the same judge.

    The released code rewards CLIP's text–image cosine here (`panel_clip_text`). A judge is more precise than a small
    CLIP, and one model serves both rewards. With consistency alone, four blank panels would have the best score.
    """

    name = "panel_match"

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_panels(self.name, prompts)

    def questions(self, prompt: Prompt) -> int:
        return prompt.grid.count

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[float | None]:
        return [self._mean(list(verdicts.values())) for verdicts in self._panels(prompts, images)]

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[PanelScores]:
        """Score each image, with its panels' texts as parts."""
        scored = []
        for prompt, verdicts in zip(prompts, self._panels(prompts, images), strict=True):
            parts = panel_shares(self.tempered(verdicts), prompt.grid.count)
            scored.append(PanelScores(self._mean(list(verdicts.values())), parts))
        return scored

    def _panels(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[dict[tuple[int], Verdict]]:
        """Ask about each panel, per image."""
        # One call for all panels: the judge shares common prefixes and fills its batches.
        questions = {}
        for sample, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
            for number, (panel, text) in enumerate(zip(split(image, prompt.grid), prompt.panels, strict=True)):
                questions[sample, number] = Question((panel,), wordings.shows_text(text))

        verdicts: list[dict[tuple[int], Verdict]] = [{} for _ in prompts]
        for (sample, number), verdict in pairwise.ask(self.judge, questions).items():
            verdicts[sample][number,] = verdict
        return verdicts


class GridLayout(JudgedReward):
    """P(Yes) that the whole grid image is a grid of the record's rows and columns, by a judge."""

    name = "grid_layout"

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_pairs(self.name, prompts)

    def questions(self, prompt: Prompt) -> int:
        return 1

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        questions = {}
        for sample, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
            text = wordings.shows_grid(prompt.grid.rows, prompt.grid.cols)
            questions[sample] = Question((image,), text)
        return [self._mean([verdict]) for verdict in pairwise.ask(self.judge, questions).values()]


class EditConsistency(JudgedReward):
    """√(P(kept)·P(followed)) of a source and its edit: 2 questions per image (arXiv 2512.04784, §3.3).

    The geometric mean is EditReward-Bench's overall score: it is low for a copy of the source, which ignores the
    instruction, and for a new image, which preserves no content.
    """

    name = "edit_consistency"

    def questions(self, prompt: Prompt) -> int:
        return 2

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if len(prompt.sources) != 1:
                raise RewardError(
                    f"{named([prompt])} has {len(prompt.sources)} sources, and edit_consistency compares an edit with "
                    "one; give records of {image, instruction}"
                )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        edits = []
        for prompt, image in zip(prompts, images, strict=True):
            edits.append((open_image(prompt.sources[0]), image, prompt.text))
        answers = pairwise.ask_edits(self.judge, edits)
        verdicts = []
        for edit in answers:
            verdicts += [edit.kept, edit.followed]
        self._remember(verdicts)
        return [edit.score(lambda p_yes: tempered(p_yes, self.temperature)) for edit in answers]
