"""Annotators of the tiny world: they see what the oracle sees, plus noise, through the page's real API."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from pacorl.curate.annotate.client import Client, Rank
from pacorl.data.characters import Oracle, Panel
from pacorl.data.images import open_image

ORACLE = Oracle()


def oracle_with_noise(name: str, *, noise: float) -> Rank:
    """Ranks by the number of kept attributes that a candidate shares with the reference, plus Gaussian noise.

    noise: its standard deviation, in attributes; 0 ranks like the oracle, ties by chance.
    """
    rng = random.Random(name)

    def rank(client: Client, task: Mapping[str, Any]) -> Sequence[int]:
        reference, *candidates = (read(client.picture(address)) for address in (task["reference"], *task["candidates"]))
        scores = [shared(reference, candidate) + rng.gauss(0, noise) + 1e-6 * rng.random() for candidate in candidates]
        return sorted(range(len(scores)), key=lambda slot: -scores[slot])

    return rank


@lru_cache(maxsize=50_000)
def read(picture: bytes) -> Panel:
    """The panel of the world that a picture is nearest to."""
    return ORACLE.nearest([open_image(picture)])[0][0]


def shared(first: Panel, second: Panel) -> int:
    """How many of the kept attributes two panels share."""
    return sum(one == other for one, other in zip(first.kept, second.kept, strict=True))


def simulate(url: str, tokens: Mapping[str, str], *, noise: float = 0.5) -> dict[str, int]:
    """Everyone ranks at once until nothing is left; returns how many each ranked."""

    def work(name: str) -> int:
        client = Client(url, tokens[name])
        try:
            return client.work(oracle_with_noise(name, noise=noise))
        finally:
            client.close()

    with ThreadPoolExecutor(len(tokens)) as pool:
        return dict(zip(tokens, pool.map(work, tokens), strict=True))
