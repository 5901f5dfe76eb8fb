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
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pacorl.core.sampling import Sampler
from pacorl.core.sde import log_prob
from pacorl.engine.rollout import transition_at
from pacorl.io.documents import parse_json
from pacorl.lora.adapters import adapter_off
from pacorl.policies.pipeline import PipelinePolicy
from pacorl.quantize.linear import parameter_count, quantize_model, weight_bytes
from pacorl.twins import META, model_on_meta
from pacorl.types import Size


class MemoryLedger(TorchDispatchMode):
    """Within the block, the bytes of all storages that operations made and nobody has let go.

    Storages that came in from outside (weights, inputs) are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in _tensors(args):
            self._note(tensor, counted=False)
        outputs = func(*args, **(kwargs or {}))
        for tensor in _tensors(outputs):
            self._note(tensor, counted=True)
        return outputs

    def _note(self, tensor: Tensor, *, counted: bool) -> None:
        # A storage's Python object lives as long as the storage, so its id names it and its weak reference ends it.
        storage = tensor.untyped_storage()
        if (key := id(storage)) in self._storages:
            return
        size = storage.nbytes() if counted else 0

        def gone(_: object) -> None:
            self.live -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _tensors(nested: object) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, which nest in lists and tuples alone."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for inner in nested:
            yield from _tensors(inner)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within the block meta tensors attend through a fused kernel, as real ones do.

    torch takes the unfused formula for them, which keeps every attention matrix: 8 heads of 4,096 tokens in fp32 then
    take 1,568 MiB, forward and backward, instead of 40.
    """
    real, name = F.scaled_dot_product_attention, "scaled_dot_product_attention"

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        if query.device != META:
            return real(query, key, value, attn_mask, dropout_p, **options)
        causal, scale = options.get("is_causal", False), options.get("scale")
        # The CPU's fused kernel is the one that knows meta tensors on a machine without CUDA; what it saves for its
        # backward pass are the same tensors.
        fused: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, causal, attn_mask=attn_mask, scale=scale
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


# --- peaks above the resident weights, in bytes ----------------------------------------------------------------


def training_peak(policy: PipelinePolicy, *, sampler: Sampler, batch: int, with_base: bool) -> int:
    """One trained step of one micro-batch, forward and backward; gradients are resident and not counted.

    `with_base` adds the base's forward that a KL term needs.
    """
    conditioning = policy.conditioning_on_meta(sampler.size, batch=batch)
    sigmas, step = policy.sigmas(sampler.steps, sampler.size), 0
    before, after = policy.noise(range(batch), sampler.size), policy.noise(range(batch), sampler.size)
    sigma_B = torch.empty(batch, device=META)
    # Made outside the ledger: the adapter's rows of the plan count its gradients already.
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


def _forward_peak(run: Callable[[], object]) -> int:
    """What runs without gradients."""
    with torch.no_grad(), measured() as ledger:
        run()
    return ledger.peak


def sampling_peak(policy: PipelinePolicy, *, size: Size, batch: int) -> int:
    """One forward without gradients."""
    x_BNC, conditioning = policy.noise(range(batch), size), policy.conditioning_on_meta(size, batch=batch)
    return _forward_peak(lambda: policy.velocity(x_BNC, torch.empty(batch, device=META), conditioning, size))


def decoding_peak(policy: PipelinePolicy, *, size: Size, batch: int) -> int:
    """The VAE's decoder, without tiling."""
    factor = policy.pipeline.vae_scale_factor
    shape = (batch, policy.latent_channels, size.height // factor, size.width // factor)
    codes = torch.empty(shape, device=META, dtype=policy.pipeline.vae.dtype)
    return _forward_peak(lambda: policy.decode_codes(codes))


def encoding_peak(policy: PipelinePolicy, *, size: Size) -> int:
    """One prompt through the largest encoder; for edits its source through the VAE, if that takes more."""
    peak = _forward_peak(policy.text_pass(size))
    if not policy.references:
        return peak
    pixels = torch.empty(1, 3, size.height, size.width, device=META, dtype=policy.pipeline.vae.dtype)
    return max(peak, _forward_peak(lambda: policy.encode_pixels(pixels)))


@cache
def judge_memory(
    config: str, *, dtype: torch.dtype, quantize: str, questions: int, tokens: int
) -> tuple[int, int, int]:
    """(parameters, bytes, peak) of a judge by its config in JSON; a run and its evaluation often name the same one.

    The peak is of `questions` of `tokens` tokens through the language model, the largest part of a forward.
    """
    judge: Any = model_on_meta(parse_json(config), dtype=dtype)
    quantize_model(judge, quantize, device=META)
    language, positions = judge.model.language_model, torch.zeros(3, questions, tokens, device=META, dtype=torch.long)
    embedded = torch.empty(questions, tokens, language.config.hidden_size, device=META, dtype=judge.dtype)
    peak = _forward_peak(lambda: language(inputs_embeds=embedded, position_ids=positions, use_cache=False))
    return parameter_count(judge), weight_bytes(judge), peak
