"""PaCo-Reward as a reward: questions to a judge.

Do the panels of a set belong together, and does each show its own text? Of an edit: is all kept that should stay, and
was the instruction followed?
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from PIL.Image import Image

from pacorl.core import questions as wordings
from pacorl.core.batches import grouped
from pacorl.core.grid import SetImages, split
from pacorl.core.set_scores import contrast_scores, draw_pairs_across, pairs_within, panel_shares, whole_mean
from pacorl.io.images import open_image
from pacorl.judge import pairwise
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import Ask, Key, Pair
from pacorl.rewards.reward import PanelReward, PanelScores, RewardError, check_panels, named, refuse, tempered
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

    def p_yes_of(self, verdicts: Mapping[Key, Verdict]) -> dict[Key, float | None]:
        """P(Yes) of each question under the temperature; None if it is missing, for the reason in `last_error`."""
        self.last_error = next((answer.error for answer in verdicts.values() if answer.p_yes is None), self.last_error)
        return {key: tempered(verdict.p_yes, self.temperature) for key, verdict in verdicts.items()}


class Consistency(JudgedReward, PanelReward):
    """Mean P(Yes) over all pairs of panels (arXiv 2512.04784, §3.3): 6 questions per 2×2 grid.

    `ask="theme"` asks once per pair whether the two suit the set's theme (the paper's reward). `ask="criteria"` asks
    of every pair each written criterion of its record; a pair's P(Yes) is then the mean over a dimension's criteria,
    and over dimensions, so that the score is the mean over pairs, criteria and dimensions (T2IS-Bench's order).
    Criteria that are null in the record are not there.

    `contrast` above 0 subtracts the agreement with other sets of the same prompt, in training alone (`Contrast`): a
    generator with one hero for every set also earns the mean over pairs.
    """

    name = "consistency"

    def __init__(
        self, judge: Judge, temperature: float = 1.0, ask: Ask = "theme", *, contrast: float = 0.0, partners: int = 3
    ) -> None:
        super().__init__(judge, temperature)
        if not 0 <= contrast < math.inf:
            raise ValueError(f"rewards.{self.name}.args.contrast must be 0 or above, got {contrast}")
        if partners < 1:
            raise ValueError(f"rewards.{self.name}.args.partners must be 1 or above, got {partners}")
        self.ask = ask
        self.contrast = contrast
        self.partners = partners

    def check(self, prompts: Sequence[Prompt]) -> None:
        refuse(
            [prompt for prompt in prompts if prompt.grid.count < 2],
            "is one image, and consistency needs two panels; begin with their number in English (four images of a fox: "
            "it runs, …), or give a record of 'theme' and 'panels'; edits take edit_consistency, in a run of their own",
        )
        if self.ask == "criteria":
            refuse(
                [prompt for prompt in prompts if not any(prompt.criteria.values())],
                "has no criteria, and consistency is to ask for them; give the record 'criteria', or take ask: theme",
            )

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[PanelScores]:
        """Score each image, with its pairs as parts."""
        scored = []
        for prompt, verdicts in zip(prompts, self.pairs(prompts, images), strict=True):
            p_yes = self.p_yes_of(verdicts)
            scored.append(PanelScores(whole_mean(p_yes.values()), panel_shares(p_yes, prompt.grid.count)))
        return scored

    def pairs(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[dict[Pair, Verdict]]:
        """Ask about every pair of panels, per image."""
        # All sets in one call: their questions share batches.
        panels = [split(image, prompt.grid) for prompt, image in zip(prompts, images, strict=True)]
        return self.mean_verdicts(prompts, panels)

    def mean_verdicts(
        self,
        prompts: Sequence[Prompt],
        panels: Sequence[Sequence[Image]],
        *,
        pairs: Sequence[Sequence[Pair]] | None = None,
    ) -> list[dict[Pair, Verdict]]:
        """Ask about `pairs` of some panels of each prompt, all by default, and average over criteria."""
        texts = [pairwise.texts_about(prompt, self.ask) for prompt in prompts]
        means = []
        for answers in pairwise.ask_pairs(self.judge, panels, texts, pairs=pairs):
            means.append({pair: pairwise.mean_over_dimensions(verdicts) for pair, verdicts in answers.items()})
        return means


@dataclass(frozen=True)
class Contrast(PanelReward):
    """Consistency less the agreement across sets: the reward of a training call, which holds whole groups.

    A panel's score is ½(1 + within − `contrast` · across): within is its mean P(Yes) with the other panels of its set,
    across with panels of `partners` other sets of its group, asked alike (`core.set_scores`, which explains the scale
    and draws the pairs). A set's score is the mean over its panels. This departs from PaCo-RL, which has no negatives.

    Example:
        Contrast(Consistency(judge, contrast=1.0), seeds=[0, 1, 2])([prompt] * 3, images)
    """

    reward: Consistency
    seeds: Sequence[int]
    """One per image, of the draw of its pairs."""

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[PanelScores]:
        """Score each image, with its panels as parts; a pair within a set counts for both of its panels.

        Raises:
            RewardError: if an image is the only one of its prompt.
        """
        # 1. The panels and pairs of each group, which share one call to the judge.
        groups = grouped((prompt.id, sample) for sample, prompt in enumerate(prompts))
        firsts, panels, pairs = [], [], []
        for samples in groups.values():
            prompt = prompts[samples[0]]
            firsts.append(prompt)
            if len(samples) < 2:
                raise RewardError(
                    f"rewards.consistency.args.contrast is {self.reward.contrast}, and a call has one sample of "
                    f"{named([prompt])} to compare; give it the whole group, or set contrast to 0"
                )
            panels.append([*chain(*(split(images[sample], prompt.grid) for sample in samples))])
            seeds = [self.seeds[sample] for sample in samples]
            across = draw_pairs_across(seeds, prompt.grid.count, partners=self.reward.partners)
            pairs.append([*pairs_within(len(samples), prompt.grid.count), *across])
        answers = self.reward.mean_verdicts(firsts, panels, pairs=pairs)

        # 2. Scores of panels, and of their sets.
        scored = [PanelScores(None, None)] * len(prompts)
        for prompt, samples, verdicts in zip(firsts, groups.values(), answers, strict=True):
            count = prompt.grid.count
            score_SP = contrast_scores(
                self.reward.p_yes_of(verdicts), sets=len(samples), panels=count, weight=self.reward.contrast
            )
            for sample, score_P in zip(samples, score_SP, strict=True):
                shares = [None if score is None else 2 * score / count for score in score_P]
                scored[sample] = PanelScores(whole_mean(score_P), shares)
        return scored


class PanelMatch(JudgedReward, PanelReward):
    """Mean P(Yes) that a panel shows its own text: prompt fidelity, asked of the same judge.

    The released code rewards CLIP's text–image cosine here (`panel_clip_text`). A judge is more precise than a small
    CLIP, and one model serves both rewards. With consistency alone, four blank panels would have the best score.
    """

    name = "panel_match"

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_panels(self.name, prompts)

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[PanelScores]:
        """Score each image, with its panels' texts as parts."""
        # One call for all panels: the judge shares common prefixes and fills its batches.
        questions_of_images = []
        for prompt, image in zip(prompts, images, strict=True):
            panels = zip(split(image, prompt.grid), prompt.panels, strict=True)
            questions = [Question((panel,), wordings.shows_text(text)) for panel, text in panels]
            questions_of_images.append(dict(enumerate(questions)))

        scored = []
        for verdicts in pairwise.ask_each(self.judge, questions_of_images):
            p_yes = [*self.p_yes_of(verdicts).values()]
            # The mean of the rest would reward a set for its failed panel.
            present = [probability for probability in p_yes if probability is not None]
            score = sum(present) / len(present) if present and len(present) == len(p_yes) else None
            shares = [None if probability is None else probability / len(p_yes) for probability in p_yes]
            scored.append(PanelScores(score, shares))
        return scored


class EditConsistency(JudgedReward):
    """√(P(kept)·P(followed)) of a source and its edit: 2 questions per image (arXiv 2512.04784, §3.3).

    The geometric mean is EditReward-Bench's overall score: it is low for a copy of the source, which ignores the
    instruction, and for a new image, which preserves no content.
    """

    name = "edit_consistency"

    def check(self, prompts: Sequence[Prompt]) -> None:
        refuse(
            [prompt for prompt in prompts if len(prompt.sources) != 1],
            "is no edit of one image, and edit_consistency compares it with that; give records of {image, "
            "instruction}, and sets a run of their own",
        )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        edits = []
        for prompt, image in zip(prompts, images, strict=True):
            edits.append((open_image(prompt.sources[0]), image, prompt.text))
        answers = pairwise.ask_edits(self.judge, edits)
        return [pairwise.edit_score(self.p_yes_of(verdicts)) for verdicts in answers]
