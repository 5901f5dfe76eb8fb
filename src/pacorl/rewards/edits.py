"""PaCo-Reward for edits: is all kept that should stay, and was the instruction followed?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pacorl.io.images import open_image
from pacorl.judges.judge import Judge
from pacorl.judges.pairwise import ask_edits
from pacorl.rewards.reward import RewardError, named, tempered
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image


class EditConsistency:
    """√(P(kept)·P(followed)) of a source and its edit: 2 questions per image (arXiv 2512.04784, §3.3).

    The geometric mean is EditReward-Bench's overall score: a copy of the source follows nothing, a new image keeps
    nothing, and neither is worth much. `temperature` divides the logit of each P(Yes): above 1 it keeps differences
    if a judge is sure.
    """

    def __init__(self, judge: Judge, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise RewardError(f"temperature {temperature} must be above 0; 1 leaves P(Yes) as it is")
        self.judge = judge
        self.temperature = temperature
        self.last_error = ""

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if len(prompt.sources) != 1:
                raise RewardError(
                    f"{named([prompt])} has {len(prompt.sources)} sources, and edit_consistency compares an edit with "
                    "one; give records of {image, instruction}"
                )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        edits = [
            (open_image(prompt.sources[0]), image, prompt.text) for prompt, image in zip(prompts, images, strict=True)
        ]
        answers = ask_edits(self.judge, edits)
        errors = (verdict.error for edit in answers for verdict in (edit.kept, edit.followed) if verdict.error)
        self.last_error = next(errors, self.last_error)
        return [edit.score(lambda p_yes: tempered(p_yes, self.temperature)) for edit in answers]
