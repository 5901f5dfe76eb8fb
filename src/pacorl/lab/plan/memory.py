"""How much memory a run takes, measured without taking it: its own code runs on meta tensors, and a ledger notes
every storage from birth to death.

What is measured is what an allocator hands out: weights, saved activations and passing buffers, checkpointing and all,
for any architecture and size. Not in it: kernels' scratch space, the allocator's rounding and fragments, and the CUDA
context (together about 1 GiB on a card).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pacorl.core.sampler import Sampler
from pacorl.core.sde import log_prob
from pacorl.grpo.rollout import transition_at
from pacorl.io.documents import parse_json
from pacorl.models.lora.adapters import adapter_off
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.quantize.linear import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.twins import META, model_on_meta
from pacorl.types import Size


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operation on the meta device makes of tensors of certain shapes."""

    likes: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    """Shape, strides and type of each result."""
    is_sequence: bool
    in_place: bool
    flops: float
    """Of products, convolutions and attention; all else is small beside them."""

    def repeated(self, args: tuple[Any, ...]) -> Any:
        """The results for other tensors of these shapes."""
        if self.in_place:
            return args[0]
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=META) for shape, stride, dtype in self.likes]
        return made if self.is_sequence else made[0]


class Operations:
    """Runs operations on meta tensors. One that was run on equal shapes is not worked out anew: in a transformer of
    equal blocks nearly all were, and torch takes up to a millisecond for each."""

    def __init__(self) -> None:
        self._known: dict[Any, Operation | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """The results of an operation, and its FLOPs."""
        inputs: list[Tensor] = []
        key = (func, _shapes(args, inputs), _shapes(tuple(kwargs.items()), inputs))
        if operation := self._known.get(key):
            return operation.repeated(args), operation.flops
        outputs = func(*args, **kwargs)
        formula = FLOPS.get(func._overloadpacket)
        flops = float(formula(*args, **kwargs, out_val=outputs)) if formula else 0.0
        self._known[key] = _repeatable(func, args, inputs, outputs, flops)
        return outputs, flops


OPERATIONS = Operations()
"""Of all ledgers: sampling and training, and one plan and the next, do much the same."""


def _shapes(nested: object, inputs: list[Tensor]) -> Any:
    """What of an argument decides the shape of a result; its tensors join `inputs`."""
    if isinstance(nested, Tensor):
        inputs.append(nested)
        return nested.shape, nested.stride(), nested.dtype, nested.is_meta
    if isinstance(nested, list | tuple):
        return tuple(_shapes(inner, inputs) for inner in nested)
    return nested, type(nested)  # 1, 1.0 and True are equal


def _repeatable(
    func: Any, args: tuple[Any, ...], inputs: Sequence[Tensor], outputs: Any, flops: float
) -> Operation | None:
    """The operation, unless a result is a view, nothing at all, or not on the meta device."""
    is_sequence = isinstance(outputs, list | tuple)
    results = list(outputs) if is_sequence else [outputs]
    if not results or not all(isinstance(result, Tensor) and result.is_meta for result in results):
        return None
    in_place = not is_sequence and bool(args) and outputs is args[0]
    storages = {id(tensor.untyped_storage()) for tensor in inputs}
    if not in_place and any(id(result.untyped_storage()) in storages for result in results):
        return None
    return Operation(tuple((r.shape, r.stride(), r.dtype) for r in results), is_sequence, in_place, flops)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    return float(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


FLOPS: Mapping[Any, Callable[..., float]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
"""torch's own formulas, and those of the attention that `fused_attention` takes."""


class MemoryLedger(TorchDispatchMode):
    """Within the block, the bytes of all storages that operations made and nobody has let go, and their FLOPs.

    Storages that came in from outside (weights, inputs) are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.flops = 0.0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor in tensors_in(args):
            self._note(tensor, counted=False)
        outputs, flops = OPERATIONS.run(func, args, kwargs or {})
        self.flops += flops
        for tensor in tensors_in(outputs):
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


def tensors_in(nested: object) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, which nest in lists and tuples alone."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for inner in nested:
            yield from tensors_in(inner)


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
    return _training(policy, sampler=sampler, batch=batch, with_base=with_base).peak


def _training(policy: PipelinePolicy, *, sampler: Sampler, batch: int, with_base: bool) -> MemoryLedger:
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
    return ledger


def _forward(run: Callable[[], object]) -> MemoryLedger:
    """What runs without gradients."""
    with torch.no_grad(), measured() as ledger:
        run()
    return ledger


def sampling_peak(policy: PipelinePolicy, *, size: Size, batch: int) -> int:
    """One forward without gradients, or two if the generator is guided."""
    return _sampling(policy, size=size, batch=batch).peak


def _sampling(policy: PipelinePolicy, *, size: Size, batch: int) -> MemoryLedger:
    x_BNC, conditioning = policy.noise(range(batch), size), policy.conditioning_on_meta(size, batch=batch)
    return _forward(lambda: policy.velocity(x_BNC, torch.empty(batch, device=META), conditioning, size))


def decoding_peak(policy: PipelinePolicy, *, size: Size, batch: int) -> int:
    """The VAE's decoder, without tiling."""
    return _decoding(policy, size=size, batch=batch).peak


def _decoding(policy: PipelinePolicy, *, size: Size, batch: int) -> MemoryLedger:
    factor = policy.pipeline.vae_scale_factor
    shape = (batch, policy.latent_channels, size.height // factor, size.width // factor)
    codes = torch.empty(shape, device=META, dtype=policy.pipeline.vae.dtype)
    return _forward(lambda: policy.decode_codes(codes))


def encoding_peak(policy: PipelinePolicy, *, size: Size, prompts: int) -> int:
    """Some prompts through the largest encoder; for edits a source through the VAE, if that takes more."""
    peak = _forward(policy.text_pass(size, prompts=prompts)).peak
    if not policy.references:
        return peak
    pixels = torch.empty(1, 3, size.height, size.width, device=META, dtype=policy.pipeline.vae.dtype)
    return max(peak, _forward(lambda: policy.encode_pixels(pixels)).peak)


def clip_peak(model: Any, *, images: int) -> int:
    """The vision tower of a CLIP over so many images."""
    side = model.config.vision_config.image_size
    pixels = torch.empty(images, 3, side, side, device=META, dtype=model.dtype)
    return _forward(lambda: model.vision_model(pixel_values=pixels)).peak


@dataclass(frozen=True, slots=True)
class JudgeCost:
    """What a judge takes."""

    parameters: int
    bytes: int
    """Of its weights that lie on the device."""
    streamed: int
    """Bytes of those that stay in main memory."""
    peak: int
    """Above the weights, of some questions through the language model, the largest part of a forward."""
    flops: float
    """Of these questions, each by itself, and of their images through the vision tower."""


@cache
def judge_cost(
    config: str, *, dtype: torch.dtype, quantize: str, stream: bool, questions: int, tokens: int, seen: int
) -> JudgeCost:
    """The cost of a judge by its config in JSON; a run and its evaluation often name the same one.

    Args:
        config: of the model.
        dtype: of its weights, before they are packed.
        quantize: how they are packed.
        stream: whether they stay in main memory.
        questions: asked together.
        tokens: of each.
        seen: those of them that are an image's.
    """
    judge: Any = model_on_meta(parse_json(config), dtype=dtype)
    tower, merged = judge.model.visual, judge.config.vision_config.spatial_merge_size**2
    # Meta tensors do not say where an image's windows lie; attention is a few percent of the tower's products.
    vision = 2 * parameter_count(tower) * merged * seen * questions
    quantize_model(judge, quantize, device=META, stream=stream)
    language, positions = judge.model.language_model, torch.zeros(3, questions, tokens, device=META, dtype=torch.long)
    embedded = torch.empty(questions, tokens, language.config.hidden_size, device=META, dtype=judge.dtype)
    forward = _forward(lambda: language(inputs_embeds=embedded, position_ids=positions, use_cache=False))
    streamed = streamed_bytes(judge)
    return JudgeCost(parameter_count(judge), weight_bytes(judge), streamed, forward.peak, forward.flops + vision)


# --- work, in FLOPs --------------------------------------------------------------------------------------------


def image_flops(policy: PipelinePolicy, *, sampler: Sampler, forwards: Mapping[str, float], passes: int) -> float:
    """FLOPs of a training image, from noise to its share of the update.

    Args:
        policy: on the meta device, with its adapter.
        sampler: of the run.
        forwards: `Work.forwards_per_image`.
        passes: forwards that one velocity takes, 2 of a guided generator.
    """
    forward = _sampling(policy, size=sampler.size, batch=1).flops / passes
    trained = _training(policy, sampler=sampler, batch=1, with_base=False).flops / passes
    decoding = _decoding(policy, size=sampler.size, batch=1).flops
    untrained = forwards["sampling"] + forwards["other_policies"]
    return untrained * forward + forwards["training"] * trained + decoding
