"""Passes of a run, measured on meta tensors: its own forwards, backwards and codecs.

All blocks of a kind are alike, so that a transformer's figures are linear in the number of blocks. They are measured
with the fewest blocks, and with one more of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from pacorl.core.sampler import Sampler
from pacorl.core.sde import log_prob
from pacorl.grpo.rollout import transition_at
from pacorl.models.adapters import adapter_off
from pacorl.models.policies.policy import Parts
from pacorl.plan.generators import META, Inputs
from pacorl.plan.ledger import MemoryLedger, measured
from pacorl.types import Size

AXES = {
    "FluxTransformer2DModel": ("num_layers", "num_single_layers"),
    "Flux2Transformer2DModel": ("num_layers", "num_single_layers"),
    "QwenImageTransformer2DModel": ("num_layers",),
    "QwenImage21Transformer2DModel": ("num_layers",),
    "SD3Transformer2DModel": ("dual", "num_layers"),
}
"""A transformer's class → its config's names for the number of blocks of each kind; SD 3.5 lists its dual blocks."""

Figures = Mapping[str, float]
Depth = tuple[int, ...]


def published_depth(config: Mapping[str, Any]) -> Depth:
    """Count the blocks of each kind in a transformer's config; empty for a class that is not in `AXES`."""
    dual = len(config.get("dual_attention_layers", ()))
    sizes = {**config, "dual": dual, "num_layers": config.get("num_layers", 0) - dual}
    return tuple(sizes[name] for name in AXES.get(str(config.get("_class_name")), ()))


def fewest_blocks(depth: Depth) -> Depth:
    """One block of each kind, and two of the last: the very last block is unlike its kind, since nothing reads what it
    makes of the text."""
    fewest = (*(1 for _ in depth[1:]), 2)
    return tuple(min(few, full) for few, full in zip(fewest, depth, strict=True))


def cut(config: Mapping[str, Any], depth: Depth) -> dict[str, Any]:
    """Return a transformer's config with so many blocks."""
    sizes: dict[str, Any] = dict(zip(AXES[config["_class_name"]], depth, strict=True))
    if "dual" in sizes:
        dual = sizes.pop("dual")
        sizes = {"num_layers": dual + sizes["num_layers"], "dual_attention_layers": list(range(dual))}
    return {**config, **sizes}


def shallow(configs: Parts) -> Parts:
    """Return a generator's configs with the fewest blocks."""
    transformer = configs["transformer"]
    full = published_depth(transformer)
    return {**configs, "transformer": cut(transformer, fewest_blocks(full))} if full else configs


def at_full_depth(configs: Parts, measure: Callable[[Parts], Figures]) -> dict[str, float]:
    """Measure a generator's configs at their number of blocks, by those with fewer blocks."""
    transformer = configs["transformer"]
    full = published_depth(transformer)
    if not full:
        return dict(measure(configs))
    fewest = fewest_blocks(full)
    base = measure(shallow(configs))
    figures = dict(base)
    for kind, (few, all_blocks) in enumerate(zip(fewest, full, strict=True)):
        if all_blocks == few:
            continue
        more = tuple(count + (number == kind) for number, count in enumerate(fewest))
        deeper = measure({**configs, "transformer": cut(transformer, more)})
        for name, value in base.items():
            figures[name] += (all_blocks - few) * (deeper[name] - value)
    return figures


def training_pass(inputs: Inputs, *, sampler: Sampler, batch: int, with_base: bool) -> MemoryLedger:
    """Measure one trained step of one micro-batch, forward and backward, without its gradients.

    `with_base` adds the base's forward that a KL term needs.
    """
    policy, size = inputs.policy, sampler.size
    conditioning = inputs.conditioning(size, batch=batch)
    sigmas = policy.sigmas(sampler.steps, size)
    before, after = policy.noise(range(batch), size), policy.noise(range(batch), size)
    sigma_B = torch.empty(batch, device=META)
    # Gradients are allocated outside the ledger: the adapter's rows of the plan count them.
    for parameter in policy.transformer.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    policy.transformer.train()

    def step() -> None:
        velocity = policy.velocity(before, sigma_B, conditioning, size)
        loss = log_prob(after, transition_at(sampler, sigmas, 0, before, velocity)).mean()
        if with_base:
            with torch.no_grad(), adapter_off(policy.transformer):
                base = policy.velocity(before, sigma_B, conditioning, size)
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


def decoding_pass(inputs: Inputs, *, size: Size, batch: int = 1) -> MemoryLedger:
    """Measure the VAE's decoder, without tiling. An accelerator decodes the images of a batch one by one."""
    policy = inputs.policy
    factor = policy.pipeline.vae_scale_factor
    shape = (batch, policy.latent_channels, size.height // factor, size.width // factor)
    codes = torch.empty(shape, device=META, dtype=policy.pipeline.vae.dtype)
    return measured(lambda: policy.decode_codes(codes))


def encoding_pass(inputs: Inputs, *, size: Size, prompts: int) -> MemoryLedger:
    """Measure some prompts in the largest encoder, or for edits a source in the VAE's if that has a higher peak."""
    text = measured(inputs.text_pass(size, prompts=prompts))
    if not inputs.policy.max_sources:
        return text
    return max(text, image_encoding_pass(inputs, size=size), key=attrgetter("peak"))


def image_encoding_pass(inputs: Inputs, *, size: Size) -> MemoryLedger:
    """Measure one image in the VAE's encoder."""
    policy = inputs.policy
    pixels = torch.empty(1, 3, size.height, size.width, device=META, dtype=policy.pipeline.vae.dtype)
    return measured(lambda: policy.encode_pixels(pixels))
