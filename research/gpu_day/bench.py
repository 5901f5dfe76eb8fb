"""A generator of random weights with its adapter, moving average and optimizer, as a run has them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from tests.twins.parts import random_weight

from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION
from pacorl.core.sampler import Sampler
from pacorl.grpo import builders, conditioning, lora_training, rollout, rows, update
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.adapters import MovingAverage, adapter_state
from pacorl.plan.generators import policy_on_meta
from pacorl.runtime.processes import Runtime, allow_tf32
from pacorl.types import TINY, Advantages, Conditioning, Prompt, Samples, Size
from research.twin import generator_parts

PROMPT = Prompt(id=0, text="drawn")
FORMS = {
    "bf16": ("memory=normal", "model.compile=none"),
    "int8": ("memory=low", "model.compile=none"),
    "streamed": ("memory=lowest", "model.compile=none"),
    "compiled": ("memory=normal", "model.compile=blocks"),
    "compiled-int8": ("memory=low", "model.compile=blocks"),
}
"""Form of the generator's weights and code → settings of a run."""
GENERATOR_ALONE = (
    "judge=none", "rewards=[{name: 'examples/jpeg_reward.py:jpeg_size'}]", "evaluation.rewards=[]",
    "evaluation.size=[512,512]", "sampling.tree={}", "sampling.suffix={}", "sampling.steps=4",
)  # fmt: skip
TINY_SETTINGS = (
    "model.dtype=float32", "model.max_sequence_length=48", "adapter.rank=8", "adapter.alpha=16",
    "sampling.size=[64,64]", "evaluation.size=[64,64]",
)  # fmt: skip


def run_of(options: argparse.Namespace, *settings: str) -> PolicyConfig:
    """Read the recipe for its generator alone, at four forwards a sample, with changes."""
    tiny = [f"model.checkpoint={TINY}", *TINY_SETTINGS] if options.tiny else []
    return load(PolicyConfig, recipe(options.recipe), [*GENERATOR_ALONE, *tiny, *settings])


class Bench:
    """A generator in the form that a run's config names, by default at full depth and on the run's device."""

    def __init__(self, config: PolicyConfig, *, device: torch.device | None = None, blocks: int | None = None) -> None:
        torch.manual_seed(0)
        self.config = config
        self.compiled = config.model.compile == "blocks"
        self.runtime = Runtime()
        device = device or self.runtime.device
        allow_tf32(allowed=config.model.dtype == "bfloat16")

        # Weights come from main memory, as a checkpoint's do, and are packed once they have values.
        parts = generator_parts(config.generator, tiny=config.model.checkpoint == TINY, depth=blocks)
        self.policy = policy_on_meta(config.generator, config.model.in_memory("normal"), parts)
        self.policy.options = config.model
        self.transformer: Any = self.policy.transformer
        for model in (self.transformer, self.policy.pipeline.vae):
            model.to_empty(device="cpu")
            for name, weight in model.state_dict().items():
                weight.copy_(random_weight(name, weight))
        self.policy.place_vae(device)

        builders.add_adapter(config, self.policy)
        builders.compile_models(config, self.policy)
        builders.place_transformer(config, self.policy, device=device)
        self.transformer.train()
        for name, weight in adapter_state(self.transformer).items():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.01)  # a new adapter's are 0, and would multiply any deviation by 0
        self.trained = [*lora_training.trained_parameters(self.policy.transformer).values()]
        self.optimizer = lora_training.build_optimizer(self.policy, config.optimizer, device=device)
        self.average = MovingAverage(self.transformer, decay=config.optimizer.ema_decay)
        self.cache = conditioning.ConditioningCache(self.policy)
        self.policy.encode = self._encode  # type: ignore[method-assign]

    def _encode(self, prompts: Sequence[Prompt], size: Size) -> list[Conditioning]:
        """Draw a text's encoding, in place of 9 GB of encoders."""
        config, dtype = self.transformer.config, self.policy.pipeline.vae.dtype
        tokens = torch.randn(1, self.config.model.max_sequence_length, config.joint_attention_dim, dtype=dtype)
        pooled = torch.randn(1, config.pooled_projection_dim, dtype=dtype)
        return [Conditioning({"tokens": tokens, "pooled": pooled}) for _ in prompts]

    def checkpoint_gradients(self, *, enabled: bool) -> None:
        budget = 0.0 if enabled else 1.0
        if not self.compiled or self.config.memory != "normal":
            getattr(self.transformer, f"{'enable' if enabled else 'disable'}_gradient_checkpointing")()
        elif torch._functorch.config.activation_memory_budget != budget:
            torch._functorch.config.activation_memory_budget = budget
            torch._dynamo.reset()

    def sampler(self, batch: int) -> Sampler:
        """The run's sampler of one group."""
        return self.config.sampling.sampler(0, group_size=batch, seed=0, spec=OBJECTIVES[self.config.objective.name])

    def draw(self, batch: int) -> rollout.Draw:
        """Parameters of a batch of training samples."""
        sampler = self.sampler(batch)
        return rollout.Draw(self.policy, sampler, self.cache, seed=0, epoch=0, batch=batch, as_trained=self.compiled)

    def collect(self, batch: int) -> Samples:
        """Draw a batch of training samples."""
        draw, samples = self.draw(batch), Samples()
        list(rollout.draw_samples(draw, [[rows.Row(PROMPT, number) for number in range(batch)]], samples))
        return samples

    @torch.no_grad()
    def sample(self, batch: int) -> None:
        """Run all sampling steps, with the moving average in place of the trained adapter."""
        sampler = self.sampler(batch)
        texts = self.cache.batch([PROMPT] * batch, sampler.size)
        sigmas = self.policy.sigmas(sampler.steps, sampler.size)
        with self.average.swapped_in():
            rollout.denoise(self.policy, range(batch), size=sampler.size, conditioning=texts, sigmas=sigmas)

    def train(self, samples: Samples) -> float:
        """Take one optimizer step, and return the importance ratio's deviation from 1 before it; a run's first is 0."""
        batch = len(samples.rollouts[0].row_B)
        loss = update.PolicyLoss(self.draw(batch), self.config.objective)
        advantages = Advantages(torch.linspace(-1, 1, batch), torch.ones(batch, dtype=torch.bool), {})
        metrics = update.update_policy(loss, samples, advantages, runtime=self.runtime)
        self.runtime.step(self.optimizer, self.trained, max_norm=self.config.optimizer.max_grad_norm)
        return metrics[RATIO_DEVIATION]
