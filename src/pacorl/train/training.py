"""A policy run's moving parts, which the loop, the evaluation and the checkpoints share."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pacorl.config import PolicyRun
from pacorl.engine.logbook import Logbook
from pacorl.engine.progress import Bars
from pacorl.engine.rollout import ConditioningCache, Sampler
from pacorl.engine.runtime import Runtime
from pacorl.models.adapters import MovingAverage
from pacorl.models.judge import Judge
from pacorl.models.policy import Policy
from pacorl.rewards.reward import Reward
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image


Grade = Callable[[Sequence[Prompt], Sequence["Image"]], Mapping[str, float]]
"""Extra measures of an evaluation's pictures, such as an oracle's; they are logged and never rewarded."""


@dataclass
class Training:
    """A run's moving parts."""

    config: PolicyRun
    runtime: Runtime
    policy: Policy
    judge: Judge
    rewards: Mapping[str, Reward]
    train_prompts: list[Prompt]
    evaluation_prompts: list[Prompt]
    logbook: Logbook
    optimizer: torch.optim.Optimizer
    average: MovingAverage
    cache: ConditioningCache
    targets: tuple[str, ...]
    bars: Bars
    resumed: bool = False
    epoch: int = 0
    """Finished epochs."""
    step: int = 0
    """Optimizer steps taken."""
    bad_steps: int = 0
    """Consecutive steps skipped for a non-finite gradient."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def sampler(self) -> Sampler:
        sampling = self.config.sampling
        return Sampler(
            size=Size(*sampling.size),
            steps=sampling.steps,
            kernel=sampling.kernel,
            noise_level=sampling.noise_level,
            noise_steps=sampling.noise_steps,
            shared_noise=sampling.shared_noise,
        )

    @property
    def evaluation_sampler(self) -> Sampler:
        return Sampler(size=Size(*self.config.evaluation.size), steps=self.config.evaluation.steps)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.policy.transformer.parameters() if p.requires_grad]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started
