"""Set judge: all pairs of a set in one forward, which reads the question and every panel once.

    LocalJudge.from_pretrained("tiny", set_judge="runs/set_tiny/adapter")

The pair judge reads two images per question: 12 for the 6 pairs of a 2×2 set. A set judge reads the question, then the
panels, and for each pair a query, the end of the turn, whose last position has the logits of Yes and No. A query sees
the question, its own two panels and itself. So each pair has the answer of a plain forward over the whole set under
that mask. `pacorl train-reward` distils it from a pair judge (docs/reward.md), of whose vision tower it takes the
features.

Legend: N tokens of a set with its queries, Q tokens of all queries, P panels, R pairs of all sets, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacorl.io.documents import blamed_on, read_object, typed, write_json
from pacorl.io.hub import local_file
from pacorl.judge.pairwise import Pair
from pacorl.judge.prompting import ChatPrompt, Prompting
from pacorl.judge.sharing import RECURRENT, Node, SharedForward, TokenRun, can_share, layer_kinds

RECORD = "set_judge.json"
"""File of a set judge's folder: what it was distilled from, and how well it agrees."""
LEAST_CORRELATION = 0.95
"""Correlation of panel advantages with the pair judge's below which a set judge is not to be trusted. The pair judge
reaches 0.96 to 0.99 with itself if the two images of each question are exchanged."""


def pairs_of(panels: int) -> list[Pair]:
    """List the pairs in the order of a set's queries."""
    return list(combinations(range(panels), 2))


def check_can_read_sets(config: Any) -> None:
    """Raise ValueError unless a model's attention takes the masks of queries."""
    if not can_share(config) or RECURRENT in layer_kinds(config):
        raise ValueError(
            f"a {config.model_type} cannot be a set judge: a query sees two panels by a mask, which recurrent layers, "
            "sliding windows and flash kernels do not take; leave judge.set_judge out"
        )


def panel_spans(run: TokenRun) -> list[tuple[int, int]]:
    """Find the tokens [start, end) of each image of a prompt, its two marks included."""
    is_image_N = np.concatenate([[False], run.symbol_N < 0, [False]])
    starts = np.nonzero(is_image_N[1:] & ~is_image_N[:-1])[0]
    ends = np.nonzero(is_image_N[:-1] & ~is_image_N[1:])[0]
    return [(int(start) - 1, int(end) + 1) for start, end in zip(starts, ends, strict=True)]


def with_queries(run: TokenRun) -> tuple[TokenRun, Tensor]:
    """Repeat the end of a set's prompt, after its last panel, once per pair.

    Returns:
        The tokens with all queries, and their mask (Q, N): which tokens each token of a query sees.
    """
    spans = panel_spans(run)
    end = spans[-1][1]
    length = len(run) - end
    pairs = pairs_of(len(spans))
    symbol_N = np.concatenate([run.symbol_N[:end], np.tile(run.symbol_N[end:], len(pairs))])
    position_3N = torch.cat([run.position_3N[:, :end], run.position_3N[:, end:].repeat(1, len(pairs))], dim=1)

    # The question, the two panels, and the query itself.
    sees_QN = torch.zeros(len(pairs) * length, len(symbol_N), dtype=torch.bool)
    sees_QN[:, : spans[0][0]] = True
    for number, pair in enumerate(pairs):
        rows = slice(number * length, (number + 1) * length)
        for panel in pair:
            sees_QN[rows, slice(*spans[panel])] = True
        sees_QN[rows, end + rows.start : end + rows.stop] = torch.ones(length, length, dtype=torch.bool).tril()
    return TokenRun(symbol_N, position_3N), sees_QN


def set_forest(runs: Sequence[TokenRun]) -> tuple[list[TokenRun], list[Node]]:
    """Build the trees of sets: a question, below it the panels of each set about it, below them a set's queries."""
    roots: dict[bytes, Node] = {}
    with_query: list[TokenRun] = []
    pair = 0
    for number, run in enumerate(runs):
        # Never merged into one node, however short: the mask of a query needs the tokens it selects from above it.
        spans = panel_spans(run)
        start, end = spans[0][0], spans[-1][1]
        whole, sees_QN = with_queries(run)
        with_query.append(whole)
        ends = [pair + query for query in range(len(pairs_of(len(spans))))]
        pair += len(ends)
        queries = Node(end, len(whole), number, ends=ends, sees_QN=sees_QN)
        question = roots.setdefault(run.symbol_N[:start].tobytes(), Node(0, start, number))
        question.children.append(Node(start, end, number, children=[queries]))
    return with_query, list(roots.values())


def set_hidden(
    model: Any, prompting: Prompting, sets: Sequence[ChatPrompt], *, batch_tokens: int, vision_tokens: int
) -> Tensor:
    """Compute the last layer's state (R, D) at the end of each pair's query, set by set in the order of `pairs_of`.

    Args:
        model: The set judge; its language model may be in training.
        prompting: Conversion of texts and panels, by the vision tower of the pair judge.
        sets: Question and panels of each set (`Prompting.set_prompts`).
        batch_tokens: Most tokens of a forward of the language model.
        vision_tokens: Most image tokens of a call of the vision tower.
    """
    with torch.no_grad():
        feature_KND, runs = prompting.featured(prompting.encode(sets), batch_tokens=vision_tokens)
    whole, forest = set_forest(runs)
    pairs = sum(len(pairs_of(len(prompt.images))) for prompt in sets)
    return SharedForward(model, feature_KND, batch_tokens).answers(whole, forest, count=pairs)


# --- a set judge's folder --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetRecord:
    """Origin and quality of a set judge."""

    checkpoint: str
    """Its pair judge."""
    digest: str
    """SHA-256 of the pair judge's weights; empty if unknown."""
    panel_correlation: float | None
    """Correlation of panel scores within groups with the pair judge's, on held-out sets; None if not measured."""
    train_sets: int
    """Number of training sets."""
    held_out_sets: int
    """Number of evaluation sets."""

    def write(self, folder: Path) -> None:
        """Write the record into a set judge's folder."""
        write_json(folder / RECORD, asdict(self))


def set_record(source: str) -> SetRecord | None:
    """Read the record of a folder or hub name; None if it is no set judge. Raises ValueError if it is damaged."""
    path = local_file(source, RECORD)
    if path is None:
        return None
    with blamed_on(path):
        return typed(read_object(path), SetRecord)
