"""PaCo-Reward for edits: is all kept that should stay, and was the instruction followed?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pacorl.core import questions
from pacorl.io.images import open_image
from pacorl.judges.judge import Judge
from pacorl.rewards.reward import RewardError, named, tempered
from pacorl.types import Prompt, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image


class EditConsistency:
    """√(P(kept)·P(followed)) of a source and its edit: 2 questions per image (arXiv 2512.04784, §3.3).

    The geometric mean is EditReward-Bench's overall score: a copy of the source follows nothing, a new picture keeps
    nothing, and neither is worth much. The judge sees the source at the edit's size, so that resizing alone is no
    difference. `temperature` divides the logit of each P(Yes): above 1 it keeps differences where a judge is sure.
    """

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise RewardError(f"temperature {temperature} must be above 0; 1 leaves P(Yes) as it is")
        self.judge = judge
        self.temperature = temperature
        self.trouble = ""

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if len(prompt.sources) != 1:
                raise RewardError(
                    f"{named([prompt])} has {len(prompt.sources)} sources, and edit_consistency compares an edit with "
                    "one; give records of {image, instruction}"
                )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        asked = [
            question for prompt, image in zip(prompts, images, strict=True) for question in _questions(prompt, image)
        ]
        answers = self.judge.verdicts(asked)
        if len(answers) != len(asked):
            raise RewardError(f"the judge returned {len(answers)} verdicts for {len(asked)} questions")
        self.trouble = next((answer.error for answer in answers if answer.error), self.trouble)
        return [self._score(kept, followed) for kept, followed in zip(answers[::2], answers[1::2], strict=True)]

    def _score(self, kept: Verdict, followed: Verdict) -> float | None:
        if kept.p_yes is None or followed.p_yes is None:
            return None
        return math.sqrt(tempered(kept.p_yes, self.temperature) * tempered(followed.p_yes, self.temperature))


def _questions(prompt: Prompt, image: Image) -> tuple[Question, Question]:
    """Whether the rest was kept, whether the instruction was followed."""
    from PIL.Image import Resampling

    (source,) = prompt.sources
    pair = (open_image(source).resize(image.size, Resampling.LANCZOS), image)
    return Question(pair, questions.edit_kept(prompt.text)), Question(pair, questions.edit_followed(prompt.text))
