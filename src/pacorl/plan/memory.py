"""Peak memory and FLOPs of a run's passes: its own code runs on meta tensors, and a ledger counts every storage.

The peak includes saved activations and passing buffers, with or without gradient checkpointing. It excludes kernels'
scratch space, the allocator's rounding and fragments, and the CUDA context (together about 1 GiB on a card).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pacorl.core.sampler import Sampler
from pacorl.core.sde import log_prob
from pacorl.grpo.rollout import transition_at
from pacorl.io.processor import image_tokens
from pacorl.judge.judge import JudgeSettings
from pacorl.models.adapters import adapter_off
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan.generators import META, Inputs, model_on_meta
from pacorl.types import Size

aten = torch.ops.aten
QUESTION_TOKENS = 128
"""Tokens of a question's text: the template's 60 and a theme of a few sentences."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Result shapes and FLOPs of an operation for given argument shapes."""

    likes: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    """Shape, strides and type of each result."""
    is_sequence: bool
    in_place: bool
    flops: float
    """FLOPs of products, convolutions and attention; other operations take few."""

    def repeated(self, args: tuple[Any, ...]) -> Any:
        """Make the results for other tensors of these shapes."""
        if self.in_place:
            return args[0]
        results = []
        for shape, stride, dtype in self.likes:
            results.append(torch.empty_strided(shape, stride, dtype=dtype, device=META))

        if self.is_sequence:
            return results
        return results[0]


class Operations:
    """A cache of operations by argument shapes: torch takes up to a millisecond for each operation on meta tensors, and
    the blocks of a transformer repeat the same ones."""

    def __init__(self) -> None:
        self._cache: dict[Any, Operation | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """Run an operation, and return its results and FLOPs."""
        inputs: list[Tensor] = []
        key = (func, _shapes(args, inputs), _shapes(tuple(kwargs.items()), inputs))
        operation = self._cache.get(key)
        if operation:
            return operation.repeated(args), operation.flops
        # Unknown: run it on meta tensors, and keep it if it can be repeated.
        outputs = func(*args, **kwargs)
        formula = FLOPS.get(func._overloadpacket)
        flops = float(formula(*args, **kwargs, out_val=outputs)) if formula else 0.0
        self._cache[key] = _repeatable(func, args, inputs, outputs, flops)
        return outputs, flops


OPERATIONS = Operations()
"""Shared by all ledgers: sampling and training, and one plan and the next, run the same operations."""


def _shapes(nested: object, inputs: list[Tensor]) -> Any:
    """Reduce an argument to the shapes and values that decide the results; its tensors are appended to `inputs`."""
    if isinstance(nested, Tensor):
        inputs.append(nested)
        return nested.shape, nested.stride(), nested.dtype, nested.is_meta
    if isinstance(nested, list | tuple):
        return tuple(_shapes(inner, inputs) for inner in nested)
    return nested, type(nested)  # 1, 1.0 and True are equal


def _repeatable(
    func: Any, args: tuple[Any, ...], inputs: Sequence[Tensor], outputs: Any, flops: float
) -> Operation | None:
    """Describe an operation; None if a result is a view, not a tensor, or not on the meta device."""
    is_sequence = isinstance(outputs, list | tuple)
    results = list(outputs) if is_sequence else [outputs]
    if not results or not all(isinstance(result, Tensor) and result.is_meta for result in results):
        return None
    # An in-place result is its input; any other shared storage is a view, which cannot be repeated.
    in_place = not is_sequence and bool(args) and outputs is args[0]
    storages = {id(tensor.untyped_storage()) for tensor in inputs}
    if not in_place and any(id(result.untyped_storage()) in storages for result in results):
        return None
    return Operation(tuple((r.shape, r.stride(), r.dtype) for r in results), is_sequence, in_place, flops)


def _attention_flops(query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, *_: Any, **__: Any) -> float:
    """FLOPs of attention; several heads of the query may share a head of key and value, which torch counts from 2.13
    on."""
    widths = query_BHSD.shape[-1] + value_BHSD.shape[-1]
    return _scores(query_BHSD, key_BHSD) * 2.0 * widths


def _attention_backward_flops(
    _: Tensor, query_BHSD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor, *__: Any, **___: Any
) -> float:
    """FLOPs of attention's gradients: the scores once more, and two products each for query, key and value."""
    widths = 3 * query_BHSD.shape[-1] + 2 * value_BHSD.shape[-1]
    return _scores(query_BHSD, key_BHSD) * 2.0 * widths


def _scores(query_BHSD: Tensor, key_BHSD: Tensor) -> int:
    return query_BHSD.shape[:-1].numel() * key_BHSD.shape[-2]


ATTENTION = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)
ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
)
FLOPS: Mapping[Any, Callable[..., float]] = {
    **flop_registry,
    **dict.fromkeys(ATTENTION, _attention_flops),
    **dict.fromkeys(ATTENTION_BACKWARD, _attention_backward_flops),
}
"""torch's formulas, and those of the attention in `fused_attention`."""


class MemoryLedger(TorchDispatchMode):
    """Count the bytes of the storages that operations allocate in the block, and their FLOPs and traffic.

    Weights and inputs, which exist before the block, are not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.flops = 0.0
        self.moved = 0.0
        """Bytes that operations read and write."""
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = list(tensors_in(args))
        for tensor in inputs:
            self._note(tensor, counted=False)
        outputs, flops = OPERATIONS.run(func, args, kwargs or {})
        results = list(tensors_in(outputs))
        for tensor in results:
            self._note(tensor, counted=True)
        self.flops += flops
        if launches(func):
            self.moved += traffic([*inputs, *results])
        return outputs

    def _note(self, tensor: Tensor, *, counted: bool) -> None:
        # A storage's Python object lives as long as the storage, so that its id identifies it and its weak reference
        # reports its end.
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        # Inputs are known from now on, and count nothing.
        size = storage.nbytes() if counted else 0

        def freed(_: object) -> None:
            self.live -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


WITHOUT_KERNEL = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.set_.source_Storage, aten.lift_fresh.default,
}  # fmt: skip


@cache
def launches(func: Any) -> bool:
    """Return whether an operation launches a kernel, rather than allocating or viewing a tensor."""
    returns = func._schema.returns
    views = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
    return func not in WITHOUT_KERNEL and not any(views)


def traffic(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of an operation's arguments and results, an expanded tensor's once."""
    sizes = {id(tensor): min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors}
    return sum(sizes.values())


def tensors_in(nested: object) -> Iterator[Tensor]:
    """List the tensors among an operation's arguments or results, which nest in lists and tuples only."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for inner in nested:
            yield from tensors_in(inner)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Route the attention of meta tensors through a fused kernel, as that of real tensors.

    torch's default for meta tensors keeps every attention matrix: 8 heads of 4,096 tokens in fp32 take 1,568 MiB,
    forward and backward, instead of 40.
    """
    # The function by its module, where diffusers looks it up at every call.
    real = F.scaled_dot_product_attention
    name = "scaled_dot_product_attention"

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        if query.device != META:
            return real(query, key, value, attn_mask, dropout_p, **options)
        # Only the CPU's fused kernel accepts meta tensors on a machine without CUDA; it saves the same tensors for its
        # backward.
        fused: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            key,
            value,
            dropout_p,
            options.get("is_causal", False),
            attn_mask=attn_mask,
            scale=options.get("scale"),
        )[0]
        return fused

    # Restored even after an error: other code of the process uses the function.
    setattr(F, name, attention)
    try:
        yield
    finally:
        setattr(F, name, real)


@contextmanager
def measured() -> Iterator[MemoryLedger]:
    """Measure the block's operations on meta tensors."""
    with fused_attention(), MemoryLedger() as ledger:
        yield ledger


def forward_pass(run: Callable[[], object]) -> MemoryLedger:
    """Measure a function without gradients."""
    with torch.no_grad(), measured() as ledger:
        run()
    return ledger


# --- passes of a run; peaks are bytes above the resident weights -------------------------------------------------


def training_pass(inputs: Inputs, *, sampler: Sampler, batch: int, with_base: bool) -> MemoryLedger:
    """Measure one trained step of one micro-batch, forward and backward, without its gradients.

    `with_base` adds the base's forward that a KL term needs.
    """
    policy = inputs.policy
    size = sampler.size
    conditioning = inputs.conditioning(size, batch=batch)
    sigmas = policy.sigmas(sampler.steps, size)
    before = policy.noise(range(batch), size)
    after = policy.noise(range(batch), size)
    sigma_B = torch.empty(batch, device=META)
    # Gradients are allocated outside the ledger: the adapter's rows of the plan count them already.
    for parameter in policy.transformer.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    policy.transformer.train()

    # Forward and backward, as the trainer makes them.
    with measured() as ledger:
        velocity = policy.velocity(before, sigma_B, conditioning, size)
        loss = log_prob(after, transition_at(sampler, sigmas, 0, before, velocity)).mean()
        if with_base:
            with torch.no_grad(), adapter_off(policy.transformer):
                base = policy.velocity(before, sigma_B, conditioning, size)
            loss = loss + (velocity - base).square().mean()
        torch.autograd.backward(loss)
    return ledger


def sampling_pass(inputs: Inputs, *, size: Size, batch: int) -> MemoryLedger:
    """Measure one forward without gradients, or two if the generator is guided, with the prefix that steps share."""
    policy = inputs.policy
    x_BNC = policy.noise(range(batch), size)
    conditioning = inputs.conditioning(size, batch=batch)
    sigma_B = torch.empty(batch, device=META)
    return forward_pass(lambda: policy.velocity(x_BNC, sigma_B, policy.with_prefix(conditioning, size), size))


def decoding_pass(inputs: Inputs, *, size: Size, batch: int) -> MemoryLedger:
    """Measure the VAE's decoder, without tiling."""
    policy = inputs.policy
    factor = policy.pipeline.vae_scale_factor
    shape = (batch, policy.latent_channels, size.height // factor, size.width // factor)
    codes = torch.empty(shape, device=META, dtype=policy.pipeline.vae.dtype)
    return forward_pass(lambda: policy.decode_codes(codes))


def encoding_pass(inputs: Inputs, *, size: Size, prompts: int) -> MemoryLedger:
    """Measure some prompts in the largest encoder, or for edits a source in the VAE's if that has a higher peak."""
    policy = inputs.policy
    text = forward_pass(inputs.text_pass(size, prompts=prompts))
    if not policy.max_sources:
        return text
    return max(text, image_encoding_pass(inputs, size=size), key=attrgetter("peak"))


def image_encoding_pass(inputs: Inputs, *, size: Size) -> MemoryLedger:
    """Measure one image in the VAE's encoder."""
    policy = inputs.policy
    pixels = torch.empty(1, 3, size.height, size.width, device=META, dtype=policy.pipeline.vae.dtype)
    return forward_pass(lambda: policy.encode_pixels(pixels))


def clip_pass(model: Any, *, images: int) -> MemoryLedger:
    """Measure the vision tower of a CLIP."""
    side = model.config.vision_config.image_size
    pixels = torch.empty(images, 3, side, side, device=META, dtype=model.dtype)
    return forward_pass(lambda: model.vision_model(pixel_values=pixels))


@dataclass(frozen=True, slots=True)
class JudgeCost:
    """Memory and FLOPs of a judge."""

    parameters: int
    bytes: int
    """Weights on the device."""
    streamed: int
    """Bytes of the weights that stay in main memory."""
    peak: int
    """Bytes above the weights that the questions take in the language model, the largest part of a forward."""
    flops: float
    """FLOPs of the questions, without shared prefixes, and of their images in the vision tower."""
    moved: float
    """Bytes that the language model reads and writes."""


def pair_tokens(panel: Size, configs: Parts) -> int:
    """Count the tokens of a question about two panels."""
    return 2 * image_tokens(panel, configs["processor"]) + QUESTION_TOKENS


def judge_cost(
    configs: Parts, *, dtype: str, quantize: str, questions: int, panel: Size, stream: bool = False
) -> JudgeCost:
    """Measure a judge's batch of questions about two panels each.

    Args:
        configs: the judge's `model` and `processor`.
        dtype: of the weights, before they are packed.
        quantize: form of the packed weights.
        questions: number of questions.
        panel: size of the panels.
        stream: whether the weights stay in main memory.
    """
    judge: Any = model_on_meta(configs["model"], dtype=getattr(torch, dtype))
    tokens = pair_tokens(panel, configs)

    # Windows of the vision tower depend on values, which meta tensors lack: its products are counted by its weights,
    # and attention is a few percent of them.
    merged = judge.config.vision_config.spatial_merge_size**2
    vision_flops = 2 * parameter_count(judge.model.visual) * merged * (tokens - QUESTION_TOKENS) * questions

    # The language model, whose weights may be packed or streamed.
    quantize_model(judge, quantize, device=META, stream=stream)
    language = judge.model.language_model
    positions = torch.zeros(3, questions, tokens, device=META, dtype=torch.long)
    embedded = torch.empty(questions, tokens, language.config.hidden_size, device=META, dtype=judge.dtype)
    forward = forward_pass(lambda: language(inputs_embeds=embedded, position_ids=positions, use_cache=False))
    return JudgeCost(
        parameter_count(judge),
        weight_bytes(judge),
        streamed_bytes(judge),
        forward.peak,
        forward.flops + vision_flops,
        forward.moved,
    )


def judge_batch(options: JudgeSettings, configs: Parts, *, panel: Size) -> tuple[JudgeCost, int]:
    """Measure the batch of questions that a judge of this process takes at a time, and count them."""
    questions = max(1, options.batch_tokens // pair_tokens(panel, configs))
    cost = judge_cost(
        configs,
        dtype=options.dtype,
        quantize=options.quantize,
        stream=options.stream,
        questions=questions,
        panel=panel,
    )
    return cost, questions
