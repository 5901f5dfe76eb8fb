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

from pacorl.config.base import ConfigError
from pacorl.core.sampler import Sampler
from pacorl.core.sde import log_prob
from pacorl.grpo.builders import add_adapter
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.rollout import transition_at
from pacorl.models.adapters import adapter_off, adapter_state
from pacorl.models.int8 import parameter_count, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.models.policies.spec import PolicySpec
from pacorl.plan.generators import Inputs, policy_on_meta
from pacorl.plan.ledger import META, MemoryLedger, measured
from pacorl.types import Size

AXES = {
    "FluxTransformer2DModel": ("num_layers", "num_single_layers"),
    "Flux2Transformer2DModel": ("num_layers", "num_single_layers"),
    "QwenImageTransformer2DModel": ("num_layers",),
    "QwenImage21Transformer2DModel": ("num_layers",),
    "SD3Transformer2DModel": ("dual", "num_layers"),
}
"""A transformer's class → its config's names for the number of blocks of each kind; SD 3.5 lists its dual blocks."""

Depth = tuple[int, ...]


def published_depth(config: Mapping[str, Any]) -> Depth:
    """Count the blocks of each kind in a transformer's config; empty for a class that is not in `AXES`."""
    dual = len(config.get("dual_attention_layers", ()))
    sizes = {**config, "dual": dual, "num_layers": config.get("num_layers", 0) - dual}
    return tuple(sizes[name] for name in AXES.get(str(config.get("_class_name")), ()))


def fewest_blocks(depth: Depth) -> Depth:
    """One block of each kind, and two of the last: the very last block is unlike its kind, since nothing reads what it
    makes of the text."""
    return tuple(map(min, (*(1 for _ in depth[1:]), 2), depth))


def cut(config: Mapping[str, Any], depth: Depth) -> dict[str, Any]:
    """Return a transformer's config with so many blocks."""
    sizes: dict[str, Any] = dict(zip(AXES[config["_class_name"]], depth, strict=True))
    if "dual" in sizes:
        dual = sizes.pop("dual")
        sizes = {"num_layers": dual + sizes["num_layers"], "dual_attention_layers": list(range(dual))}
    return {**config, **sizes}


def shallow(configs: Parts) -> Parts:
    """Return a generator's configs with the fewest blocks."""
    full = published_depth(configs["transformer"])
    return {**configs, "transformer": cut(configs["transformer"], fewest_blocks(full))} if full else configs


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
    further: float = 0
    """Peak of a forward of the second batch."""
    further_flops: float = 0


def at_full_depth(configs: Parts, measure: Callable[[Parts], Figures]) -> Figures:
    """Measure a generator's configs at their number of blocks, by those with fewer blocks."""
    full = published_depth(configs["transformer"])
    fewest = fewest_blocks(full)
    base = measure(shallow(configs))
    figures = np.array(base)
    for kind, left_out in enumerate(np.subtract(full, fewest)):
        if left_out:
            more = tuple(count + (number == kind) for number, count in enumerate(fewest))
            deeper = measure({**configs, "transformer": cut(configs["transformer"], more)})
            figures = figures + left_out * np.subtract(deeper, base)
    return Figures(*figures.tolist())


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
    with_base: bool = False
    """Whether a KL term needs the base's forward."""


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
        ConfigError: The adapter's targets match no module.
    """
    measured_inputs: list[Inputs] = []

    def measure(parts: Parts) -> Figures:
        inputs = Inputs(policy_on_meta(spec, options, parts), images)
        measured_inputs.append(inputs)
        model = inputs.policy.transformer
        weights = (parameter_count(model), weight_bytes(model), streamed_bytes(model))
        trained = _training_figures(inputs, training) if training else (0, 0, 0, 0)
        passes = [sampling_pass(inputs, size=batch.size, batch=batch.count) for batch in batches]
        return Figures(*weights, *trained, *(figure for each in passes for figure in (each.peak, each.flops)))

    # Targets that name a block are found at the full depth alone.
    targets = training.config.adapter.targets if training else ()
    names_block = any(re.search(r"blocks\.\d", target) for target in targets)
    figures = measure(configs) if names_block else at_full_depth(configs, measure)
    inputs = measured_inputs[0]
    return Generator(inputs, batches, figures, [decoding_pass(inputs, size=batch.size) for batch in batches])


def _training_figures(inputs: Inputs, training: Training) -> tuple[float, float, float, float]:
    """Add the adapter, and measure its bytes, those with gradients, and a step's peak and FLOPs."""
    transformer = inputs.policy.transformer
    try:
        with META:
            add_adapter(training.config, inputs.policy)
    except ValueError as error:
        raise ConfigError(f"adapter.targets: {error}") from None
    adapter = sum(weight.nbytes for weight in adapter_state(transformer).values())
    trained = sum(weight.nbytes for weight in transformer.parameters() if weight.requires_grad)
    step = training_pass(inputs, training)
    return adapter, trained, step.peak, step.flops


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
        loss = log_prob(after, transition_at(sampler, sigmas, 0, before, velocity)).mean()
        if training.with_base:
            with torch.no_grad(), adapter_off(policy.transformer):
                base = policy.velocity(before, sigma_B, conditioning, sampler.size)
            loss = loss + (velocity - base).square().mean()
        torch.autograd.backward(loss)

    return measured(step, gradients=True)


def sampling_pass(inputs: Inputs, *, size: Size, batch: int) -> MemoryLedger:
    """Measure one forward without gradients, or two if the generator is guided, with the prefix that steps share."""
    policy = inputs.policy
    x_BNC = policy.noise(range(batch), size)
    conditioning = inputs.conditioning(size, batch=batch)
    sigma_B = torch.empty(batch, device=META)
    return measured(lambda: policy.velocity(x_BNC, sigma_B, policy.with_prefix(conditioning, size), size))


def decoding_pass(inputs: Inputs, *, size: Size) -> MemoryLedger:
    """Measure one image in the VAE's decoder, without tiling. An accelerator decodes the images of a batch one by
    one."""
    policy = inputs.policy
    factor = policy.pipeline.vae_scale_factor
    shape = (1, policy.latent_channels, size.height // factor, size.width // factor)
    codes = torch.empty(shape, device=META, dtype=policy.pipeline.vae.dtype)
    return measured(lambda: policy.decode_codes(codes))


def image_encoding_pass(inputs: Inputs, *, size: Size) -> MemoryLedger:
    """Measure one image in the VAE's encoder."""
    policy = inputs.policy
    pixels = torch.empty(1, 3, size.height, size.width, device=META, dtype=policy.pipeline.vae.dtype)
    return measured(lambda: policy.encode_pixels(pixels))
