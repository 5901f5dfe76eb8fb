"""A LoRA in training, whatever the objective: adapter, optimizer, moving average, and their tensors in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pacorl.models.adapters import AdapterCopy, MovingAverage, adapter_state, full_tensor, set_adapter_state, shard_like
from pacorl.runtime.processes import MAX_BAD_STEPS, Runtime

if TYPE_CHECKING:
    from pacorl.grpo.lora_config import AdamWConfig
    from pacorl.models.policies.pipeline import PipelinePolicy


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
        self.parameters = [*trained_parameters(policy.transformer).values()]
        """Weights of the adapter."""
        # Copies of the adapter, whose weights may be sharded now.
        self.average = MovingAverage(self.transformer, decay=options.ema_decay)
        """The evaluated and exported moving average."""
        self.old = AdapterCopy(self.transformer) if lags else None
        """Sampling policy of endpoint objectives, which lags behind the trained policy."""

    @property
    def transformer(self) -> nn.Module:
        """Transformer without the launcher's wrapper."""
        return self.runtime.unwrap(self.policy.transformer)

    def take_step(self) -> float:
        """Take one optimizer step on all ranks, or skip it on all ranks if a gradient is not finite.

        Returns:
            The gradient norm before clipping; the step was skipped if it is not finite.

        Raises:
            BadGradientsError: on all ranks, after `MAX_BAD_STEPS` skipped steps in a row.
        """
        # All ranks see the same norm, finite or not, since gradients are shared.
        norm = self.runtime.step(self.optimizer, self.parameters, max_norm=self.options.max_grad_norm)
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

    # --- tensors of a checkpoint -------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Gather the unsharded tensors of a checkpoint, `adapter/NAME` and so on. All ranks call it."""
        sections = {"adapter": adapter_state(self.transformer), "average": self.average.state}
        if self.old:
            sections["old"] = self.old.state
        sections["optimizer"] = optimizer_tensors(self.optimizer, self.transformer)
        gathered = {}
        for section, state in sections.items():
            for name, value in state.items():
                gathered[f"{section}/{name}"] = full_tensor(value)
        return gathered

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the `tensors` of a checkpoint, also of another number of processes.

        Raises:
            ValueError: if they do not fit the run's adapter.
        """
        set_adapter_state(self.transformer, section_of(tensors, "adapter"))
        self.average.load(section_of(tensors, "average"))
        if self.old:
            self.old.load(section_of(tensors, "old"))
        set_optimizer_tensors(self.optimizer, self.transformer, section_of(tensors, "optimizer"))


def trained_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """Map names to the weights of the adapter, in the order in which torch numbers an optimizer's state."""
    # Names survive another number of processes.
    return {name: parameter for name, parameter in transformer.named_parameters() if parameter.requires_grad}


def build_optimizer(policy: PipelinePolicy, options: AdamWConfig, *, device: torch.device) -> torch.optim.Optimizer:
    """Create AdamW over the adapter's weights, fused on CUDA."""
    return torch.optim.AdamW(
        trained_parameters(policy.transformer).values(),
        lr=options.lr,
        betas=options.betas,
        weight_decay=options.weight_decay,
        fused=device.type == "cuda" or None,
    )


def section_of(tensors: Mapping[str, Tensor], section: str) -> dict[str, Tensor]:
    """Select the tensors of a section of a checkpoint: adapter, average, old or optimizer."""
    return {
        name.removeprefix(f"{section}/"): value for name, value in tensors.items() if name.startswith(f"{section}/")
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer, transformer: nn.Module) -> dict[str, Tensor]:
    """Return an optimizer's state by parameter names, `exp_avg/NAME`; shards of sharded weights."""
    # Not torch.distributed.checkpoint.state_dict: it gives an optimizer that has no state yet one by a step of its own,
    # which AdamW counts, so that a run saved before its first step would not resume to equal bits.
    state = optimizer.state_dict()["state"]
    tensors = {}
    for number, name in enumerate(trained_parameters(transformer)):
        for kind, value in state.get(number, {}).items():
            tensors[f"{kind}/{name}"] = value
    return tensors


def set_optimizer_tensors(
    optimizer: torch.optim.Optimizer, transformer: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Restore an optimizer of the same parameters from `optimizer_tensors`, sharded like them."""
    parameters = trained_parameters(transformer)
    numbers = {name: number for number, name in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        # AdamW's step counters are scalars, which no launcher shards.
        sharded = shard_like(parameters[name], value) if value.dim() else value
        state.setdefault(numbers[name], {})[kind] = sharded
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
