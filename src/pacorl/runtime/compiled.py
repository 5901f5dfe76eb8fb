"""Compilation: a transformer's repeated blocks each by itself, so that a kind compiles once, and the VAE's decoder."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

GRAPHS = 64
"""Largest number of graphs of one block: with and without gradients, at each size and number of tokens.
Beyond it torch runs uncompiled, and training would not replay sampling."""


def compile_blocks(
    transformer: nn.Module,
    *,
    packed: bool = False,
    recompute: bool = False,
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Compile the repeated blocks in place, by a backend of torch. Names and weights do not change.

    Args:
        packed: Whether its weights are packed when it runs (`memory`).
        recompute: Whether a block's backward computes again what it needs of the forward, in one graph. Checkpoints
            around the blocks would compute their last products too: 243 TFLOP in place of 213 for four images of FLUX.
    """
    torch._functorch.config.activation_memory_budget = 0.0 if recompute else 1.0
    if packed:
        # Else the backward keeps the unpacked weights, all blocks in bf16 once more, instead of unpacking again.
        torch._functorch.config.ban_recompute_materialized_backward = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    # The blocks of one kind share a graph, whose guards hold for each of them.
    for name, blocks in transformer.named_children():
        if isinstance(blocks, nn.ModuleList) and name.endswith("blocks"):
            for block in blocks:
                # A size with symbols in it compiles for minutes, and there are few sizes.
                block.compile(dynamic=False, backend=backend)


def compile_decoder(vae: nn.Module) -> None:
    """Compile the decoder of a VAE of single images in place, for each size and batch.

    Uncompiled, torch's group norms on CUDA undo the channels-last layout that its convolutions need.
    """
    from diffusers.models.autoencoders.vae import Decoder

    # Others, such as Qwen-Image's, keep features of earlier frames in lists.
    decoder = getattr(vae, "decoder", None)
    if isinstance(decoder, Decoder):
        decoder.compile(dynamic=False)
