"""How much memory a run takes, measured without taking it: its own code runs on meta tensors, and a ledger notes
every storage from birth to death.

What is measured is what an allocator hands out: weights, saved activations and passing buffers, checkpointing and all,
for any architecture and size. Not in it: kernels' scratch space, the allocator's rounding and fragments, and the CUDA
context (together about 1 GiB on a card).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pacorl.core.sampling import Sampler
from pacorl.core.sde import log_prob
from pacorl.engine.rollout import transition_at
from pacorl.lora.adapters import adapter_off
from pacorl.policies.meta import META
from pacorl.policies.pipeline import PipelinePolicy
from pacorl.types import Size


class MemoryLedger(TorchDispatchMode):
    """Within the block, the bytes of all storages that operations made and nobody has let go.

    Storages that came in from outside (weights, inputs) are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in _tensors(args):
            self._note(tensor, counted=False)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor, counted=True)
        return result

    def _note(self, tensor: Tensor, *, counted: bool) -> None:
        # A storage's Python object lives as long as the storage, so its id names it and its weak reference ends it.
        storage = tensor.untyped_storage()
        if (key := id(storage)) in self._known:
            return
        size = storage.nbytes() if counted else 0

        def gone(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, which nest in lists and tuples alone."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within the block meta tensors attend through a fused kernel, as real ones do.

    torch would choose the unfused formula for them, which keeps every attention matrix.
    """
    real, name = F.scaled_dot_product_attention, "scaled_dot_product_attention"

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device != META:
            return real(
                query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        fused: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return fused

    setattr(F, name, attention)
    try:
        yield
    finally:
        setattr(F, name, real)


@contextmanager
def measured() -> Iterator[MemoryLedger]:
    """The ledger of what is run within the block, on meta tensors."""
    with fused_attention(), MemoryLedger() as ledger:
        yield ledger


def count(module: nn.Module) -> int:
    """Parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


# --- peaks above the resident weights, in bytes ----------------------------------------------------------------


def training_peak(policy: PipelinePolicy, *, sampler: Sampler, batch: int, with_base: bool) -> int:
    """One trained step of one micro-batch, forward and backward; gradients are resident and not counted.

    `with_base` adds the base's forward that a KL term needs.
    """
    conditioning = policy.conditioning_on_meta(sampler.size, batch=batch)
    sigmas, step = policy.sigmas(sampler.steps, sampler.size), 0
    before, after = policy.noise(range(batch), sampler.size), policy.noise(range(batch), sampler.size)
    sigma_B = torch.empty(batch, device=META)
    for parameter in policy.transformer.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    policy.transformer.train()
    with measured() as ledger:
        velocity = policy.velocity(before, sigma_B, conditioning, sampler.size)
        loss = log_prob(after, transition_at(sampler, sigmas, step, before, velocity)).mean()
        if with_base:
            with torch.no_grad(), adapter_off(policy.transformer):
                base = policy.velocity(before, sigma_B, conditioning, sampler.size)
            loss = loss + (velocity - base).square().mean()
        torch.autograd.backward(loss)
    return ledger.peak


def sampling_peak(policy: PipelinePolicy, *, size: Size, batch: int) -> int:
    """One forward without gradients."""
    x_BNC, conditioning = policy.noise(range(batch), size), policy.conditioning_on_meta(size, batch=batch)
    with torch.no_grad(), measured() as ledger:
        policy.velocity(x_BNC, torch.empty(batch, device=META), conditioning, size)
    return ledger.peak


def decoding_peak(policy: PipelinePolicy, *, size: Size, batch: int) -> int:
    """The VAE's decoder, without tiling."""
    factor = policy.pipeline.vae_scale_factor
    shape = (batch, policy.latent_channels, size.height // factor, size.width // factor)
    codes = torch.empty(shape, device=META, dtype=policy.pipeline.vae.dtype)
    with torch.no_grad(), measured() as ledger:
        policy.decode_codes(codes)
    return ledger.peak


def encoding_peak(policy: PipelinePolicy, *, size: Size) -> int:
    """One prompt through the largest encoder; for edits its source through the VAE, if that takes more."""
    passes = [policy.text_pass(size)]
    if policy.references:
        pixels = torch.empty(1, 3, size.height, size.width, device=META, dtype=policy.pipeline.vae.dtype)
        passes.append(partial(policy.encode_pixels, pixels))
    peaks = []
    for run in passes:
        with torch.no_grad(), measured() as ledger:
            run()
        peaks.append(ledger.peak)
    return max(peaks)


def judging_peak(judge: Any, *, questions: int, tokens: int) -> int:
    """`questions` of `tokens` tokens through the language model, the largest part of a forward."""
    language, positions = judge.model.language_model, torch.zeros(3, questions, tokens, device=META, dtype=torch.long)
    embedded = torch.empty(questions, tokens, language.config.hidden_size, device=META, dtype=judge.dtype)
    with torch.no_grad(), measured() as ledger:
        language(inputs_embeds=embedded, position_ids=positions, use_cache=False)
    return ledger.peak
