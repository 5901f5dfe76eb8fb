"""Texts → unit vectors: what `diversify` measures distances with.

`tfidf`, `letters` and `words` need no weights; `transformers:CHECKPOINT` takes a CLIP text model or any sentence
encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacorl.io.documents import read_object

Vectors = NDArray[np.float32]
"""(N, C), each row of length 1."""
Embedder = Callable[[Sequence[str]], Vectors]

DIMENSIONS = 128
WORDS = 2048
"""How many words `words` tells apart; bounds its vectors at 8 KiB."""


def embedder(name: str, *, seed: int = 0) -> Embedder:
    """`tfidf`, `letters`, `words`, or `transformers:CHECKPOINT` (a folder or a hub name).

    Raises ValueError for others.
    """
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
    """Which of the most frequent words occur, all alike: the plainest measure, for what others selected."""
    from sklearn.feature_extraction.text import CountVectorizer  # type: ignore[import-untyped]

    found = CountVectorizer(binary=True, max_features=WORDS, dtype=np.float32).fit_transform(texts)
    return unit(found.toarray())


def _latent(texts: Sequence[str], *, seed: int, **vectorizer: Any) -> Vectors:
    """TF-IDF, then a truncated SVD (latent semantic analysis)."""
    from sklearn.decomposition import TruncatedSVD  # type: ignore[import-untyped]
    from sklearn.feature_extraction.text import TfidfVectorizer

    counts = TfidfVectorizer(sublinear_tf=True, max_features=200_000, **vectorizer).fit_transform(texts)
    dimensions = min(DIMENSIONS, *(side - 1 for side in counts.shape))
    if dimensions < 1:
        raise ValueError(f"{len(texts)} texts of {counts.shape[1]} words are too few to embed; two of each are needed")
    return unit(TruncatedSVD(dimensions, random_state=seed).fit_transform(counts))


def unit(rows: NDArray[Any]) -> Vectors:
    """Each row over its length; a row of zeros (a text without a known word) stays zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12), dtype=np.float32)


class TransformerEmbedder:
    """A CLIP text model, or a sentence encoder with the pooling that its own files name (the mean, where none do)."""

    def __init__(self, checkpoint: str, *, batch: int = 64) -> None:
        from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPTextModelWithProjection

        self.batch = batch
        self.is_clip = AutoConfig.from_pretrained(checkpoint).model_type in ("clip", "clip_text_model")
        kind = CLIPTextModelWithProjection if self.is_clip else AutoModel
        self.model = kind.from_pretrained(checkpoint).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.pools_first = not self.is_clip and _pools_first(checkpoint)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        # Longest first, so that a batch pads little; put back in order at the end.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        parts = [order[start : start + self.batch] for start in range(0, len(order), self.batch)]
        rows = np.concatenate([self._embed([texts[i] for i in part]) for part in parts])
        return unit(rows[np.argsort(order)])

    def _embed(self, texts: list[str]) -> NDArray[np.float32]:
        import torch

        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=self._length(), return_tensors="pt")
        with torch.inference_mode():
            output = self.model(**inputs)
        if self.is_clip:
            return np.asarray(output.text_embeds.float().numpy())
        hidden_BNC, mask_BN1 = output.last_hidden_state.float(), inputs["attention_mask"][..., None]
        pooled = hidden_BNC[:, 0] if self.pools_first else (hidden_BNC * mask_BN1).sum(1) / mask_BN1.sum(1)
        return np.asarray(pooled.numpy())

    def _length(self) -> int:
        positions = getattr(self.model.config, "max_position_embeddings", 512)
        # RoBERTa counts two positions for padding; tokenizers without a limit report an astronomical one.
        return int(
            min(self.tokenizer.model_max_length, positions - (2 if self.model.config.model_type == "roberta" else 0))
        )


def _pools_first(checkpoint: str) -> bool:
    """Whether a sentence-transformers checkpoint takes its first token's state instead of the mean."""
    from pathlib import Path

    from transformers.utils import cached_file

    name = cached_file(
        checkpoint,
        "1_Pooling/config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return bool(name) and bool(read_object(Path(name)).get("pooling_mode_cls_token"))
