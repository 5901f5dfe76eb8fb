"""Keeps prompts that differ: a similarity graph over text embeddings, then a selection on it.

The paper thins 2,000 prompts to 708 by "graph-based diversification" and does not publish the algorithm. Three
well-founded ones are offered, all deterministic:

    independent_set    greedy maximal independent set of the graph "closer than d", fewest neighbours first: no two
                       kept prompts are closer than d, and none can be added (Halldórsson & Radhakrishnan 1997)
    farthest_point     always the prompt farthest from all kept ones: the nearest kept pair is at least half as far
                       apart as in the best selection (Gonzalez 1985)
    facility_location  lazy greedy: each prompt should have a kept one that is like it; at least 1 − 1/e of the best
                       coverage on the k-nearest-neighbour graph (Nemhauser et al. 1978, Minoux 1978)

Distance is 1 − cosine. N prompts, C dimensions, K neighbours, M kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacorl.dataset.embed import Vectors

Indices = NDArray[np.int64]

NEIGHBOURS = 32
EXACT_UP_TO = 20_000
"""Vectors up to which neighbours are searched exhaustively; beyond, an inverted file is used."""
BLOCK = 1024
"""Rows compared at a time: bounds the memory at BLOCK × N floats."""


@dataclass(frozen=True, slots=True)
class Goal:
    """When a selection is complete: at a number of prompts, or when none is `distance` from all kept ones."""

    number: int | None = None
    distance: float | None = None

    def __post_init__(self) -> None:
        if (self.number is None) == (self.distance is None):
            raise ValueError("name either a number of prompts or a minimum distance, and not both")
        if self.number is not None and self.number < 1:
            raise ValueError(f"the number of prompts must be at least 1, got {self.number}")
        if self.distance is not None and not 0 < self.distance < 2:
            raise ValueError(f"the minimum distance is 1 − cosine and lies between 0 and 2, got {self.distance}")


# --- the graph ---------------------------------------------------------------------------------------------------


def neighbours(vectors_NC: Vectors, *, count: int = NEIGHBOURS, seed: int = 0) -> tuple[Vectors, Indices]:
    """The `count` nearest others of each vector: cosine similarities and indices, both (N, K), nearest first."""
    size = len(vectors_NC)
    count = min(count, size - 1)
    similarity, index = _search(vectors_NC, count + 1, seed)
    # A vector finds itself, but not always first: duplicates are as near.
    others = index != np.arange(size)[:, None]
    others[others.all(1), -1] = False
    return similarity[others].reshape(size, count), index[others].reshape(size, count)


def _search(vectors_NC: Vectors, count: int, seed: int) -> tuple[Vectors, Indices]:
    try:
        import faiss
    except ImportError:
        raise ValueError("diversify needs faiss; install it with `pip install 'pacorl[data]'`") from None
    size, width = vectors_NC.shape
    index = faiss.IndexFlatIP(width) if size <= EXACT_UP_TO else _inverted_file(faiss, vectors_NC, seed)
    index.add(vectors_NC)
    similarity, found = index.search(vectors_NC, count)
    # An inverted file that finds too few says −1: let that be anyone, at the least similarity.
    missing = found < 0
    return np.where(missing, -1, similarity), np.where(missing, (np.arange(size)[:, None] + 1) % size, found)


def _inverted_file(faiss: Any, vectors_NC: Vectors, seed: int) -> Any:
    size, width = vectors_NC.shape
    cells = int(4 * np.sqrt(size))  # faiss' own rule of thumb
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
    index.cp.seed, index.cp.max_points_per_centroid, index.nprobe = seed + 1, 64, max(8, cells // 32)
    index.train(vectors_NC)
    return index


def nearest_kept(vectors_NC: Vectors, kept: Sequence[int]) -> Vectors:
    """The distance of each kept prompt to its nearest other kept one, exactly; (M,)."""
    chosen = vectors_NC[np.asarray(kept)]
    result = np.empty(len(chosen), np.float32)
    for start in range(0, len(chosen), BLOCK):
        similarity = chosen[start : start + BLOCK] @ chosen.T
        rows = np.arange(len(similarity))
        similarity[rows, rows + start] = -np.inf
        result[start : start + BLOCK] = 1 - similarity.max(1)
    return result


# --- selections --------------------------------------------------------------------------------------------------


def farthest_point(vectors_NC: Vectors, goal: Goal, *, seed: int = 0) -> list[int]:
    """Starts at the prompt nearest to the mean of all, then always takes the one farthest from those taken."""
    del seed  # nothing is drawn
    first = int(np.argmax(vectors_NC @ vectors_NC.mean(0)))
    kept, distance_N = [first], 1 - vectors_NC @ vectors_NC[first]
    while len(kept) < min(goal.number or len(vectors_NC), len(vectors_NC)):
        distance_N[kept[-1]] = -np.inf
        farthest = int(np.argmax(distance_N))
        if goal.distance is not None and distance_N[farthest] < goal.distance:
            break
        kept.append(farthest)
        np.minimum(distance_N, 1 - vectors_NC @ vectors_NC[farthest], out=distance_N)
    return kept


def independent_set(vectors_NC: Vectors, goal: Goal, *, seed: int = 0) -> list[int]:
    """A maximal set of prompts no two of which are closer than a distance; for a number, the distance is searched."""
    similarity_NK, _ = neighbours(vectors_NC, seed=seed)
    if goal.distance is not None:
        return _independent(vectors_NC, _crowding(similarity_NK, goal.distance), goal.distance)
    number = min(goal.number or 0, len(vectors_NC))
    low, high = 0.0, 2.0
    best = list(range(len(vectors_NC)))
    for _ in range(24):
        middle = (low + high) / 2
        kept = _independent(vectors_NC, _crowding(similarity_NK, middle), middle, stop_at=number)
        low, high, best = (middle, high, kept) if len(kept) >= number else (low, middle, best)
    return best[:number]


def _crowding(similarity_NK: Vectors, distance: float) -> Indices:
    """The order of visits: prompts with the fewest neighbours within `distance` first, then by their own order."""
    return np.argsort((similarity_NK > 1 - distance).sum(1), kind="stable")


def _independent(vectors_NC: Vectors, order: Indices, distance: float, *, stop_at: int | None = None) -> list[int]:
    """Visits in `order` and keeps what is at least `distance` from all kept so far; every comparison is exact."""
    kept = np.empty((len(order), vectors_NC.shape[1]), np.float32)
    found: list[int] = []
    for start in range(0, len(order), BLOCK):
        part = order[start : start + BLOCK]
        block = vectors_NC[part]
        free = np.asarray((block @ kept[: len(found)].T <= 1 - distance).all(1))  # all of none is True
        near = np.asarray(block @ block.T > 1 - distance)
        for row in np.flatnonzero(free):
            if free[row]:
                kept[len(found)] = block[row]
                found.append(int(part[row]))
                free[row:] &= ~near[row, row:]
                if len(found) == stop_at:
                    return found
    return found


def facility_location(vectors_NC: Vectors, goal: Goal, *, seed: int = 0) -> list[int]:
    """Maximises Σ_i max_{j kept} similarity(i, j) over the k-nearest-neighbour graph by lazy greedy choice."""
    if goal.number is None:
        raise ValueError("facility_location selects a number of prompts; for a minimum distance use independent_set")
    reach = _reach(vectors_NC, seed)
    covered_N = np.zeros(len(vectors_NC), np.float32)
    # (−gain, prompt): a stale gain is an upper bound, so the first whose fresh gain stays on top is the best.
    queue = [(-float(similarity.sum()), prompt) for prompt, (_, similarity) in enumerate(reach)]
    heapq.heapify(queue)
    kept: list[int] = []
    while queue and len(kept) < goal.number:
        stale, prompt = heapq.heappop(queue)
        who, similarity = reach[prompt]
        gain = float(np.maximum(similarity - covered_N[who], 0).sum())
        if queue and -gain > queue[0][0]:
            heapq.heappush(queue, (-gain, prompt))
            continue
        assert -gain >= stale - 1e-3  # submodular: gains only shrink
        kept.append(prompt)
        covered_N[who] = np.maximum(covered_N[who], similarity)
    return kept


def _reach(vectors_NC: Vectors, seed: int) -> list[tuple[Indices, Vectors]]:
    """For each prompt, whom it is among the nearest of, and how similar (itself included)."""
    similarity_NK, index_NK = neighbours(vectors_NC, seed=seed)
    size, count = index_NK.shape
    who = np.concatenate([np.repeat(np.arange(size), count), np.arange(size)])
    facility = np.concatenate([index_NK.ravel(), np.arange(size)])
    weight = np.concatenate([np.maximum(similarity_NK.ravel(), 0), np.ones(size, np.float32)])
    order = np.argsort(facility, kind="stable")
    bounds = np.searchsorted(facility[order], np.arange(1, size))
    return list(zip(np.split(who[order], bounds), np.split(weight[order], bounds), strict=True))


SELECTIONS: dict[str, Callable[..., list[int]]] = {
    "independent_set": independent_set,
    "farthest_point": farthest_point,
    "facility_location": facility_location,
}


def select(
    vectors_NC: Vectors, goal: Goal, *, method: str = "independent_set", categories: Sequence[str] = (), seed: int = 0
) -> list[int]:
    """The indices of the kept prompts, ascending; with `categories`, each gets as equal a share as it can fill.

    Raises ValueError for an unknown method or fewer than two prompts.
    """
    if method not in SELECTIONS:
        raise ValueError(f"unknown method {method!r}; there are {', '.join(SELECTIONS)}")
    if len(vectors_NC) < 2:
        raise ValueError(f"{len(vectors_NC)} prompts cannot be thinned; at least two are needed")
    if not categories:
        return sorted(SELECTIONS[method](vectors_NC, goal, seed=seed))
    members = {name: np.flatnonzero(np.asarray(categories) == name) for name in sorted(set(categories))}
    goals = _goals_per_category({name: len(rows) for name, rows in members.items()}, goal)
    kept: list[int] = []
    for name, rows in members.items():
        if len(rows) <= 1 or goals[name] is None:
            kept += rows[: len(rows) if goals[name] else 0].tolist()
        else:
            kept += rows[SELECTIONS[method](vectors_NC[rows], goals[name], seed=seed)].tolist()
    return sorted(kept)


def _goals_per_category(available: dict[str, int], goal: Goal) -> dict[str, Goal | None]:
    if goal.number is None:
        return dict.fromkeys(available, goal)
    quotas = equal_quotas(available, goal.number)
    return {name: Goal(number=quota) if quota else None for name, quota in quotas.items()}


def equal_quotas(available: dict[str, int], total: int) -> dict[str, int]:
    """As equal shares of `total` as the categories can fill; what a small one cannot take goes to the others."""
    quotas = dict.fromkeys(available, 0)
    for _ in range(min(total, sum(available.values()))):
        open_ones = [name for name in available if quotas[name] < available[name]]
        quotas[min(open_ones, key=lambda name: quotas[name])] += 1
    return quotas


# --- what came of it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """How far apart kept prompts are, and how well they stand for all. Distances are 1 − cosine."""

    kept: int
    nearest: float
    """Between the nearest two."""
    mean_nearest: float
    """Mean over the kept of the distance to their nearest other."""
    coverage: float
    """Mean over all prompts of the similarity to the most similar kept one."""
    farthest: float
    """From any prompt to its nearest kept one, at most."""
    pair: tuple[int, int]
    """The nearest two."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def spread(vectors_NC: Vectors, kept: Sequence[int]) -> Spread:
    """Measures a selection, exactly. Raises ValueError where fewer than two are kept."""
    if len(kept) < 2:
        raise ValueError(
            f"{len(kept)} prompts are kept, and a spread needs two; raise the number or lower the distance"
        )
    nearest_M = nearest_kept(vectors_NC, kept)
    first = int(np.argmin(nearest_M))
    chosen = vectors_NC[np.asarray(kept)]
    to_first = chosen @ chosen[first]
    to_first[first] = -np.inf
    similar_N = np.concatenate(
        [(vectors_NC[start : start + BLOCK] @ chosen.T).max(1) for start in range(0, len(vectors_NC), BLOCK)]
    )
    return Spread(
        kept=len(kept),
        nearest=float(nearest_M.min()),
        mean_nearest=float(nearest_M.mean()),
        coverage=float(similar_N.mean()),
        farthest=float(1 - similar_N.min()),
        pair=(int(kept[first]), int(kept[int(np.argmax(to_first))])),
    )
