"""A generator's peaks and FLOPs in a run, measured on meta tensors: its own forwards, backwards and codecs.

All blocks of a kind are alike, so that a transformer's figures are linear in the number of blocks. They are measured
with the fewest blocks, and with one more of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pacorl.core.sampler import Sampler
from pacorl.core.sde import log_prob
from pacorl.grpo.builders import add_adapter
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.rollout import transition_at
from pacorl.io.documents import blamed_on
from pacorl.models.adapters import adapter_state
from pacorl.models.int8 import parameter_count, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.generators import Inputs, policy_on_meta
from pacorl.plan.ledger import META, MemoryLedger, measured
from pacorl.types import Size

BLOCKS = {
    "FluxTransformer2DModel": ("num_layers", "num_single_layers"),
    "Flux2Transformer2DModel": ("num_layers", "num_single_layers"),
    "QwenImageTransformer2DModel": ("num_layers",),
    "QwenImage21Transformer2DModel": ("num_layers",),
}
"""A transformer's class → its config's keys for the number of blocks of each kind. Others are measured whole."""

Depth = Mapping[str, int]
"""A transformer config's keys for the numbers of blocks, with such numbers."""


def published_depth(config: Mapping[str, Any]) -> Depth:
    """Return the numbers of blocks in a transformer's config; empty for a class that is not in `BLOCKS`."""
    return {key: config[key] for key in BLOCKS.get(str(config.get("_class_name")), ())}


def fewest_blocks(depth: Depth) -> Depth:
    """One block of each kind, and two of the last: the very last block is unlike its kind, since nothing reads what it
    makes of the text."""
    fewest = dict.fromkeys(depth, 1)
    if fewest:
        fewest[list(fewest)[-1]] = 2
    return {key: min(count, depth[key]) for key, count in fewest.items()}


def with_depth(configs: Parts, depth: Depth) -> Parts:
    """Return a generator's configs with so many blocks."""
    return {**configs, "transformer": {**configs["transformer"], **depth}}


def shallow(configs: Parts) -> Parts:
    """Return a generator's configs with the fewest blocks."""
    return with_depth(configs, fewest_blocks(published_depth(configs["transformer"])))


class Figures(NamedTuple):
    """Bytes and FLOPs of a transformer, which are linear in its number of blocks."""

    parameters: float
    weights: float
    """On the device."""
    streamed: float
    """In main memory."""
    adapter: float = 0
    """Bytes of the adapter's weights; 0 if there is none."""
    trained: float = 0
    """Bytes of the weights that receive gradients."""
    train: float = 0
    """Peak of a trained micro-batch."""
    train_flops: float = 0
    sample: float = 0
    """Peak of a forward of the first batch."""
    sample_flops: float = 0
    evaluate: float = 0
    """Peak of a forward of the second batch, if there is one."""
    evaluate_flops: float = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Images that are sampled together."""

    size: Size
    count: int


@dataclass(frozen=True, slots=True)
class Training:
    """What a run trains: its adapter, and its largest micro-batch."""

    config: LoraConfig
    sampler: Sampler
    batch: int


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator as measured."""

    inputs: Inputs
    """Of the policy with the fewest blocks."""
    batches: Sequence[Batch]
    figures: Figures
    decodings: Sequence[MemoryLedger]
    """Of an image of each batch."""


def measure_generator(
    spec: PolicySpec,
    options: PolicyOptions,
    configs: Parts,
    *,
    images: int | None,
    batches: Sequence[Batch],
    training: Training | None = None,
) -> Generator:
    """Measure a generator's transformer and its decoder.

    Args:
        configs: config.json of each component.
        images: sources and references of a prompt; None for one of an editor.
        batches: that are sampled, two at most.
        training: None for generating.

    Raises:
        ValueError: The adapter's targets match no module.
    """

    def inputs_of(parts: Parts) -> Inputs:
        return Inputs(policy_on_meta(spec, options, parts), images)

    # Targets that name a block are found at the full depth alone.
    full = published_depth(configs["transformer"])
    if training and any(re.search(r"blocks\.\d", target) for target in training.config.adapter.targets):
        full = {}
    fewest = fewest_blocks(full)
    inputs = inputs_of(with_depth(configs, fewest))
    base = _transformer_figures(inputs, batches, training)
    figures = np.array(base)
    for key, count in fewest.items():
        if full[key] > count:
            deeper = inputs_of(with_depth(configs, {**fewest, key: count + 1}))
            of_block = np.subtract(_transformer_figures(deeper, batches, training), base)
            figures = figures + (full[key] - count) * of_block
    decodings = [decoding_pass(inputs, size=batch.size) for batch in batches]
    return Generator(inputs, batches, Figures(*figures.tolist()), decodings)


def _transformer_figures(inputs: Inputs, batches: Sequence[Batch], training: Training | None) -> Figures:
    """Measure a transformer, after the adapter is added if it is trained."""
    model = inputs.policy.transformer
    weights = (parameter_count(model), weight_bytes(model), streamed_bytes(model))
    trained: tuple[float, ...] = (0, 0, 0, 0)
    if training:
        with META, blamed_on("adapter.targets"):
            add_adapter(training.config, inputs.policy)
        adapter = sum(weight.nbytes for weight in adapter_state(model).values())
        with_gradients = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
        step = training_pass(inputs, training)
        trained = (adapter, with_gradients, step.peak, step.flops)
    passes = [sampling_pass(inputs, size=batch.size, batch=batch.count) for batch in batches]
    return Figures(*weights, *trained, *(figure for run in passes for figure in (run.peak, run.flops)))


# --- passes ----------------------------------------------------------------------------------------------------


def training_pass(inputs: Inputs, training: Training) -> MemoryLedger:
    """Measure one trained step of one micro-batch, forward and backward, without its gradients."""
    policy, sampler, count = inputs.policy, training.sampler, training.batch
    conditioning = inputs.conditioning(sampler.size, batch=count)
    sigmas = policy.sigmas(sampler.steps, sampler.size)
    before, after = policy.noise(range(count), sampler.size), policy.noise(range(count), sampler.size)
    sigma_B = torch.empty(count, device=META)
    # Gradients are allocated outside the ledger: the phases count them.
    for parameter in policy.transformer.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    policy.transformer.train()

    def step() -> None:
        velocity = policy.velocity(before, sigma_B, conditioning, sampler.size)
        torch.autograd.backward(log_prob(after, transition_at(sampler, sigmas, 0, before, velocity)).mean())

    return measured(step, gradients=True)


def sampling_pass(inputs: Inputs, *, size: Size, batch: int) -> MemoryLedger:
    """Measure one forward without gradients, or two if the generator is guided, with the prefix that steps share."""
    policy = inputs.policy
    x_BNC = policy.noise(range(batch), size)
    conditioning = inputs.conditioning(size, batch=batch)
    sigma_B = torch.empty(batch, device=META)
    return measured(lambda: policy.velocity(x_BNC, sigma_B, policy.with_prefix(conditioning, size), size))


def decoding_pass(inputs: Inputs, *, size: Size) -> MemoryLedger:
    """Measure one image in the VAE's decoder: an accelerator decodes the images of a batch one by one."""
    policy = inputs.policy
    shape = (1, policy.latent_channels, size.height // policy.code_pixels, size.width // policy.code_pixels)
    codes = torch.empty(shape, device=META, dtype=policy.pipeline.vae.dtype)
    return measured(lambda: policy.decode_codes(codes))


def encoding_peak(generator: Generator, *, prompts: int, images: bool) -> int:
    """Measure the peak of some prompts in the largest text encoder, or of an image in the VAE's if that is higher.

    Args:
        prompts: encoded at a time.
        images: whether images pass the VAE's encoder even if the generator is no editor.
    """
    inputs, policy = generator.inputs, generator.inputs.policy
    size = max((batch.size for batch in generator.batches), key=lambda size: size.height * size.width)
    passes: list[Callable[[], Any]] = [inputs.text_pass(size, prompts=prompts)]
    if images or policy.max_sources:
        pixels = torch.empty(1, 3, size.height, size.width, device=META, dtype=policy.pipeline.vae.dtype)
        passes.append(lambda: policy.encode_pixels(pixels))
    return max(measured(run).peak for run in passes)
