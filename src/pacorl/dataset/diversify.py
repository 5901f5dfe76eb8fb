"""The step `pacorl dataset diversify`: texts → vectors → prompts that differ.

The paper reduces 2,000 prompts to 708 by "graph-based diversification" and does not publish the algorithm. Here: a
greedy maximal independent set of the graph "closer than d", fewest neighbours first. No two selected prompts are closer
than d, and none can be added (Halldórsson & Radhakrishnan 1997); d is the largest that leaves enough prompts.

Distance is 1 − cosine of TF-IDF vectors. N prompts, C dimensions.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacorl.dataset.folder import read_prompts
from pacorl.dataset.manifest import DatasetStep
from pacorl.io.documents import JsonObject, write_jsonl
from pacorl.io.terminal import Progress, silent

Vectors = NDArray[np.float32]
"""(N, C), each row of length 1."""

DIMENSIONS = 128
HALVINGS = 24
"""Halvings of [0, 2] give the distance to 1e-7, below the resolution of float32 cosines."""


def diversify(folder: Path, *, number: int, seed: int = 0, progress: Progress = silent) -> JsonObject:
    """Select prompts that differ: prompts.jsonl → diverse.jsonl.

    Args:
        number: Number of prompts; all of them if there are fewer.

    Returns:
        The number of prompts and the number of selected prompts.
    """
    # Stop if the step is done.
    source = folder / "prompts.jsonl"
    target = folder / "diverse.jsonl"
    step = DatasetStep(folder, "diversify", inputs=[source], options={"number": number}, seed=seed)
    finished = step.counts_if_done()
    if finished is not None:
        return finished
    records = read_prompts(source)
    vectors_NC = embedded([record.prompt.text for record in records], seed=seed)
    progress(1, 2)
    selected = sorted(independent_set(vectors_NC, number))
    write_jsonl(target, [records[index].row for index in selected])
    progress(2, 2)
    return step.finish(outputs=[target], counts={"prompts": len(records), "kept": len(selected)})


def embedded(texts: Sequence[str], *, seed: int = 0) -> Vectors:
    """TF-IDF of words and pairs of words, then a truncated SVD (latent semantic analysis)."""
    from sklearn.decomposition import TruncatedSVD  # type: ignore[import-untyped]
    from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
    from sklearn.preprocessing import normalize  # type: ignore[import-untyped]

    weigh = TfidfVectorizer(sublinear_tf=True, max_features=200_000, ngram_range=(1, 2), stop_words="english")
    counts = weigh.fit_transform(texts)
    # An SVD has fewer dimensions than its matrix has rows and columns.
    dimensions = min(DIMENSIONS, counts.shape[0] - 1, counts.shape[1] - 1)
    if dimensions < 1:
        raise ValueError(f"{len(texts)} texts of {counts.shape[1]} words are too few to embed; two of each are needed")
    # A row of zeros, of a text without a known word, remains zero.
    rows = normalize(TruncatedSVD(dimensions, random_state=seed).fit_transform(counts))
    return np.asarray(rows, dtype=np.float32)


def independent_set(vectors_NC: Vectors, number: int) -> list[int]:
    """Select `number` prompts without two closer than a distance, the largest that leaves enough."""
    number = min(number, len(vectors_NC))
    similarity_NN = vectors_NC @ vectors_NC.T
    # Bisect the distance, 1 − cosine: 0 for equal prompts, 2 for opposite ones.
    low = 0.0
    high = 2.0
    best = list(range(len(vectors_NC)))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        near_NN = similarity_NN > 1 - middle
        # Fewest neighbours first, then by their own order.
        selected: list[int] = []
        free_N = np.ones(len(vectors_NC), bool)
        for row in np.argsort(near_NN.sum(1), kind="stable"):
            if free_N[row] and len(selected) < number:
                selected.append(int(row))
                free_N &= ~near_NN[row]
        # Enough prompts are that far apart: try a larger distance.
        if len(selected) == number:
            low = middle
            best = selected
        else:
            high = middle
    return best[:number]
