"""Qwen-Image 2.1's transformer with one prefix for all images of a prompt.

Text and references are modulated at t = 0 and attend to no generated token. So their keys and values, the prefix,
depend neither on the step nor on the generated image: here a forward computes them at batch 1, with gradients, for all
of its rows. The layers are diffusers' own, and no value is read from the device.
"""

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21AttnProcessor,
    QwenImage21KVLayerCache,
    QwenImage21TransformerBlock,
)
from torch import Tensor

BLOCK_FORWARD = QwenImage21TransformerBlock.forward
"""diffusers' own, by a name of its own: `torch.compile` does not look into the class."""

KeysValues = tuple[Tensor, Tensor]
"""Keys and values (1, P, H, D) of a block's prefix."""


class PromptTokens(NamedTuple):
    """A prompt's text and references."""

    text: Tensor
    """Hidden states (1, L, D) of the text encoder, with slots for the images."""
    source: Tensor | None
    """Tokens (1, M, C) of all images."""
    images: Sequence[Sequence[int]]
    """First slot in the text, rows and columns of tokens per image; a slot holds 2×2 tokens."""


class Joint(NamedTuple):
    """Hidden states of the prefix (1, P, D), if it is not known yet, and of the images (B, N, D), if there are any."""

    prefix: Tensor | None
    target: Tensor | None


class Run(NamedTuple):
    """Consecutive tokens of the prefix: text, which attends causally, or one image, which attends to all of itself."""

    start: int
    end: int
    is_text: bool


def share_prefix(transformer: Any) -> None:
    """Make a `QwenImage21Transformer2DModel` also take `PromptTokens`; its own arguments keep their meaning."""
    transformer.set_attn_processor(QwenImage21AttnProcessor())  # the processor that reads `segments`
    transformer.forward = MethodType(_forward, transformer)
    for block in transformer.transformer_blocks:
        block.forward = MethodType(_block_forward, block)


def _forward(transformer: Any, *args: Any, prompt: PromptTokens | None = None, **kwargs: Any) -> Any:
    if prompt is None:
        return type(transformer).forward(transformer, *args, **kwargs)
    return _joint_forward(transformer, prompt, **kwargs)


def _joint_forward(
    transformer: Any,
    prompt: PromptTokens,
    *,
    hidden_states: Tensor | None = None,
    timestep: Tensor | None = None,
    grid: tuple[int, int] = (0, 0),
    prefix: Sequence[KeysValues] = (),
    return_dict: bool = False,
) -> tuple[Any, ...]:
    """Predict the velocity of a prompt's images.

    Args:
        hidden_states: tokens (B, N, C) of the images; None to compute the prefix alone.
        timestep: (B,) in [0, 1].
        grid: rows and columns of an image's tokens.
        prefix: keys and values per block, if they were computed before, with these weights.

    Returns:
        The velocity (B, N, C), or the prefix.
    """
    # 1. Hidden states.
    runs, positions = _lay_out(prompt, grid)
    joint = Joint(
        prefix=None if prefix else _prefix_states(transformer, prompt),
        target=None if hidden_states is None else transformer.img_in(hidden_states),
    )

    # 2. Modulation of each row, and in the last row that of the prefix, at t = 0.
    zero = prompt.text.new_zeros(1)
    timestep = zero if timestep is None else torch.cat([timestep.to(zero.dtype), zero])
    embedding = transformer.time_text_embed(timestep, prompt.text)
    modulation = transformer.modulation(embedding)
    # Complex rotations (S, D/2). diffusers reads them from tables, at positions copied to the device.
    rope = transformer.pos_embed
    rotations = []
    with positions.device:
        for axis_S, dim in zip(positions.unbind(-1), rope.axes_dim, strict=True):
            rotations.append(rope.rope_params(axis_S, dim, rope.theta))
    rotary = torch.cat(rotations, -1)

    # 3. Blocks.
    computed = []
    for number, block in enumerate(transformer.transformer_blocks):
        call = block
        if torch.is_grad_enabled() and transformer.gradient_checkpointing:
            call = partial(transformer._gradient_checkpointing_func, block)
        joint, keys_values = call(joint, modulation, rotary, runs, prefix[number] if prefix else None)
        if joint.target is None:
            computed.append(keys_values)
    if joint.target is None:
        return (tuple(computed),)

    # The last row of the embedding is that of the prefix, which has no velocity.
    return (transformer.proj_out(transformer.norm_out(joint.target, embedding[:-1])),)


def _block_forward(block: Any, hidden_states: Tensor | Joint, *args: Any, **kwargs: Any) -> Any:
    if isinstance(hidden_states, Joint):
        return _joint_block(block, hidden_states, *args)
    return BLOCK_FORWARD(block, hidden_states, *args, **kwargs)


def _joint_block(  # noqa: PLR0917 - gradient checkpointing passes no keywords
    block: Any, joint: Joint, modulation: Tensor, rotary: Tensor, runs: Sequence[Run], keys_values: KeysValues | None
) -> tuple[Joint, KeysValues]:
    """Compute a block for the prefix, then for the images, which attend to its keys and values.

    Both are one call of the block, and keys and values are among its results: gradient checkpointing computes them
    again, and FSDP2's hooks see them.
    """
    # The prefix, unless its keys and values are known.
    prefix, target = joint
    length = runs[-1].end
    cache = QwenImage21KVLayerCache()
    if prefix is not None:
        prefix = BLOCK_FORWARD(
            block,
            prefix,
            modulation[-1:],
            rotary[:length],
            layer_cache=cache,
            kv_cache_mode="extract",
            cache_write_slice=slice(None),
            segments=runs,
        )
        keys_values = cache.get()
    assert keys_values is not None, "a prefix is computed or known"

    # The images attend to one copy of the prefix, expanded without memory.
    if target is not None:
        cache.store(*(shared.expand(len(target), -1, -1, -1) for shared in keys_values))
        target = BLOCK_FORWARD(
            block, target, modulation[:-1], rotary[length:], layer_cache=cache, kv_cache_mode="cached"
        )
    return Joint(prefix, target), keys_values


def _prefix_states(transformer: Any, prompt: PromptTokens) -> Tensor:
    """Put the images' tokens into their slots in the text: (1, P, D)."""
    text = transformer.txt_in(prompt.text)
    if prompt.source is None:
        return text  # type: ignore[no-any-return]
    source = transformer.img_in(prompt.source)
    pieces = []
    read = 0
    offset = 0
    for first, rows, cols in prompt.images:
        pieces += [text[:, read:first], source[:, offset : offset + rows * cols]]
        read = first + rows * cols // 4
        offset += rows * cols
    return torch.cat([*pieces, text[:, read:]], 1)


def _lay_out(prompt: PromptTokens, grid: tuple[int, int]) -> tuple[list[Run], Tensor]:
    """Return the runs of the prefix, and frame, row and column (S, 3) of each of its tokens and the image's.

    Text advances all three. An image has the frame of the text before it, its rows and columns counted from its
    middle, and the text after it goes on by its longer side.
    """
    # Each image, the generated one last, and the text before it.
    device = prompt.text.device
    text_end = prompt.text.shape[1]
    runs: list[Run] = []
    positions = []
    start = frame = read = 0
    for first, rows, cols in (*prompt.images, (text_end, *grid)):
        count = first - read
        if count:
            runs.append(Run(start, start + count, is_text=True))
            positions.append(torch.arange(frame, frame + count, device=device)[:, None].expand(-1, 3))
        frame += count
        start += count
        runs.append(Run(start, start + rows * cols, is_text=False))
        frames = torch.tensor([frame], device=device)
        rows_from_middle = torch.arange(rows // 2 - rows, rows // 2, device=device)
        cols_from_middle = torch.arange(cols // 2 - cols, cols // 2, device=device)
        positions.append(torch.cartesian_prod(frames, rows_from_middle, cols_from_middle))
        frame += max(rows, cols)
        start += rows * cols
        # A slot of the text encoder covers 2 × 2 tokens of the image.
        read = first + rows * cols // 4
    return runs[:-1], torch.cat(positions)
