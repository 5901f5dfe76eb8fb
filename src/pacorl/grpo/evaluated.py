"""Images of an evaluation, their scores and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pacorl.core.schedule import seed_of
from pacorl.grpo.monitor import PanelStatistics
from pacorl.runtime.cores import available_cores
from pacorl.runtime.logbook import Logbook
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.config.reward_section import RewardConfig

Job = tuple[Prompt, int]
"""A prompt, and the index of the image among its images."""


def noise_seed(seed: int, job: Job) -> int:
    """Derive the seed of an image's noise from the run's."""
    prompt, index = job
    return seed_of(seed, "evaluation", prompt.id, index)


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """Image of an evaluation and its scores; a missing score is None."""

    prompt: Prompt
    index: int
    """Index among its prompt's images."""
    image: Image
    scores: Mapping[str, float | None]
    """Scores by the training rewards."""
    p_yes: list[list[float | None]]
    """P(Yes) of each pair of panels, symmetric; empty without a judge."""
    reward: float | None = None
    """Weighted sum of the scores."""
    held_out: Mapping[str, float | None] | None = None
    """Scores by the held-out rewards; None if not computed."""
    panel_statistics: PanelStatistics | None = None
    not_finite: Sequence[str] = ()
    """Rewards whose score was not finite, and so is None; those held out as held_out/NAME."""

    def record(self, image: str) -> dict[str, Any]:
        """Return its line in samples/evaluation-….jsonl."""
        return {
            "prompt_id": self.prompt.id,
            "text": self.prompt.text,
            "theme": self.prompt.theme,
            "grid": str(self.prompt.grid),
            "panels": list(self.prompt.panels),
            "p_yes": self.p_yes,
            "scores": dict(self.scores),
            "reward": self.reward,
            "held_out": dict(self.held_out or {}),
            "seed": self.index,
            "image": image,
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Samples of an evaluation at full size, and its metrics."""

    samples: Sequence[EvaluatedSample]
    metrics: Mapping[str, float]
    rewards: Sequence[RewardConfig]

    def keep(self, logbook: Logbook, epoch: int) -> None:
        """Write the records and images of the evaluation after an epoch into the run's folder."""
        name = f"evaluation-{epoch:06d}"
        # zlib releases the GIL: a PNG of 1024² takes 0.2 to 0.6 s, during which the GPU idles.
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(lambda n: logbook.image(f"{name}/{n:04d}", self.samples[n].image), range(len(self.samples))))
        logbook.records(name, [s.record(f"{name}/{number:04d}.png") for number, s in enumerate(self.samples)])

    def score_by(self, best_by: str, metrics: Mapping[str, float]) -> float | None:
        """Select the score for the choice of the best checkpoint; None if a judge failed.

        Raises:
            ValueError: if `best_by` names no measure of the evaluation.
        """
        if best_by == "reward":
            return weighted_reward(self.rewards, metrics)
        # An empty best_by keeps no best checkpoint.
        if best_by and best_by not in metrics:
            measures = ", ".join(name for name in metrics if "/" not in name)
            raise ValueError(f"best_by {best_by!r} is no measure of the evaluation; it has reward, {measures}")
        return metrics.get(best_by)


def weighted_reward(rewards: Sequence[RewardConfig], scores: Mapping[str, float | None]) -> float | None:
    """Σ weight · score over all rewards; None if a score is missing."""
    # A sum without one of its scores would compare checkpoints unfairly.
    weighted = []
    for reward in rewards:
        value = scores.get(reward.key)
        if value is None:
            return None
        weighted.append(reward.weight * value)
    return sum(weighted)
