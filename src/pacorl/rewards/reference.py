"""Resemblance of a set, or of an edit, to the reference images of its characters."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Literal

from PIL import Image
from PIL.Image import Resampling

from pacorl.core import questions as wordings
from pacorl.core.batches import grouped
from pacorl.core.grid import SetImages, split
from pacorl.core.set_scores import panel_shares, whole_mean
from pacorl.io.images import open_image
from pacorl.judge import pairwise
from pacorl.records.characters import characters_of
from pacorl.rewards.consistency import JudgedReward
from pacorl.rewards.reward import PanelReward, PanelScores, refuse
from pacorl.types import Prompt, Question, Verdict

About = Literal["present", "same", "copied"]
"""The character is in the panel, it is the one of the reference, or the pose and framing are the reference's."""


PanelQuestion = tuple[int, str, About, int]
"""Index of a panel, name of a character, subject, and index of the reference."""


class Reference(JudgedReward, PanelReward):
    """Mean over panels of P(present) · P(same character) · (1 − P(same pose and framing)).

    A panel's score is the mean over the characters that its text names (`characters_of`); panels without a character
    have none. P(present) is about the panel alone. P(same character) is the mean over the images of a character, and
    P(same pose and framing) the highest, since a pasted reference shows the same character.

    An edit needs `edit_consistency` beside it: keeping the character by changing nothing is no merit.
    """

    name = "reference"

    def check(self, prompts: Sequence[Prompt]) -> None:
        refuse(
            [prompt for prompt in prompts if not any(characters_of(prompt))],
            "has no panel of a character with images, and reference compares them; give the record 'characters': "
            "{NAME: {description: …, images: […]}}",
        )

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[SetImages]) -> list[PanelScores]:
        """Score each image, with its panels as parts."""
        opened = cache(open_image)
        questions_of_images = []
        for prompt, image in zip(prompts, images, strict=True):
            questions_of_images.append(_questions(prompt, split(image, prompt.grid), opened))
        # One call for all panels: the judge shares common prefixes and fills its batches.
        answers = pairwise.ask_each(self.judge, questions_of_images)
        return [self._reduce(prompt, verdicts) for prompt, verdicts in zip(prompts, answers, strict=True)]

    def _reduce(self, prompt: Prompt, verdicts: Mapping[PanelQuestion, Verdict]) -> PanelScores:
        """Score the panels with a character, and average over them; a panel with a missing answer has no score."""
        p_yes = self.p_yes_of(verdicts)
        missing = {panel for (panel, *_), probability in p_yes.items() if probability is None}
        answers = grouped((key[:3], probability) for key, probability in p_yes.items() if probability is not None)

        score_of_panel: dict[tuple[int], float | None] = {}
        for panel, characters in enumerate(characters_of(prompt)):
            if not characters:
                continue
            scores = []
            for character in characters if panel not in missing else ():
                present = answers[panel, character.name, "present"][0]
                same = fmean(answers[panel, character.name, "same"])
                copied = max(answers[panel, character.name, "copied"])
                scores.append(present * same * (1 - copied))
            score_of_panel[panel,] = fmean(scores) if scores else None

        shares = panel_shares(score_of_panel, prompt.grid.count) if score_of_panel else None
        return PanelScores(whole_mean(score_of_panel.values()), shares)


def _questions(
    prompt: Prompt, panels: Sequence[Image.Image], opened: Callable[[Path], Image.Image]
) -> dict[PanelQuestion, Question]:
    """Build the questions about an image of the prompt, cut into its panels."""
    questions: dict[PanelQuestion, Question] = {}
    for number, (panel, characters) in enumerate(zip(panels, characters_of(prompt), strict=True)):
        for character in characters:
            looks = character.text or character.name.replace("_", " ")
            questions[number, character.name, "present", 0] = Question((panel,), wordings.shows_text(looks))
            texts: dict[About, str] = {"same": wordings.same_theme(looks), "copied": wordings.same_pose()}
            for index, path in enumerate(character.images):
                for about, text in texts.items():
                    # Shrink a larger reference to fit into the panel's size. A copy per question: a judge knows an
                    # image by its object, and would batch, and so round, questions about one object otherwise.
                    shrunk = opened(path).copy()
                    shrunk.thumbnail(panel.size, Resampling.LANCZOS)
                    questions[number, character.name, about, index] = Question((shrunk, panel), text)
    return questions
