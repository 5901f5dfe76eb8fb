"""The step `pacorl dataset diversify`: texts → vectors → a selection, and a table of selections and of chance.

The embeddings `tfidf`, `letters` and `words` need no weights; `transformers:CHECKPOINT` takes a CLIP text model or any
sentence encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacorl.dataset.folder import PromptRecord, read_prompts
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.selections import SELECTIONS, Goal, Vectors, select, spread
from pacorl.io.documents import JsonObject, read_object, write_jsonl
from pacorl.io.pretrained import pretrained


def diversify(
    folder: Path,
    *,
    goal: Goal,
    method: str = "independent_set",
    embed: str = "tfidf",
    per_category: bool = False,
    seed: int = 0,
    dry_run: bool = False,
    progress: Progress = silent,
) -> JsonObject:
    """Select prompts that differ: prompts.jsonl → diverse.jsonl.

    Args:
        method: a key of SELECTIONS.
        embed: see `embedder`.
        per_category: gives every category an equal share.

    Returns:
        The spread of the selection, with its nearest pair by idx.
    """
    # Stop if the step is done.
    source = folder / "prompts.jsonl"
    target = folder / "diverse.jsonl"
    options = {"number": goal.number, "distance": goal.distance, "method": method, "embed": embed}
    planned = {**options, "per_category": per_category}
    step = DatasetStep(folder, "diversify", inputs=[source], options=planned, seed=seed)
    counts = step.counts_if_done()
    if counts is not None:
        return counts
    records = read_prompts(source)
    # A dry run embeds nothing, since an embedding model may be a download.
    if dry_run:
        return {"prompts": len(records), **options}

    # Embed, select, measure.
    vectors = embedder(embed, seed=seed)([record.prompt.text for record in records])
    progress(1, 3)
    categories = [record.prompt.category for record in records] if per_category else ()
    selected = select(vectors, goal, method=method, categories=categories, seed=seed)
    progress(2, 3)
    measured = spread(vectors, selected)
    progress(3, 3)
    write_jsonl(target, [records[index].row for index in selected])
    # Rows are written unchanged, but the pair is given by idx.
    pair = [records[index].idx for index in measured.pair]
    return step.finish(outputs=[target], counts={**asdict(measured), "prompts": len(records), "pair": pair})


@dataclass(frozen=True, slots=True)
class MeasuredSelection:
    """Selection measured in one embedding; for chance, the mean and the extremes over its draws."""

    selection: str
    selected_by: str
    measured_by: str
    nearest: float
    mean_nearest: float
    coverage: float
    best_nearest: float | None = None
    """Largest value over the draws; only for chance."""
    best_mean_nearest: float | None = None


def compare(
    records: Sequence[PromptRecord],
    *,
    number: int,
    embeds: Sequence[str] = ("tfidf", "letters"),
    measures: Sequence[str] = ("words",),
    draws: int = 100,
    seed: int = 0,
) -> list[MeasuredSelection]:
    """Measure every selection by each of `embeds` in them and in `measures`, and `draws` random selections.

    Fewer draws are the first of more: each draw has its own seed.
    """
    # All prompts at once leave no choice to measure.
    if not 2 <= number < len(records):
        raise ValueError(f"of {len(records)} prompts, between 2 and {len(records) - 1} can be chosen, not {number}")
    # One vector per text and embedding, whatever number of selections reads it.
    texts = [record.prompt.text for record in records]
    vectors = {}
    for name in (*embeds, *measures):
        if name not in vectors:
            vectors[name] = embedder(name, seed=seed)(texts)

    # Every selection in every embedding.
    rows = []
    for method, by in product(SELECTIONS, embeds):
        selected = select(vectors[by], Goal(number=number), method=method, seed=seed)
        for name, vectors_NC in vectors.items():
            measured = spread(vectors_NC, selected)
            rows.append(MeasuredSelection(method, by, name, measured.nearest, measured.mean_nearest, measured.coverage))

    # Chance.
    random_selections = []
    for draw in range(draws):
        random_selections.append(Random(f"{seed}-{draw}").sample(range(len(records)), number))
    for name, vectors_NC in vectors.items():
        spreads = [spread(vectors_NC, selected) for selected in random_selections]
        nearest = [each.nearest for each in spreads]
        mean_nearest = [each.mean_nearest for each in spreads]
        coverage = [each.coverage for each in spreads]
        means = (float(np.mean(nearest)), float(np.mean(mean_nearest)), float(np.mean(coverage)))
        # The mean over the draws, and the best draw.
        rows.append(MeasuredSelection("random", "", name, *means, max(nearest), max(mean_nearest)))
    return rows


def table(rows: Sequence[MeasuredSelection]) -> str:
    """Format the rows for people: one line each."""
    # Cells.
    lines = [("selection", "by", "measured in", "nearest pair", "mean nearest", "coverage")]
    for row in rows:
        nearest = f"{row.nearest:.3f}"
        mean_nearest = f"{row.mean_nearest:.3f}"
        if row.best_nearest is not None:
            nearest += f" ({row.best_nearest:.3f})"
            mean_nearest += f" ({row.best_mean_nearest:.3f})"
        names = (row.selection, row.selected_by or "–", row.measured_by)
        lines.append((*names, nearest, mean_nearest, f"{row.coverage:.3f}"))

    # Pad every column to its longest cell.
    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(len(cell) for cell in column) + 2)

    padded = []
    for line in lines:
        padded.append("".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return "\n".join(padded)


Embedder = Callable[[Sequence[str]], Vectors]

BATCH = 64
"""Texts per forward of a text model."""
DIMENSIONS = 128
WORDS = 2048
"""Vocabulary of `words`; bounds its vectors at 8 KiB."""


def embedder(name: str, *, seed: int = 0) -> Embedder:
    """Texts → vectors, by name: `tfidf`, `letters`, `words`, or `transformers:CHECKPOINT` (a folder or a hub name)."""
    kind, _, checkpoint = name.partition(":")
    if kind == "transformers" and checkpoint:
        return TransformerEmbedder(checkpoint)
    if name == "tfidf":
        return lambda texts: _latent(texts, seed=seed, ngram_range=(1, 2), stop_words="english")
    if name == "letters":
        return lambda texts: _latent(texts, seed=seed, analyzer="char_wb", ngram_range=(3, 5))
    if name == "words":
        return _occurrence
    raise ValueError(f"unknown embedder {name!r}; there are tfidf, letters, words and transformers:CHECKPOINT")


def _occurrence(texts: Sequence[str]) -> Vectors:
    """Occurrence of the most frequent words, all alike: the plainest measure, for selections of other embeddings."""
    from sklearn.feature_extraction.text import CountVectorizer  # type: ignore[import-untyped]

    counts = CountVectorizer(binary=True, max_features=WORDS, dtype=np.float32).fit_transform(texts)
    return unit(counts.toarray())


def _latent(texts: Sequence[str], *, seed: int, **vectorizer: Any) -> Vectors:
    """TF-IDF, then a truncated SVD (latent semantic analysis)."""
    from sklearn.decomposition import TruncatedSVD  # type: ignore[import-untyped]
    from sklearn.feature_extraction.text import TfidfVectorizer

    counts = TfidfVectorizer(sublinear_tf=True, max_features=200_000, **vectorizer).fit_transform(texts)
    # An SVD has fewer dimensions than its matrix has rows and columns.
    dimensions = min(DIMENSIONS, counts.shape[0] - 1, counts.shape[1] - 1)
    if dimensions < 1:
        raise ValueError(f"{len(texts)} texts of {counts.shape[1]} words are too few to embed; two of each are needed")
    return unit(TruncatedSVD(dimensions, random_state=seed).fit_transform(counts))


def unit(rows: NDArray[Any]) -> Vectors:
    """Divide each row by its length; a row of zeros (a text without a known word) remains zero."""
    # Bounded from below: a row of zeros would become NaN.
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12), dtype=np.float32)


class TransformerEmbedder:
    """A CLIP text model, or a sentence encoder with the pooling of its own files (else the mean)."""

    def __init__(self, checkpoint: str) -> None:
        from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPTextModelWithProjection
        from transformers.utils import cached_file

        self.is_clip = pretrained(AutoConfig, checkpoint).model_type in ("clip", "clip_text_model")
        kind = CLIPTextModelWithProjection if self.is_clip else AutoModel
        self.model = pretrained(kind, checkpoint).eval().requires_grad_(False)
        self.tokenizer = pretrained(AutoTokenizer, checkpoint)
        positions = getattr(self.model.config, "max_position_embeddings", 512)
        # RoBERTa counts two positions for padding; tokenizers without a limit report an astronomical one.
        if self.model.config.model_type == "roberta":
            positions -= 2
        self.max_length = int(min(self.tokenizer.model_max_length, positions))
        # sentence-transformers stores its pooling in an additional file.
        quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        pooling = None if self.is_clip else cached_file(checkpoint, "1_Pooling/config.json", **quiet)
        self.pools_first = bool(pooling and read_object(Path(pooling)).get("pooling_mode_cls_token"))

    def __call__(self, texts: Sequence[str]) -> Vectors:
        # Longest first, so that a batch pads little; put back in order at the end.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        rows = []
        for start in range(0, len(order), BATCH):
            rows.append(self._embed([texts[i] for i in order[start : start + BATCH]]))
        return unit(np.concatenate(rows)[np.argsort(order)])

    def _embed(self, texts: list[str]) -> NDArray[np.float32]:
        import torch

        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")
        with torch.inference_mode():
            output = self.model(**inputs)
        if self.is_clip:
            return np.asarray(output.text_embeds.float().numpy())
        hidden_BNC = output.last_hidden_state.float()
        # The mean leaves out padding, of which a text has more or less by its batch.
        mask_BN1 = inputs["attention_mask"][..., None]
        pooled = hidden_BNC[:, 0] if self.pools_first else (hidden_BNC * mask_BN1).sum(1) / mask_BN1.sum(1)
        return np.asarray(pooled.numpy())
