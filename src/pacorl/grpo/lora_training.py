"""A LoRA in training, whatever the objective: adapter, optimizer, moving average, and their counters."""

from __future__ import annotations

import math

import torch

from pacorl.grpo.lora_config import AdamWConfig
from pacorl.models.adapters import AdapterCopy, MovingAverage
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.runtime.processes import MAX_BAD_STEPS, Runtime


class BadGradientsError(ValueError):
    """The gradients of `MAX_BAD_STEPS` optimizer steps in a row were not finite."""


class LoraTraining:
    """The trained LoRA of a policy with its optimizer, its average and their counters."""

    def __init__(self, policy: PipelinePolicy, options: AdamWConfig, *, runtime: Runtime, lags: bool = False) -> None:
        """Create the optimizer, and hand it and the transformer to the launcher's engine: weights may be sharded then.

        Args:
            policy: the policy with its adapter; its transformer is replaced by the engine's.
            lags: whether the sampling policy is a copy of the adapter that lags behind.
        """
        self.policy = policy
        self.options = options
        self.runtime = runtime
        self.step = 0
        """Optimizer steps taken."""
        self.bad_steps = 0
        """Consecutive steps skipped for a non-finite gradient."""

        # Gradient checkpointing needs train mode; without dropout the mode has no other effect.
        policy.transformer.train()
        optimizer = build_optimizer(policy, options, device=runtime.device)
        policy.transformer, self.optimizer = runtime.prepare(policy.transformer, optimizer)
        # Copies of the adapter, whose weights may be sharded now.
        self.average = MovingAverage(self.transformer, decay=options.ema_decay)
        """The evaluated and exported moving average."""
        self.old = AdapterCopy(self.transformer) if lags else None
        """Sampling policy of endpoint objectives, which lags behind the trained policy."""

    @property
    def transformer(self) -> torch.nn.Module:
        """Transformer without the launcher's wrapper."""
        return self.runtime.unwrap(self.policy.transformer)

    def take_step(self) -> float:
        """Take one optimizer step on all ranks, or skip it on all ranks if a gradient is not finite.

        Returns:
            The gradient norm before clipping; the step was skipped if it is not finite.

        Raises:
            BadGradientsError: on all ranks, after `MAX_BAD_STEPS` skipped steps in a row.
        """
        parameters = [parameter for parameter in self.policy.transformer.parameters() if parameter.requires_grad]
        # A norm that is not finite is so on every rank, since gradients are shared.
        norm = self.runtime.step(self.optimizer, parameters, max_norm=self.options.max_grad_norm)
        if math.isfinite(norm):
            self.bad_steps = 0
            self.step += 1
            self.average.follow(self.step)
            return norm

        self.bad_steps += 1
        if self.bad_steps >= MAX_BAD_STEPS:
            raise BadGradientsError(
                f"{self.bad_steps} optimizer steps in a row had gradients that are not finite; the state is saved. "
                "Lower optimizer.lr, or look for a reward or an image that is not finite"
            )
        return norm


def build_optimizer(policy: PipelinePolicy, options: AdamWConfig, *, device: torch.device) -> torch.optim.Optimizer:
    """Create AdamW over the adapter's weights, fused on CUDA."""
    return torch.optim.AdamW(
        [parameter for parameter in policy.transformer.parameters() if parameter.requires_grad],
        lr=options.lr,
        betas=options.betas,
        weight_decay=options.weight_decay,
        fused=device.type == "cuda" or None,
    )
