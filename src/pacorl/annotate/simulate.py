"""Annotators of the tiny world: they see what the oracle sees, plus noise, through the page's real API."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from pacorl.annotate.client import Client, Rank
from pacorl.data.characters import KEPT, VALUES, Oracle, Panel
from pacorl.io.images import open_image

ORACLE = Oracle()


def oracle_with_noise(name: str, *, noise: float, attend: Sequence[str] = KEPT) -> Rank:
    """Ranks by the number of attributes that a candidate shares with the reference, plus Gaussian noise.

    noise: its standard deviation, in attributes; 0 ranks like the oracle, ties by chance. attend: the attributes that
    this person looks at. Raises ValueError for one that panels do not have.
    """
    unknown = [one for one in attend if one not in VALUES]
    if unknown or not attend:
        raise ValueError(
            f"people of the tiny world can look at {', '.join(VALUES)}, not at {', '.join(unknown) or 'nothing'}"
        )
    rng = random.Random(name)

    def rank(client: Client, task: Mapping[str, Any]) -> Sequence[int]:
        reference, *candidates = (read(client.picture(address)) for address in (task["reference"], *task["candidates"]))
        scores = [
            shared(reference, candidate, attend=attend) + rng.gauss(0, noise) + 1e-6 * rng.random()
            for candidate in candidates
        ]
        return sorted(range(len(scores)), key=lambda slot: -scores[slot])

    return rank


@lru_cache(maxsize=50_000)
def read(picture: bytes) -> Panel:
    """The panel of the world that a picture is nearest to."""
    return ORACLE.nearest([open_image(picture)])[0][0]


def shared(first: Panel, second: Panel, *, attend: Sequence[str] = KEPT) -> int:
    """How many of some attributes two panels share."""
    return sum(getattr(first, name) == getattr(second, name) for name in attend)


def simulate(
    url: str, tokens: Mapping[str, str], *, noise: float = 0.5, attend: Sequence[str] = KEPT
) -> dict[str, int]:
    """Everyone ranks at once until nothing is left; returns how many each ranked."""

    def work(name: str) -> int:
        client = Client(url, tokens[name])
        try:
            return client.work(oracle_with_noise(name, noise=noise, attend=attend))
        finally:
            client.close()

    with ThreadPoolExecutor(len(tokens)) as pool:
        return dict(zip(tokens, pool.map(work, tokens), strict=True))
