"""Batched window attention of the vision tower, where transformers makes one call per window of each image.

Qwen2.5-VL's tower attends within windows of 8×8 patches in most layers, and within whole images in the rest. Windows of
one length become a batch; a window's numbers do not depend on its batch.

Legend: S patches of all images, W windows of one length L, H heads, D width of a head.
"""

from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention, apply_rotary_pos_emb_vision

from pacorl.core.batches import grouped
from pacorl.core.devices import to_device


@lru_cache(maxsize=2)  # a forward has two layouts: windows, and whole images
def window_rows(bounds: Tensor) -> list[Tensor]:
    """Return the rows (W, L) of the windows of each length, read from the device once instead of three times per layer.

    The cache is keyed by the tensor itself, not by its values.
    """
    starts = grouped((end - start, start) for start, end in pairwise(bounds.tolist()))
    rows = []
    for length, first in starts.items():
        rows.append(to_device(torch.tensor(first)[:, None] + torch.arange(length), bounds.device))
    return rows


def batch_windows(model: nn.Module) -> None:
    """Batch windows of one length in the vision tower of a Qwen2.5-VL with SDPA."""
    for module in model.modules():
        if type(module) is not Qwen2_5_VLVisionAttention:
            continue
        attention: Any = module
        if attention.config._attn_implementation == "sdpa":
            attention.forward = partial(_attend, attention)


def _attend(
    attention: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> Tensor:
    """Replace `Qwen2_5_VLVisionAttention.forward`: (S, width) → (S, width)."""
    count = len(hidden_states)
    query_SHD, key_SHD, value_SHD = attention.qkv(hidden_states).view(count, 3, attention.num_heads, -1).unbind(1)
    query_SHD, key_SHD = apply_rotary_pos_emb_vision(query_SHD, key_SHD, *position_embeddings)
    attended_SHD = torch.empty_like(value_SHD)
    for row_WL in window_rows(cu_seqlens):
        query, key, value = (tensor[row_WL].transpose(1, 2) for tensor in (query_SHD, key_SHD, value_SHD))
        attended = F.scaled_dot_product_attention(query, key, value, scale=attention.scaling)
        attended_SHD[row_WL] = attended.transpose(1, 2)
    return attention.proj(attended_SHD.reshape(count, -1))  # type: ignore[no-any-return]
