"""Selections of prompts that differ: a similarity graph over text embeddings, then a choice on it.

The paper reduces 2,000 prompts to 708 by "graph-based diversification" and does not publish the algorithm. There are
three well-founded algorithms, all deterministic:

    independent_set    greedy maximal independent set of the graph "closer than d", fewest neighbours first: no two
                       selected prompts are closer than d, and none can be added (Halldórsson & Radhakrishnan 1997)
    farthest_point     always the prompt farthest from all selected ones: the nearest pair is at least half as far
                       apart as in the best selection (Gonzalez 1985)
    facility_location  lazy greedy: each prompt should be like a selected one; at least 1 − 1/e of the best coverage
                       on the k-nearest-neighbour graph (Nemhauser et al. 1978, Minoux 1978)

Distance is 1 − cosine. N prompts, C dimensions, K neighbours, M selected.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacorl.io.versions import install_command

Vectors = NDArray[np.float32]
"""(N, C), each row of length 1."""
Indices = NDArray[np.int64]

NEIGHBOURS = 32
EXACT_UP_TO = 20_000
"""Vectors up to which neighbours are searched exhaustively; beyond, an inverted file is used."""
BLOCK = 1024
"""Rows compared at a time: bounds the memory at BLOCK × N floats."""


@dataclass(frozen=True, slots=True)
class Goal:
    """End of a selection: a number of prompts, or no prompt at `distance` from all selected prompts."""

    number: int | None = None
    distance: float | None = None

    def __post_init__(self) -> None:
        if (self.number is None) == (self.distance is None):
            raise ValueError("name either a number of prompts or a minimum distance, and not both")
        if self.number is not None and self.number < 1:
            raise ValueError(f"the number of prompts must be at least 1, got {self.number}")
        if self.distance is not None and not 0 < self.distance < 2:
            raise ValueError(f"the minimum distance is 1 − cosine and lies between 0 and 2, got {self.distance}")


def neighbours(vectors_NC: Vectors, *, count: int = NEIGHBOURS, seed: int = 0) -> tuple[Vectors, Indices]:
    """Nearest neighbours of each vector: cosine similarities and indices, both (N, K), nearest first."""
    size = len(vectors_NC)
    count = min(count, size - 1)
    searched = _search_index(vectors_NC, seed)
    searched.add(vectors_NC)
    # One more than asked for: a vector finds itself.
    similarity, index = searched.search(vectors_NC, count + 1)
    # An inverted file that finds too few returns −1: let that be any vector, at the least similarity.
    missing = index < 0
    next_N1 = (np.arange(size)[:, None] + 1) % size
    similarity = np.where(missing, -1, similarity)
    index = np.where(missing, next_N1, index)
    # A vector finds itself, but not always first: duplicates are as near.
    is_other = index != np.arange(size)[:, None]
    is_other[is_other.all(1), -1] = False
    return similarity[is_other].reshape(size, count), index[is_other].reshape(size, count)


def _search_index(vectors_NC: Vectors, seed: int) -> Any:
    try:
        import faiss
    except ImportError:
        raise ValueError(f"diversify needs faiss; install it with `{install_command('data')}`") from None
    size, width = vectors_NC.shape
    exact = faiss.IndexFlatIP(width)
    if size <= EXACT_UP_TO:
        return exact
    cells = int(4 * np.sqrt(size))  # faiss' own rule of thumb
    index = faiss.IndexIVFFlat(exact, width, cells, faiss.METRIC_INNER_PRODUCT)
    # faiss trains on 256 points a cell by default and asks for 39 at least: 64 are a quarter of that work.
    index.cp.seed = seed + 1
    index.cp.max_points_per_centroid = 64
    index.nprobe = max(8, cells // 32)
    index.train(vectors_NC)
    return index


def nearest_selected(vectors_NC: Vectors, selected: Sequence[int]) -> Vectors:
    """(M,) exact distance of each selected prompt to its nearest neighbour in the selection."""
    selected_MC = vectors_NC[np.asarray(selected)]
    nearest_M = np.empty(len(selected_MC), np.float32)
    for start in range(0, len(selected_MC), BLOCK):
        similarity = selected_MC[start : start + BLOCK] @ selected_MC.T
        rows = np.arange(len(similarity))
        similarity[rows, rows + start] = -np.inf
        nearest_M[start : start + BLOCK] = 1 - similarity.max(1)
    return nearest_M


# --- selections --------------------------------------------------------------------------------------------------


def farthest_point(vectors_NC: Vectors, goal: Goal, *, seed: int = 0) -> list[int]:
    """Start at the prompt nearest to the mean, then repeatedly add the prompt farthest from the selection."""
    del seed  # no draws: all selections of the table share one signature
    first = int(np.argmax(vectors_NC @ vectors_NC.mean(0)))
    selected = [first]
    distance_N = 1 - vectors_NC @ vectors_NC[first]
    while len(selected) < min(goal.number or len(vectors_NC), len(vectors_NC)):
        distance_N[selected[-1]] = -np.inf
        farthest = int(np.argmax(distance_N))
        if goal.distance is not None and distance_N[farthest] < goal.distance:
            break
        selected.append(farthest)
        np.minimum(distance_N, 1 - vectors_NC @ vectors_NC[farthest], out=distance_N)
    return selected


def independent_set(vectors_NC: Vectors, goal: Goal, *, seed: int = 0) -> list[int]:
    """Select a maximal set without two prompts closer than a distance; for a number, search the distance."""
    similarity_NK, _ = neighbours(vectors_NC, seed=seed)
    if goal.distance is not None:
        return _independent(vectors_NC, _crowding(similarity_NK, goal.distance), goal.distance)
    number = min(goal.number or 0, len(vectors_NC))
    low = 0.0
    high = 2.0
    best = list(range(len(vectors_NC)))
    # 24 halvings of [0, 2] give the distance to 1e-7, below the resolution of float32 cosines.
    for _ in range(24):
        middle = (low + high) / 2
        selected = _independent(vectors_NC, _crowding(similarity_NK, middle), middle, stop_at=number)
        if len(selected) >= number:
            low = middle
            best = selected
        else:
            high = middle
    return best[:number]


def _crowding(similarity_NK: Vectors, distance: float) -> Indices:
    """Order of visits: prompts with the fewest neighbours within `distance` first, then by their own order."""
    return np.argsort((similarity_NK > 1 - distance).sum(1), kind="stable")


def _independent(vectors_NC: Vectors, order: Indices, distance: float, *, stop_at: int | None = None) -> list[int]:
    """Visit in `order` and select each prompt at least `distance` from the selection; all comparisons are exact."""
    selected_MC = np.empty((len(order), vectors_NC.shape[1]), np.float32)
    selected: list[int] = []
    for start in range(0, len(order), BLOCK):
        rows = order[start : start + BLOCK]
        block = vectors_NC[rows]
        free = np.asarray((block @ selected_MC[: len(selected)].T <= 1 - distance).all(1))  # all of none is True
        near = np.asarray(block @ block.T > 1 - distance)
        for row in np.flatnonzero(free):
            if free[row]:
                selected_MC[len(selected)] = block[row]
                selected.append(int(rows[row]))
                free[row:] &= ~near[row, row:]
                if len(selected) == stop_at:
                    return selected
    return selected


def facility_location(vectors_NC: Vectors, goal: Goal, *, seed: int = 0) -> list[int]:
    """Maximise Σ_i max_{j selected} similarity(i, j) over the k-nearest-neighbour graph by lazy greedy choice."""
    if goal.number is None:
        raise ValueError("facility_location selects a number of prompts; for a minimum distance use independent_set")
    # Edges of the graph, each prompt to itself included.
    similarity_NK, index_NK = neighbours(vectors_NC, seed=seed)
    size, count = index_NK.shape
    member = np.concatenate([np.repeat(np.arange(size), count), np.arange(size)])
    facility = np.concatenate([index_NK.ravel(), np.arange(size)])
    weight = np.concatenate([np.maximum(similarity_NK.ravel(), 0), np.ones(size, np.float32)])

    # One stable sort groups the edges by their facility; `bounds` are the ends of the groups.
    order = np.argsort(facility, kind="stable")
    bounds = np.searchsorted(facility[order], np.arange(1, size))
    # Per prompt: the prompts that have it among their nearest, and the similarities.
    reach = list(zip(np.split(member[order], bounds), np.split(weight[order], bounds), strict=True))
    covered_N = np.zeros(len(vectors_NC), np.float32)

    # (−gain, prompt): a stale gain is an upper bound, so the first whose fresh gain is still on top is the best.
    queue = [(-float(similarity.sum()), prompt) for prompt, (_, similarity) in enumerate(reach)]
    heapq.heapify(queue)
    selected: list[int] = []
    while queue and len(selected) < goal.number:
        stale, prompt = heapq.heappop(queue)
        members, similarity = reach[prompt]
        gain = float(np.maximum(similarity - covered_N[members], 0).sum())
        if queue and -gain > queue[0][0]:
            heapq.heappush(queue, (-gain, prompt))
            continue
        assert -gain >= stale - 1e-3  # submodular: gains only shrink
        selected.append(prompt)
        covered_N[members] = np.maximum(covered_N[members], similarity)
    return selected


SELECTIONS: dict[str, Callable[..., list[int]]] = {
    "independent_set": independent_set,
    "farthest_point": farthest_point,
    "facility_location": facility_location,
}


def select(
    vectors_NC: Vectors, goal: Goal, *, method: str = "independent_set", categories: Sequence[str] = (), seed: int = 0
) -> list[int]:
    """Select prompts and return their indices, ascending.

    Args:
        method: one of SELECTIONS.
        categories: category of each prompt; all categories then get equal shares, as far as they can fill them.
    """
    # Arguments.
    if method not in SELECTIONS:
        raise ValueError(f"unknown method {method!r}; there are {', '.join(SELECTIONS)}")
    if len(vectors_NC) < 2:
        raise ValueError(f"{len(vectors_NC)} prompts are too few to select from; at least two are needed")
    if not categories:
        return sorted(SELECTIONS[method](vectors_NC, goal, seed=seed))

    # Divide the number over the categories.
    category_N = np.asarray(categories)
    members = {name: np.flatnonzero(category_N == name) for name in sorted(set(categories))}
    goals = dict.fromkeys(members, goal)
    if goal.number is not None:
        quotas = equal_quotas({name: len(rows) for name, rows in members.items()}, goal.number)
        goals = {name: Goal(number=quota) for name, quota in quotas.items() if quota}

    # Select within each category; indices there are positions in `rows`.
    selected: list[int] = []
    for name, category_goal in goals.items():
        rows = members[name]
        # Selections search neighbours, and a single prompt has none.
        indices = SELECTIONS[method](vectors_NC[rows], category_goal, seed=seed) if len(rows) > 1 else [0]
        selected += rows[indices].tolist()
    return sorted(selected)


def equal_quotas(available: dict[str, int], total: int) -> dict[str, int]:
    """Divide `total` over the categories as equally as they can fill; large categories take the rest of small ones."""
    quotas = dict.fromkeys(available, 0)
    for _ in range(min(total, sum(available.values()))):
        open_names = []
        for name, count in available.items():
            if quotas[name] < count:
                open_names.append(name)

        quotas[min(open_names, key=quotas.__getitem__)] += 1
    return quotas


@dataclass(frozen=True, slots=True)
class Spread:
    """Distances between selected prompts, and their coverage of all prompts. Distances are 1 − cosine."""

    kept: int
    nearest: float
    """Distance of the nearest pair."""
    mean_nearest: float
    """Mean over the selection of the distance to the nearest neighbour in it."""
    coverage: float
    """Mean over all prompts of the similarity to the most similar selected prompt."""
    farthest: float
    """Largest distance from any prompt to its nearest selected prompt."""
    pair: tuple[int, int]
    """Indices of the nearest pair."""


def spread(vectors_NC: Vectors, selected: Sequence[int]) -> Spread:
    """Measure a selection, exactly."""
    if len(selected) < 2:
        raise ValueError(
            f"{len(selected)} prompts are selected, and a spread needs two; raise the number or lower the distance"
        )
    # Coverage: the similarity of each prompt to the selected one nearest to it, block by block.
    selected_MC = vectors_NC[np.asarray(selected)]
    similar_N = np.empty(len(vectors_NC), np.float32)
    for start in range(0, len(vectors_NC), BLOCK):
        similar_N[start : start + BLOCK] = (vectors_NC[start : start + BLOCK] @ selected_MC.T).max(1)

    # The nearest pair: the prompt with the nearest neighbour, and that neighbour.
    nearest_M = nearest_selected(vectors_NC, selected)
    first = int(np.argmin(nearest_M))
    to_first = selected_MC @ selected_MC[first]
    to_first[first] = -np.inf
    return Spread(
        kept=len(selected),
        nearest=float(nearest_M.min()),
        mean_nearest=float(nearest_M.mean()),
        coverage=float(similar_N.mean()),
        farthest=float(1 - similar_N.min()),
        pair=(int(selected[first]), int(selected[int(np.argmax(to_first))])),
    )
