"""A policy run's moving parts, which the loop, the evaluation and the checkpoints share."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pacorl.config.policy_run import PolicyRun
from pacorl.core.objectives import OBJECTIVES, ObjectiveSpec
from pacorl.core.sampling import Sampler
from pacorl.engine.logbook import Logbook
from pacorl.engine.monitor import Alarm, HackingMonitor
from pacorl.engine.progress import Bars
from pacorl.engine.rollout import ConditioningCache
from pacorl.engine.runtime import Runtime
from pacorl.judges.judge import Judge
from pacorl.lora.adapters import MovingAverage, OldPolicy
from pacorl.policies.policy import Policy
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
    judge: Judge | None
    """Who answers the rewards' questions; None if nothing asks it."""
    rewards: Mapping[str, Reward]
    train_prompts: list[Prompt]
    evaluation_prompts: list[Prompt]
    logbook: Logbook
    optimizer: torch.optim.Optimizer
    average: MovingAverage
    cache: ConditioningCache
    targets: tuple[str, ...]
    bars: Bars
    held_out: Mapping[str, Reward]
    """Measured in evaluations and never rewarded."""
    held_out_judge: Judge | None
    """Who answers for them; `judge` if no other is named."""
    watch: HackingMonitor
    old: OldPolicy | None = None
    """The adapter that samples, where it is not the trained one."""
    epoch: int = 0
    """Finished epochs."""
    step: int = 0
    """Optimizer steps taken."""
    evaluated: int = -1
    """The epoch after which the newest evaluation was made; −1 before the first."""
    score: float | None = None
    """The newest evaluation's, by `best_by`."""
    bad_steps: int = 0
    """Consecutive steps skipped for a non-finite gradient."""
    alarms: list[Alarm] = field(default_factory=list)
    """Of the watch, not yet heeded."""
    warned: set[str] = field(default_factory=set)
    """Signs that were warned of."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def sampler(self) -> Sampler:
        """Of the epoch that comes next."""
        config = self.config
        return config.sampling.sampler(
            self.epoch, seed=config.seed, spec=self.objective, evaluation_size=Size(*config.evaluation.size)
        )

    @property
    def objective(self) -> ObjectiveSpec:
        return OBJECTIVES[self.config.objective.name]

    @property
    def evaluation_sampler(self) -> Sampler:
        return Sampler(size=Size(*self.config.evaluation.size), steps=self.config.evaluation.steps)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        updates = self.config.optimizer.updates_per_epoch * self.config.objective.inner_epochs
        planned = self.config.epochs * updates
        return min(planned, self.config.max_steps or planned)

    @property
    def finished(self) -> bool:
        limit = self.config.max_steps
        return self.epoch >= self.config.epochs or bool(limit and self.step >= limit)

    @property
    def bare(self) -> torch.nn.Module:
        """The transformer without the launcher's wrapper."""
        return self.runtime.bare(self.policy.transformer)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.policy.transformer.parameters() if p.requires_grad]

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started
