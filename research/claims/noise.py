"""A reward of chance: a control for what training does without a signal."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from random import Random

from PIL.Image import Image

from pacorl.core.set_scores import panel_shares
from pacorl.rewards.reward import PanelReward, PanelScores
from pacorl.types import Prompt


class Noise(PanelReward):
    """A uniform score for each panel, drawn from a hash of the image, with the panels' own as parts."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Every prompt can be scored."""

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[PanelScores]:
        scores = []
        for prompt, image in zip(prompts, images, strict=True):
            rng = Random(sha256(image.tobytes()).digest())
            score_of_panel = {(panel,): rng.random() for panel in range(prompt.grid.count)}
            mean = sum(score_of_panel.values()) / prompt.grid.count
            scores.append(PanelScores(mean, panel_shares(score_of_panel, prompt.grid.count)))
        return scores
