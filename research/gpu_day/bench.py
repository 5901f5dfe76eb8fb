"""A generator of random weights with its adapter, moving average and optimizer, as a run has them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tests.twins.parts import random_weight

from pacorl.config import base as configs
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo import builders
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.lora_training import build_optimizer
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, denoise, draw_samples, sigmas_of
from pacorl.grpo.rows import Row
from pacorl.grpo.update import PolicyLoss, update_policy
from pacorl.models.adapters import MovingAverage, adapter_state
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import Inputs, policy_on_meta
from pacorl.plan.ledger import META
from pacorl.plan.plan import Plan, plan_policy
from pacorl.runtime.compiled import compile_blocks
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Conditioning, Prompt, Samples, Size

NOISE_STEP = 1
"""The stochastic step."""
PROMPT = Prompt(id=0, text="drawn")


@dataclass(frozen=True, slots=True)
class Form:
    """A form of the generator's weights and code, by the settings of a run."""

    memory: str = "normal"
    compile: str = "none"

    def of(self, config: PolicyConfig) -> PolicyConfig:
        """The same run in this form."""
        model = config.model.model_copy(update={"compile": self.compile}).in_memory(self.memory)
        return config.model_copy(update={"memory": self.memory, "model": model})


FORMS: Mapping[str, Form] = {
    "bf16": Form(),
    "int8": Form(memory="low"),
    "streamed": Form(memory="lowest"),
    "compiled": Form(compile="blocks"),
    "compiled-int8": Form(memory="low", compile="blocks"),
}


def device_of(options: argparse.Namespace) -> torch.device:
    """The CPU for the tiny shapes, else the card.

    Raises:
        RuntimeError: there is no card.
    """
    if options.tiny:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is here; --tiny runs the same code on a CPU")
    return torch.device("cuda")


def run_of(side: int, options: argparse.Namespace, *, batch: int = 1) -> PolicyConfig:
    """The recipe at one size, with the judge elsewhere."""
    tiny = {"model.checkpoint": "tiny", "model.dtype": "float32", "model.max_sequence_length": 48}
    settings = {
        **(tiny if options.tiny else {}),
        "adapter.rank": options.rank,
        "adapter.alpha": 2 * options.rank,
        "sampling.size": f"[{side},{side}]",
        "sampling.batch": batch,
        "sampling.steps": options.steps,
        "sampling.sde_steps": f"[{NOISE_STEP}]",
        "evaluation.size": f"[{side},{side}]",
        "evaluation.batch": batch,
        "judge": "{checkpoint: 'http://127.0.0.1:1/v1#none'}",
        "rewards": "[{name: 'examples/jpeg_reward.py:jpeg_size'}]",
    }
    return configs.load(PolicyConfig, None, [f"{key}={value}" for key, value in settings.items()])


def parts_at(config: PolicyConfig, blocks: int | None) -> Parts:
    """The configs of the generator's parts, with so many double blocks and twice as many single ones, or its own."""
    parts = dict(sources.generator_of(config.model, config.generator).configs)
    if blocks is not None:
        parts["transformer"] = {**parts["transformer"], "num_layers": blocks, "num_single_layers": 2 * blocks}
    return parts


def place_random(module: torch.nn.Module, device: torch.device) -> None:
    """Move a model without weights to a device, with weights of `random_weight`."""
    module.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(random_weight(name, tensor))


class RandomConditioning:
    """Conditioning of the right shapes from a generator of noise, in place of a cache of encoded prompts."""

    def __init__(self, policy: PipelinePolicy, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._batches: dict[tuple[int, Size], Conditioning] = {}

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """The same tensors for the same number of prompts and size: training must replay sampling."""
        key = (len(prompts), size)
        if key not in self._batches:
            shapes = Inputs(self._policy).conditioning(size, batch=len(prompts)).tensors
            tensors = {
                name: torch.randn(shape.shape, dtype=shape.dtype, device=self._device) for name, shape in shapes.items()
            }
            self._batches[key] = Conditioning(tensors)
        return self._batches[key]


class Bench:
    """A generator on the device, in one form and at one depth."""

    def __init__(
        self,
        config: PolicyConfig,
        options: argparse.Namespace,
        device: torch.device,
        *,
        form: Form = FORMS["bf16"],
        blocks: int | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.options, self.runtime = device, options, Runtime()
        self.generator = policy_on_meta(config.generator, config.model, parts_at(config, blocks))
        # Set once the weights are there: `policy_on_meta` would pack them without values.
        self.config = config = form.of(config)
        self.generator.options = config.model
        self.policy = cast(PipelinePolicy, self.generator)
        transformer: Any = self.generator.pipeline.transformer
        # Weights come from main memory, as a checkpoint's do: a card need not hold them unpacked.
        home = META if device == META else torch.device("cpu")
        for part in (transformer, self.generator.pipeline.vae):
            place_random(part, home)
        self.generator.place_vae(device)

        # The run's own builders, in the run's order.
        builders.add_adapter(config, self.policy)
        if config.model.compile == "blocks":
            compile_blocks(transformer, packed=config.memory != "normal")
        self.cache = cast(ConditioningCache, RandomConditioning(self.generator, device))
        builders.place_transformer(config, self.policy, device=device)
        self.checkpoint_gradients(enabled=bool(config.model.gradient_checkpointing))
        transformer.train()
        self._fill_adapter()
        self.trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.policy, config.optimizer, device=device)
        self.average = MovingAverage(transformer, decay=0.9)

    @torch.no_grad()
    def _fill_adapter(self) -> None:
        """Give B small random values: a new adapter's are 0, and would multiply any deviation by 0."""
        for name, weight in adapter_state(self.policy.transformer).items():
            if "lora_B" in name:
                weight.normal_(std=0.01)

    def checkpoint_gradients(self, *, enabled: bool) -> None:
        """Switch gradient checkpointing on or off."""
        transformer: Any = self.generator.pipeline.transformer
        if enabled:
            transformer.enable_gradient_checkpointing()
        else:
            transformer.disable_gradient_checkpointing()

    def sampler(self, side: int, batch: int) -> Sampler:
        size = self.generator.nearest_size(Size(side, side))
        return Sampler(size=size, steps=self.options.steps, sde_steps=(NOISE_STEP,), tree=Tree(batch, (1,)))

    def collect(self, side: int, batch: int) -> Samples:
        """Draw a batch of training samples."""
        draw = Draw(
            self.policy,
            self.sampler(side, batch),
            self.cache,
            seed=0,
            epoch=0,
            batch=batch,
            as_trained=self.config.model.compile != "none",
        )
        samples = Samples()
        for _ in draw_samples(draw, [Row(PROMPT, number) for number in range(batch)], samples):
            pass
        return samples

    @torch.no_grad()
    def sample(self, side: int, batch: int) -> None:
        """Run all sampling steps, with the moving average in place of the trained adapter."""
        sampler = self.sampler(side, batch)
        prompts = [PROMPT] * batch
        with self.average.swapped_in():
            denoise(
                self.policy,
                range(batch),
                size=sampler.size,
                conditioning=self.cache.batch(prompts, sampler.size),
                sigmas=sigmas_of(self.policy, sampler, PROMPT),
            )

    def decode(self, samples: Samples, side: int) -> None:
        """Decode the endpoints of some samples."""
        final = samples.rollouts[0].final_BNC.to(self.device)
        self.policy.decode(final, self.sampler(side, len(final)).size)

    def train(self, samples: Samples, side: int, *, steps: bool = True) -> dict[str, float]:
        """Run one optimizer step on one micro-batch; without `steps` compute its gradient alone."""
        count = len(samples.rollouts[0])
        learner = PolicyLoss(
            self.policy, self.sampler(side, count), self.cache, options=OBJECTIVES["grpo_clip"].options()
        )
        advantages = torch.linspace(-1, 1, count) if count > 1 else torch.ones(1)
        values = Advantages(advantages, torch.ones(count, dtype=torch.bool), {})
        metrics = update_policy(learner, samples, values, runtime=self.runtime, draw=(0,))
        if steps:
            self.runtime.step(self.optimizer, self.trained, max_norm=1.0)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def ratio_deviation(self, side: int, batch: int) -> float:
        """Deviation of the importance ratio from 1 before an update; a run's is 0."""
        metrics = self.train(self.collect(side, batch), side, steps=False)
        return metrics[f"{RATIO_DEVIATION}/{NOISE_STEP}"]


def planned(config: PolicyConfig) -> Plan:
    """The plan of the same run, as `--dry-run` makes it."""
    return plan_policy(config)
