"""Resemblance of a set, or of an edit, to the reference images of its characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Literal

from PIL import Image
from PIL.Image import Resampling

from pacorl.core import questions as wordings
from pacorl.core.grid import SetImages, split
from pacorl.core.set_scores import panel_shares, whole_mean
from pacorl.io.images import open_image
from pacorl.judge import pairwise
from pacorl.records.characters import characters_of
from pacorl.rewards.consistency import JudgedReward
from pacorl.rewards.reward import PanelReward, PanelScores, refuse
from pacorl.types import Character, Prompt, Question, Verdict

About = Literal["present", "same", "copied", "followed"]
"""The character is in the panel, it is the one of the reference, the pose and framing are the reference's, or the
instruction was followed."""


@dataclass(frozen=True, slots=True)
class PanelQuestion:
    """A question about one panel."""

    panel: int
    """Index of the panel."""
    about: About
    """Subject of the question."""
    character: str = ""
    """Name; empty for an instruction."""
    other: Path | None = None
    """The reference or source shown first; None for a panel alone."""


class Reference(JudgedReward, PanelReward):
    """Mean over panels of P(present) · P(same character) · (1 − P(same pose and framing)).

    A panel's score is the mean over the characters that its text names (`characters_of`); panels without a character
    have none. P(present) is about the panel alone. P(same character) is the mean over the images of a character, and
    P(same pose and framing) the highest, since a pasted reference shows the same character.

    An edit's score is multiplied by P(followed) of its instruction: keeping the character by changing nothing is no
    merit.
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
        texts = [self._texts(prompt) for prompt in prompts]
        opened = {path: open_image(path) for path in {key.other for key in chain(*texts) if key.other}}
        questions = {}
        for sample, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
            panels = split(image, prompt.grid)
            for key, text in texts[sample].items():
                panel = panels[key.panel]
                shown = (_fitted(opened[key.other], panel, key.about), panel) if key.other else (panel,)
                questions[sample, key] = Question(shown, text)

        answers: list[dict[PanelQuestion, Verdict]] = [{} for _ in prompts]
        # One call for all panels: the judge shares common prefixes and fills its batches.
        for (sample, key), verdict in pairwise.ask(self.judge, questions).items():
            answers[sample][key] = verdict
        return [self._reduce(prompt, verdicts) for prompt, verdicts in zip(prompts, answers, strict=True)]

    def _texts(self, prompt: Prompt) -> dict[PanelQuestion, str]:
        """Build the questions about an image of the prompt."""
        texts = {}
        for panel, characters in enumerate(characters_of(prompt)):
            for character in characters:
                looks = character.text or character.name.replace("_", " ")
                texts[PanelQuestion(panel, "present", character.name)] = wordings.shows_text(looks)
                for path in character.images:
                    texts[PanelQuestion(panel, "same", character.name, path)] = wordings.same_theme(looks)
                    texts[PanelQuestion(panel, "copied", character.name, path)] = wordings.same_pose()
        for path in prompt.sources:
            texts[PanelQuestion(0, "followed", other=path)] = wordings.edit_followed(prompt.text)
        return texts

    def _reduce(self, prompt: Prompt, verdicts: Mapping[PanelQuestion, Verdict]) -> PanelScores:
        p_yes = self.p_yes_of(verdicts)
        # Panels without a character have no score.
        score_of_panel: dict[tuple[int], float | None] = {}
        for panel, characters in enumerate(characters_of(prompt)):
            if characters:
                score_of_panel[panel,] = self._panel_score(panel, characters, p_yes)

        shares = panel_shares(score_of_panel, prompt.grid.count) if score_of_panel else None
        return PanelScores(whole_mean(score_of_panel.values()), shares)

    def _panel_score(
        self, panel: int, characters: Sequence[Character], p_yes: Mapping[PanelQuestion, float | None]
    ) -> float | None:
        """Compute a panel's score; None if an answer is missing."""
        answers: dict[tuple[str, str], list[float]] = {}
        for key, probability in p_yes.items():
            if key.panel != panel:
                continue
            if probability is None:
                return None
            answers.setdefault((key.character, key.about), []).append(probability)

        scores = []
        for character in characters:
            present = answers[character.name, "present"][0]
            same = fmean(answers[character.name, "same"])
            copied = max(answers[character.name, "copied"])
            scores.append(present * same * (1 - copied))
        followed = fmean(answers.get(("", "followed"), [1.0]))
        return fmean(scores) * followed


def _fitted(other: Image.Image, panel: Image.Image, about: About) -> Image.Image:
    """Resize a source to its edit's size, and shrink a larger reference to fit into the panel's size."""
    if about == "followed":
        return other.resize(panel.size, Resampling.LANCZOS)
    shrunk = other.copy()
    shrunk.thumbnail(panel.size, Resampling.LANCZOS)
    return shrunk
