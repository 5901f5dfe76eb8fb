"""Prefix sharing: common prefixes of prompts are computed once, in a tree, level by level.

The 6 questions about 4 panels share, besides the system prompt, the first image of (A,B), (A,C), (A,D); the criteria
about one pair share both images. A node of the tree is a run of tokens, at the positions (M-RoPE) of the whole prompt.
What it takes from the runs above has two forms. An attention layer sees their cached keys and values through a mask. A
recurrent layer (Gated DeltaNet, three of four in Qwen3.5) goes on from a copy of the state in which they left it. So
every number equals a plain forward's, up to the order of its sums.

The score is read at a prompt's last token, so the last layer's MLP runs only at the end of each prompt.

Legend: B rows of a batch, Q new tokens, T tokens before them, P prompts, H heads, D width, C channels of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil, inf
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

WORTH_SHARING = 64
"""Tokens that a node must save to be computed separately: each level costs a pass over the weights and its launches."""
LEAST_ROWS = 16
"""Minimum number of rows of a matrix product. With fewer, kernels sum in another order, and a score would depend on the
rest of its batch. Measured on one x86 thread with AVX2: from 16 rows on, a row's bits are independent of the batch.
Kernels for AVX-512 or a GPU do not promise that."""
RAGGED = 2
"""Maximum ratio of the lengths in a batch, which is padded to its longest run."""
STATES = 16
"""Rows of a batch with recurrent states, which take 48 MiB each in Qwen3.5-9B's shape."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A whole prompt, ready for the language model."""

    symbol_N: NDArray[np.int64]
    """Token ids; for image tokens −1 − (row of the image features)."""
    position_3N: Tensor
    """M-RoPE: temporal, height, width."""


@dataclass(slots=True)
class Node:
    """Tokens [start, end) that all prompts below have in common."""

    start: int
    end: int
    prompt: int
    """Index of a prompt with these tokens."""
    ends: list[int] = field(default_factory=list)
    """Prompts that end with this node."""
    children: list[Node] = field(default_factory=list)

    def __len__(self) -> int:
        return self.end - self.start


def prefix_forest(symbols: Sequence[NDArray[np.int64]]) -> list[Node]:
    """Build the trees of the prompts' common prefixes; roots are prompts without a common prefix worth sharing."""
    # Sorting groups prompts by prefix; within a group, the first and the last agree least.
    order = sorted(range(len(symbols)), key=lambda prompt: symbols[prompt].tolist())
    return _grow(symbols, order, 0)


def _grow(symbols: Sequence[NDArray[np.int64]], prompts: Sequence[int], start: int) -> list[Node]:
    """Nodes from `start` on; the prompts are sorted and agree before it."""
    nodes: list[Node] = []
    for _, same_symbol in groupby(prompts, key=lambda prompt: symbols[prompt][start]):
        # The common run of this group ends where its first and last prompt differ.
        group = list(same_symbol)
        first = symbols[group[0]]
        last = symbols[group[-1]]
        shorter = min(len(first), len(last))
        differs = np.nonzero(first[:shorter] != last[:shorter])[0]
        end = int(differs[0]) if len(differs) else shorter

        # Prompts either end here or continue in children.
        ends: list[int] = []
        longer: list[int] = []
        for prompt in group:
            part = ends if len(symbols[prompt]) == end else longer
            part.append(prompt)
        children = _grow(symbols, longer, end) if longer else []
        branches = len(children) + bool(ends)
        if not children or (branches - 1) * (end - start) >= WORTH_SHARING:
            nodes.append(Node(start, end, group[0], ends, children))
            continue

        # It saves too little, so its tokens are prepended to its children's.
        for child in children:
            child.start = start
        if ends:
            nodes.append(Node(start, end, group[0], ends))
        nodes += children
    return nodes


def packed(items: Iterable[T], fits: Callable[[T, Sequence[T]], bool]) -> Iterator[list[T]]:
    """Split items, in order, into batches; an item beyond the current batch's limit starts a new batch."""
    batch: list[T] = []
    for item in items:
        if batch and not fits(item, batch):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def batches(nodes: Sequence[Node], *, tokens: int, recurrent: bool = False) -> Iterator[list[Node]]:
    """Batch nodes of similar length, longest first, at most `tokens` tokens each, padding included (or one node).

    With `recurrent`, nodes with children are batched `STATES` at a time, and with equal length only: padding would
    change the state that their children go on from.
    """

    def fits(node: Node, batch: Sequence[Node]) -> bool:
        longest = len(batch[0])
        if recurrent and batch[0].children and (len(node) < longest or len(batch) == STATES):
            return False
        alike = bool(node.children) == bool(batch[0].children) and RAGGED * len(node) > longest
        return alike and (len(batch) + 1) * longest <= tokens

    # Leaves apart: their keys and values need not be kept.
    return packed(sorted(nodes, key=lambda node: (not node.children, -len(node))), fits)


class BranchCache:
    """Keys, values and states of the runs above a batch, with the interface of transformers' caches.

    Each row goes on from its parent: it sees the parent's keys and values, or starts from its state. `keep` stores its
    own keys, values and states for children.
    """

    def __init__(self, above: BranchCache | None, rows: Sequence[int], *, keep: bool) -> None:
        self.above = above
        self.keep = keep
        self.rows = torch.tensor(rows)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of attention layers."""
        self.inputs: dict[int, Tensor] = {}
        """(B, C, last tokens): inputs that the convolutions of recurrent layers still reach."""
        self.states: dict[int, Tensor] = {}
        """States of recurrent layers, the rows first."""
        empty_BT = torch.empty(len(rows), 0, dtype=torch.bool)
        self.seen_BT: Tensor = empty_BT if above is None else above.own_BT[self.rows]
        """Mask of a row's tokens above; False for padding."""
        self.own_BT: Tensor = self.seen_BT
        """The same mask with the rows' own tokens, as children see it."""

    def close(self, batch: Sequence[Node], like: Tensor) -> Tensor | None:
        """Add the tokens of the batch's nodes, padded on the right.

        Returns:
            Their mask (B or 1, 1, Q, T + Q) in the type of `like`, 0 or −∞ to be added to the scores; None if causal is
            enough.
        """
        queries = max(map(len, batch))
        own_BQ = torch.arange(queries) < torch.tensor([[len(node)] for node in batch])
        self.own_BT = torch.cat([self.seen_BT, own_BQ], dim=1)
        if self.above is None:
            return None  # causal attention ignores padding on the right

        # Rows below parents of one length share one mask, which fits the CPU's cache.
        seen_BT = self.seen_BT[:1] if (self.seen_BT == self.seen_BT[0]).all() else self.seen_BT
        causal_QQ = torch.ones(queries, queries, dtype=torch.bool).tril()
        above_BQT = seen_BT[:, None, :].expand(-1, queries, -1)
        sees_BQK = torch.cat([above_BQT, causal_QQ.expand(len(seen_BT), -1, -1)], dim=2)
        # Floats, since every layer would convert booleans again, and eager attention adds its mask.
        return like.new_zeros(sees_BQK.shape).masked_fill(~sees_BQK.to(like.device), -inf)[:, None]

    def update(self, key_BHQD: Tensor, value_BHQD: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values, and return all so far."""
        if self.above is not None:
            rows = self.rows.to(key_BHQD.device)
            key, value = self.above.layers[layer_idx]
            key_BHQD = torch.cat([key.index_select(0, rows), key_BHQD], dim=2)
            value_BHQD = torch.cat([value.index_select(0, rows), value_BHQD], dim=2)
        if self.keep:
            self.layers[layer_idx] = (key_BHQD, value_BHQD)
        return key_BHQD, value_BHQD

    # Recurrent layers.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return no state, which a layer would overwrite in place; `update_conv_state` prepends the parent's."""

    def update_conv_state(self, input_BCQ: Tensor, layer_idx: int, *, conv_kernel_size: int, **_: Any) -> Tensor:
        """Prepend the parents' last inputs of a layer's convolution."""
        if self.above is not None:
            above = self.above.inputs[layer_idx]
            input_BCQ = torch.cat([above.index_select(0, self.rows.to(above.device)), input_BCQ], dim=2)
        if self.keep:
            self.inputs[layer_idx] = input_BCQ[..., 1 - conv_kernel_size :].clone()
        return input_BCQ

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Copy the parents' states of a layer."""
        if self.above is None:
            return None
        state = self.above.states[layer_idx]
        return state.index_select(0, self.rows.to(state.device))

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> None:
        """Store a layer's states."""
        if self.keep:
            self.states[layer_idx] = state

    # transformers builds a causal mask from these.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen_BT.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.seen_BT.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen_BT.shape[1] + query_length, 0


@dataclass(frozen=True, slots=True)
class SharedForward:
    """Forward of a Qwen-VL-family language model over prefix trees.

    Equality with the plain forward is tested for each family in `FAMILIES`; this code does not guarantee it.
    """

    model: Any
    """`…ForConditionalGeneration`."""
    feature_KND: Tensor
    """Features of all images' tokens; row 0 is embedded, further rows (DeepStack) are added after the first layers."""
    batch_tokens: int

    def answers(self, prompts: Sequence[TokenRun], forest: Sequence[Node]) -> Tensor:
        """Compute the last layer's state (P, D) at the end of each prompt; a forest's nodes are the prompts' tokens."""
        hidden_PD = self.feature_KND.new_empty(len(prompts), self.feature_KND.shape[-1])
        self._walk(prompts, forest, None, [0] * len(forest), hidden_PD)
        return hidden_PD

    def _walk(
        self,
        prompts: Sequence[TokenRun],
        nodes: Sequence[Node],
        above: BranchCache | None,
        rows: Sequence[int],
        hidden_PD: Tensor,
    ) -> None:
        """Compute nodes whose parents are the `rows` of `above`, then their children."""
        # Batches reorder the nodes.
        parent = {id(node): row for node, row in zip(nodes, rows, strict=True)}
        recurrent = RECURRENT in layer_kinds(self.model.config)
        for batch in batches(nodes, tokens=self.batch_tokens, recurrent=recurrent):
            cache = BranchCache(above, [parent[id(node)] for node in batch], keep=bool(batch[0].children))
            hidden_BQD = self._forward(prompts, batch, cache)
            for row, node in enumerate(batch):
                if node.ends:
                    hidden_PD[node.ends] = hidden_BQD[row, len(node) - 1]

            # Depth first: the batch's cache is freed before the next batch.
            children: list[Node] = []
            parent_rows: list[int] = []
            for row, node in enumerate(batch):
                children += node.children
                parent_rows += [row] * len(node.children)
            if children:
                self._walk(prompts, children, cache, parent_rows, hidden_PD)

    def _forward(self, prompts: Sequence[TokenRun], batch: Sequence[Node], cache: BranchCache) -> Tensor:
        # Symbols and positions, padded on the right.
        device = self.feature_KND.device
        longest = max(map(len, batch))
        symbol_BQ = torch.zeros(len(batch), longest, dtype=torch.long)
        position_3BQ = torch.zeros(3, len(batch), longest, dtype=torch.long)
        for row, node in enumerate(batch):
            run = prompts[node.prompt]
            tokens = slice(node.start, node.end)
            symbol_BQ[row, : len(node)] = torch.from_numpy(run.symbol_N[tokens])
            position_3BQ[:, row, : len(node)] = run.position_3N[:, tokens]

        # Embeddings, with image features at negative symbols.
        visual_BQ = (symbol_BQ < 0).to(device)
        embedded_BQD = self.model.get_input_embeddings()(symbol_BQ.clamp(min=0).to(device))
        feature_KND = self.feature_KND[:, (-1 - symbol_BQ[symbol_BQ < 0]).to(device)]
        inputs = {"inputs_embeds": embedded_BQD.masked_scatter(visual_BQ[..., None], feature_KND[0])}
        if len(feature_KND) > 1:  # Qwen3-VL's DeepStack
            inputs |= {"visual_pos_masks": visual_BQ, "deepstack_visual_embeds": list(feature_KND[1:])}

        mask = cache.close(batch, like=embedded_BQD)
        language = self.model.model.language_model
        with nullcontext() if cache.keep else _mlp_at_ends(language.layers[-1], batch, device):
            hidden_BQD: Tensor = language(
                position_ids=position_3BQ.to(device),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=False,  # transformers would wrap ours into its own cache
                **inputs,
            ).last_hidden_state
        return hidden_BQD


@contextmanager
def _mlp_at_ends(layer: Any, batch: Sequence[Node], device: torch.device) -> Iterator[None]:
    """Restrict a decoder layer's MLP to the end of each node; it adds 0 elsewhere."""
    # Row and position of each node's last token, and of enough tokens before it for `LEAST_ROWS`.
    length_B1 = torch.tensor([[len(node)] for node in batch])
    from_the_end_BQ = length_B1 - torch.arange(int(length_B1.max()))
    is_end_BQ = (from_the_end_BQ > 0) & (from_the_end_BQ <= ceil(LEAST_ROWS / len(batch)))
    at_2M = is_end_BQ.nonzero().T.to(device)
    shape: list[torch.Size] = []

    def gather(_: Any, arguments: tuple[Tensor, ...]) -> Tensor:
        shape.append(arguments[0].shape)
        return arguments[0][tuple(at_2M)]

    def scatter(_: Any, __: Any, output_MD: Tensor) -> Tensor:
        output_BQD = output_MD.new_zeros(shape.pop())
        output_BQD[tuple(at_2M)] = output_MD
        return output_BQD

    # The norm before the MLP too: in all families it reads the residual and feeds only the MLP.
    norm = layer.post_attention_layernorm
    with norm.register_forward_pre_hook(gather), layer.mlp.register_forward_hook(scatter):
        yield


FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""`model_type`s for which tests/judge/test_local.py shows equality with the plain forward."""
RECURRENT = "linear_attention"
"""Name in `layer_types` of a layer with a state instead of keys and values."""


def layer_kinds(config: Any) -> set[str]:
    """Return the kinds of a language model's layers, of which older families name none: all attend to everything."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ())


def can_share(config: Any) -> bool:
    """Return whether a model's prompts may share prefixes: a tested family, without sliding windows.

    Its attention must accept a mask of any shape, unlike the flash kernels.
    """
    unlimited = layer_kinds(config) <= {"full_attention", RECURRENT}
    attention = config.get_text_config()._attn_implementation
    return config.model_type in FAMILIES and unlimited and attention in (None, "eager", "sdpa")
