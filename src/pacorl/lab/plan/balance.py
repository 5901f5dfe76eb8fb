"""How many cards a judge wants beside those that train, by the FLOPs of an image on either side.

Both sides are taken to reach the same share of a card's peak. A judge's questions are counted each by itself: one that
shares what they begin with, as that of this process does and vLLM's prefix cache, does with fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.judge import InProcessOptions
from pacorl.lab.plan import memory, sources
from pacorl.lab.plan.components import judge_cost
from pacorl.lab.plan.work import Work
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Parts
from pacorl.rewards.consistency import JudgedReward
from pacorl.types import Grid, Prompt, Size


@dataclass(frozen=True, slots=True)
class Balance:
    """The work of trainers and judges on a training image."""

    trainer_tflop: float
    """From noise to the image's share of the update."""
    judge_tflop: float
    """Of all questions about the image."""
    questions: int
    trainers: int
    """The run's processes."""
    judge_cards: int
    """That keep up with them."""
    trainers_per_judge: float
    """That one judge card keeps up with."""

    @property
    def line(self) -> str:
        """For people."""
        cards = f"{self.judge_cards} judge card{'s' * (self.judge_cards > 1)} of the trainers' kind"
        keep = "keeps" if self.judge_cards == 1 else "keep"
        return (
            f"balance: an image takes {self.trainer_tflop:.0f} TFLOP of training and {self.judge_tflop:.1f} of judging "
            f"({self.questions} questions); {cards} {keep} up with {self.trainers} that train, and one with "
            f"{self.trainers_per_judge:.1f}"
        )


def balance_of(
    config: PolicyConfig, *, work: Work, policy: PipelinePolicy, judge: Parts, prompts: Sequence[Prompt], world: int
) -> Balance | None:
    """The balance of a run; None if no reward asks a judge.

    Args:
        config: of the run.
        work: its forwards.
        policy: on the meta device, with the run's adapter.
        judge: the parts of the judge; empty of one behind HTTP, for which the published one stands.
        prompts: of training; a grid of 2 × 2 stands for prompts that are not here.
        world: processes.
    """
    prompt = prompts[0] if prompts else Prompt(0, "", grid=Grid(2, 2))
    rewards = [reward for key, reward in sources.rewards_of(config) if not key.startswith("evaluation.")]
    questions = sum(reward.questions(prompt) for reward in rewards if isinstance(reward, JudgedReward))
    if not questions or config.judge is None:
        return None
    height, width = config.sampling.size
    panel = Size(height // prompt.grid.rows, width // prompt.grid.cols)
    quantize = config.judge.quantize if isinstance(config.judge, InProcessOptions) else "none"
    cost = judge_cost(judge or sources.JUDGE_PARTS, dtype="bfloat16", quantize=quantize, questions=1, panel=panel)
    judged = questions * (1 + config.judge.symmetric) * cost.flops
    passes = 1 if config.model.negative_text is None else 2
    sampler = work.sampler.model_copy(update={"size": policy.nearest_size(Size(height, width))})
    trained = memory.image_flops(policy, sampler=sampler, forwards=work.forwards_per_image, passes=passes)
    return Balance(
        trainer_tflop=trained / 1e12,
        judge_tflop=judged / 1e12,
        questions=questions,
        trainers=world,
        judge_cards=math.ceil(world * judged / trained),
        trainers_per_judge=round(trained / judged, 2),
    )
