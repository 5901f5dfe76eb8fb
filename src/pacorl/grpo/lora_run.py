"""State of a LoRA's training that every objective shares, and its optimizer step."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import torch

from pacorl.core.schedule import learning_rate
from pacorl.grpo.builders import build_optimizer
from pacorl.grpo.lora_config import LoraConfig
from pacorl.models.adapters import MovingAverage, OldPolicy
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.report.page import write_report
from pacorl.runtime.processes import MAX_BAD_STEPS, Runtime

logger = logging.getLogger(__name__)


class LoraRun(ABC):
    """Trained LoRA of a run with its optimizer, its average and their counters."""

    remedy: ClassVar[str] = "Lower optimizer.lr"
    """Advice after many gradients that are not finite."""

    config: LoraConfig
    runtime: Runtime
    policy: PipelinePolicy
    optimizer: torch.optim.Optimizer
    average: MovingAverage
    old: OldPolicy | None = None
    """Sampling policy of endpoint objectives."""
    step = 0
    """Optimizer steps taken."""
    bad_steps = 0
    """Consecutive steps skipped for a non-finite gradient."""
    total_steps: int
    """Optimizer steps of the whole run."""

    @abstractmethod
    def save(self) -> Path:
        """Write a checkpoint, and return it."""

    # --- one optimizer step ------------------------------------------------------------------------------------

    def step_optimizer(self) -> float:
        """Take one optimizer step on all ranks, or skip it on all ranks if a gradient is not finite.

        Returns:
            The gradient norm before clipping; the step was skipped if it is not finite.

        Raises:
            ValueError: after `MAX_BAD_STEPS` skipped steps in a row, when the state is saved.
        """
        # A norm that is not finite is so on every rank, since gradients are shared.
        norm = self.runtime.step(self.optimizer, self.parameters, max_norm=self.config.optimizer.max_grad_norm)
        if not math.isfinite(norm):
            self.bad_steps += 1
            if self.bad_steps >= MAX_BAD_STEPS:
                self.save()
                raise ValueError(
                    f"{self.bad_steps} optimizer steps in a row had gradients that are not finite; the state is saved. "
                    f"{self.remedy}"
                )
            return norm

        self.bad_steps = 0
        self.step += 1
        self.average.follow(self.step)
        return norm

    def set_learning_rate(self) -> float:
        """Set the learning rate of the next step by the schedule, and return it."""
        options = self.config.optimizer
        rate = learning_rate(
            self.step,
            peak=options.lr,
            schedule=options.schedule,
            warmup=options.warmup_steps,
            total=self.total_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def prepare(self) -> None:
        """Create the optimizer, and hand it and the transformer to the launcher's engine: weights may be sharded then.

        Gradient checkpointing needs train mode; without dropout the mode has no other effect.
        """
        self.policy.transformer.train()
        optimizer = build_optimizer(self.config, self.policy, device=self.runtime.device)
        self.policy.transformer, self.optimizer = self.runtime.prepare(self.policy.transformer, optimizer)

    def begin_average(self) -> None:
        """Copy the adapter, whose weights may be sharded, as the first average."""
        options = self.config.optimizer
        self.average = MovingAverage(self.transformer, decay=options.ema_decay)

    def write_page(self, *, moment: str) -> None:
        """Build report.html on the main process; `moment` is the finished epoch or step in the message of a failure."""
        if not self.runtime.is_main:
            return
        try:
            write_report(self.config.out)
        except (OSError, ValueError) as fault:  # the run is worth more than its page
            logger.warning("report.html was not built after %s: %s", moment, fault)

    @property
    def transformer(self) -> torch.nn.Module:
        """Transformer without the launcher's wrapper."""
        return self.runtime.unwrap(self.policy.transformer)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Trainable parameters."""
        return [p for p in self.policy.transformer.parameters() if p.requires_grad]
