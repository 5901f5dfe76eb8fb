"""What several prompts begin with is computed once: prompts become a tree of prefixes, walked level by level.

The 6 questions about 4 panels share, besides the system prompt, the first image of (A,B), (A,C), (A,D); the criteria
about one pair share both images. A node of the tree is a run of tokens; it attends to the keys and values of the runs
above it, which were computed once, at positions (M-RoPE) that are those of the whole prompt. So every number is the
one that a plain forward computes, up to the order of its sums.

The score is read at a prompt's last token, so the last layer's MLP, whose output nobody else reads, sees only the end
of each prompt.

Legend: B rows of a batch, Q new tokens, T tokens before them, P prompts, H heads, D width.
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
"""A run is computed apart from what follows it only if that saves as many tokens: each level costs a pass over the
weights and its launches."""
LEAST_ROWS = 16
"""Rows that a product has at least. With fewer, kernels sum in another order, and a question's score would depend on
its company. Measured on one x86 thread with AVX2: from 16 rows on, a row's bits do not depend on the others. Kernels
for AVX-512 or a GPU do not promise that."""
RAGGED = 2
"""Runs of one batch are padded to its longest; one that is so many times shorter waits for the next batch."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A whole prompt, ready for the language model."""

    symbol_N: NDArray[np.int64]
    """Token ids; for image tokens −1 − (row of the image features)."""
    position_3N: Tensor
    """M-RoPE: temporal, height, width."""

    def __len__(self) -> int:
        return len(self.symbol_N)


@dataclass(slots=True)
class Node:
    """Tokens [start, end) that all prompts below have in common."""

    start: int
    end: int
    prompt: int
    """One of those prompts: where the tokens stand."""
    ends: list[int] = field(default_factory=list)
    """Prompts whose last token is this node's."""
    children: list[Node] = field(default_factory=list)

    def __len__(self) -> int:
        return self.end - self.start


def prefix_forest(symbols: Sequence[NDArray[np.int64]], *, worth: int = WORTH_SHARING) -> list[Node]:
    """The tree of the prompts' common prefixes; several if they have none that is worth it."""
    # Sorted, prompts of one prefix stand together, and of a group the first and the last agree least.
    order = sorted(range(len(symbols)), key=lambda prompt: symbols[prompt].tolist())
    return _grow(symbols, order, 0, worth)


def _grow(symbols: Sequence[NDArray[np.int64]], prompts: Sequence[int], start: int, worth: int) -> list[Node]:
    """Nodes from `start` on; the prompts are sorted and agree before it."""
    nodes: list[Node] = []
    for _, same_symbol in groupby(prompts, key=lambda prompt: symbols[prompt][start]):
        group = list(same_symbol)
        first, last = symbols[group[0]], symbols[group[-1]]
        shorter = min(len(first), len(last))
        differs = np.nonzero(first[:shorter] != last[:shorter])[0]
        end = int(differs[0]) if len(differs) else shorter
        ends = [prompt for prompt in group if len(symbols[prompt]) == end]
        longer = [prompt for prompt in group if len(symbols[prompt]) > end]
        children = _grow(symbols, longer, end, worth) if longer else []
        branches = len(children) + bool(ends)
        if not children or (branches - 1) * (end - start) >= worth:
            nodes.append(Node(start, end, group[0], ends, children))
            continue
        # It saves too little, so its tokens go in front of its children's.
        for child in children:
            child.start = start
        nodes += [Node(start, end, group[0], ends)] if ends else []
        nodes += children
    return nodes


def packed(items: Iterable[T], fits: Callable[[T, Sequence[T]], bool]) -> Iterator[list[T]]:
    """Items in order, in batches; a new one begins with every item that does not fit to those before."""
    batch: list[T] = []
    for item in items:
        if batch and not fits(item, batch):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def batches(nodes: Sequence[Node], *, tokens: int) -> Iterator[list[Node]]:
    """Nodes of like length, longest first, in batches of at most `tokens` tokens, padding included (or one node)."""

    def fits(node: Node, batch: Sequence[Node]) -> bool:
        longest = len(batch[0])
        alike = bool(node.children) == bool(batch[0].children) and RAGGED * len(node) > longest
        return alike and (len(batch) + 1) * longest <= tokens

    # Leaves apart: their keys and values need not be kept.
    return packed(sorted(nodes, key=lambda node: (not node.children, -len(node))), fits)


# --- walking the tree ------------------------------------------------------------------------------------------


class BranchCache:
    """Keys and values of the runs above a batch, as the attention layers of transformers ask for them.

    It gives each row the tokens of its parent and takes the row's own; `keep` says whether children will need them.
    """

    def __init__(self, above: BranchCache | None, rows: Sequence[int], *, keep: bool) -> None:
        self.above, self.keep = above, keep
        self.rows = torch.tensor(rows)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        nothing_BT = torch.empty(len(rows), 0, dtype=torch.bool)
        self.seen_BT: Tensor = nothing_BT if above is None else above.own_BT[self.rows]
        """Which of the tokens above are a row's, and not padding."""
        self.own_BT: Tensor = self.seen_BT
        """The same with the rows' own tokens: what children see."""

    def close(self, lengths: Sequence[int], like: Tensor) -> Tensor | None:
        """Adds tokens of these lengths, padded behind.

        Returns:
            Their mask (B or 1, 1, Q, T + Q) in the type of `like`, 0 or −∞ to be added to the scores; None if causal is
            enough.
        """
        queries = max(lengths)
        own_BQ = torch.arange(queries) < torch.tensor(lengths)[:, None]
        self.own_BT = torch.cat([self.seen_BT, own_BQ], dim=1)
        if self.above is None:
            return None  # a token never looks ahead, so padding behind needs no mask
        # Rows below parents of one length have one mask, which stays in the cache.
        seen_BT = self.seen_BT[:1] if (self.seen_BT == self.seen_BT[0]).all() else self.seen_BT
        causal_QQ = torch.ones(queries, queries, dtype=torch.bool).tril()
        above_BQT = seen_BT[:, None, :].expand(-1, queries, -1)
        sees_BQK = torch.cat([above_BQT, causal_QQ.expand(len(seen_BT), -1, -1)], dim=2)
        # Numbers, since every layer would make them of booleans anew, and eager attention adds what it is given.
        return like.new_zeros(sees_BQK.shape).masked_fill(~sees_BQK.to(like.device), -inf)[:, None]

    def update(self, key_BHQD: Tensor, value_BHQD: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of all tokens so far."""
        if self.above is not None:
            rows = self.rows.to(key_BHQD.device)
            key, value = self.above.layers[layer_idx]
            key_BHQD = torch.cat([key.index_select(0, rows), key_BHQD], dim=2)
            value_BHQD = torch.cat([value.index_select(0, rows), value_BHQD], dim=2)
        if self.keep:
            self.layers[layer_idx] = (key_BHQD, value_BHQD)
        return key_BHQD, value_BHQD

    # What transformers asks for, to build a causal mask.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen_BT.shape[1]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.seen_BT.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen_BT.shape[1] + query_length, 0


@dataclass(frozen=True, slots=True)
class SharedForward:
    """The language model of a Qwen-VL-family model over prefix trees.

    Equality with the plain forward is a test of each family in `FAMILIES`, no property of this code.
    """

    model: Any
    """`…ForConditionalGeneration`."""
    feature_KND: Tensor
    """Features of all images' tokens; row 0 is embedded, the others (DeepStack) are added after the first layers."""
    batch_tokens: int

    def last_hidden(self, prompts: Sequence[TokenRun]) -> Tensor:
        """(P, D), the last layer's state at every prompt's last token."""
        forest = prefix_forest([prompt.symbol_N for prompt in prompts])
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
        """`rows`: each node's parent among the rows of `above`."""
        parent = {id(node): row for node, row in zip(nodes, rows, strict=True)}
        for batch in batches(nodes, tokens=self.batch_tokens):
            cache = BranchCache(above, [parent[id(node)] for node in batch], keep=bool(batch[0].children))
            hidden_BQD = self._forward(prompts, batch, cache)
            for row, node in enumerate(batch):
                if node.ends:
                    hidden_PD[node.ends] = hidden_BQD[row, len(node) - 1]
            below = [(child, row) for row, node in enumerate(batch) for child in node.children]
            if below:
                self._walk(prompts, [child for child, _ in below], cache, [row for _, row in below], hidden_PD)

    def _forward(self, prompts: Sequence[TokenRun], batch: Sequence[Node], cache: BranchCache) -> Tensor:
        device, longest = self.feature_KND.device, max(map(len, batch))
        symbol_BQ = torch.zeros(len(batch), longest, dtype=torch.long)
        position_3BQ = torch.zeros(3, len(batch), longest, dtype=torch.long)
        for row, node in enumerate(batch):
            run, tokens = prompts[node.prompt], slice(node.start, node.end)
            symbol_BQ[row, : len(node)] = torch.from_numpy(run.symbol_N[tokens])
            position_3BQ[:, row, : len(node)] = run.position_3N[:, tokens]
        visual_BQ = (symbol_BQ < 0).to(device)
        embedded_BQD = self.model.get_input_embeddings()(symbol_BQ.clamp(min=0).to(device))
        feature_KND = self.feature_KND[:, (-1 - symbol_BQ[symbol_BQ < 0]).to(device)]
        inputs = {"inputs_embeds": embedded_BQD.masked_scatter(visual_BQ[..., None], feature_KND[0])}
        if len(feature_KND) > 1:  # Qwen3-VL's DeepStack
            inputs |= {"visual_pos_masks": visual_BQ, "deepstack_visual_embeds": list(feature_KND[1:])}
        mask = cache.close([len(node) for node in batch], like=embedded_BQD)
        language = self.model.model.language_model
        with nullcontext() if cache.keep else _mlp_at(language.layers[-1], ends_of(batch).to(device)):
            hidden_BQD: Tensor = language(
                position_ids=position_3BQ.to(device),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=False,  # transformers would wrap what it is given into a cache of its own
                **inputs,
            ).last_hidden_state
        return hidden_BQD


def ends_of(batch: Sequence[Node]) -> Tensor:
    """(2, M): row and position of each node's last token, and of some before it if these were too few rows."""
    length_B1 = torch.tensor([[len(node)] for node in batch])
    from_the_end_BQ = length_B1 - torch.arange(int(length_B1.max()))
    return ((from_the_end_BQ > 0) & (from_the_end_BQ <= ceil(LEAST_ROWS / len(batch)))).nonzero().T


@contextmanager
def _mlp_at(layer: Any, at_2M: Tensor) -> Iterator[None]:
    """Within the block a decoder layer's MLP sees these tokens alone and adds 0 to all others."""
    shape: list[torch.Size] = []

    def gather(_: Any, arguments: tuple[Tensor, ...]) -> Tensor:
        shape.append(arguments[0].shape)
        return arguments[0][tuple(at_2M)]

    def scatter(_: Any, __: Any, output_MD: Tensor) -> Tensor:
        output_BQD = output_MD.new_zeros(shape.pop())
        output_BQD[tuple(at_2M)] = output_MD
        return output_BQD

    # The norm before the MLP too: in all families it is that layer's step from the residual to the MLP.
    before, after = layer.post_attention_layernorm, layer.mlp
    with before.register_forward_pre_hook(gather), after.register_forward_hook(scatter):
        yield


FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""`model_type`s of which tests/judge/test_sharing.py proves that sharing changes nothing."""


def can_share(config: Any) -> bool:
    """Whether a model's prompts may share their prefixes: a proven family, without sliding windows.

    Its attention must take a mask of any shape, which the flash kernels do not.
    """
    text = config.get_text_config()
    full = all(kind == "full_attention" for kind in getattr(text, "layer_types", None) or [])
    return config.model_type in FAMILIES and full and text._attn_implementation in (None, "eager", "sdpa")
