"""Judge cards per trainer, by the FLOPs of an image on either side.

Both sides are assumed to reach the same share of a card's peak. Each question is counted by itself: prefix caches, in
this process and in vLLM, make judging cheaper than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.judge import InProcessOptions
from pacorl.lab.plan import memory, sources
from pacorl.lab.plan.work import Work
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Parts
from pacorl.models.quantize import NONE
from pacorl.rewards.consistency import JudgedReward
from pacorl.types import Grid, Prompt, Size


@dataclass(frozen=True, slots=True)
class Balance:
    """Work of trainers and judges per training image."""

    trainer_tflop: float
    """From noise to the image's share of the update."""
    judge_tflop: float
    """All questions about the image."""
    questions: int
    trainers: int
    """Processes of the run."""
    judge_cards: int
    """Cards that judge as fast as the trainers sample."""
    trainers_per_judge: float

    @property
    def line(self) -> str:
        """The balance in one line."""
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
    """Compare the work of trainers and judges; None if no reward asks a judge.

    Args:
        config: the run.
        work: its forwards.
        policy: on the meta device, with the run's adapter.
        judge: parts of the judge; empty for a judge behind HTTP, for which the published one is assumed.
        prompts: training prompts; without them a grid of 2 × 2 is assumed.
        world: number of processes.
    """
    prompt = prompts[0] if prompts else Prompt(0, "", grid=Grid(2, 2))
    rewards = [reward for key, reward in sources.rewards_of(config) if not key.startswith("evaluation.")]
    questions = sum(reward.questions(prompt) for reward in rewards if isinstance(reward, JudgedReward))
    if not questions or config.judge is None:
        return None

    # The judge: each question by itself.
    height, width = config.sampling.size
    panel = Size(height // prompt.grid.rows, width // prompt.grid.cols)
    quantize = config.judge.quantize if isinstance(config.judge, InProcessOptions) else NONE
    configs = judge or sources.JUDGE_PARTS
    cost = memory.judge_cost(configs, dtype="bfloat16", quantize=quantize, questions=1, panel=panel)
    judged = questions * (1 + config.judge.symmetric) * cost.flops

    # The generator: `forwards_per_image` counts a guided velocity as two forwards, and a measured pass has both.
    size = policy.nearest_size(Size(height, width))
    sampler = work.sampler.model_copy(update={"size": size})
    passes = work.passes
    forward = memory.sampling_pass(policy, size=size, batch=1).flops / passes
    training = memory.training_pass(policy, sampler=sampler, batch=1, with_base=False).flops / passes
    forwards = work.forwards_per_image
    trained = (forwards["sampling"] + forwards["other_policies"]) * forward + forwards["training"] * training
    trained += memory.decoding_pass(policy, size=size, batch=1).flops

    return Balance(
        trainer_tflop=trained / 1e12,
        judge_tflop=judged / 1e12,
        questions=questions,
        trainers=world,
        judge_cards=math.ceil(world * judged / trained),
        trainers_per_judge=round(trained / judged, 2),
    )
