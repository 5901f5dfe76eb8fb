"""Annotators without a browser: the page's HTTP API, and people of the tiny world.

People of the tiny world rank like the oracle, with noise.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import httpx2

from pacorl.io.documents import parse_json
from pacorl.io.images import open_image
from pacorl.tiny.oracle import Oracle
from pacorl.tiny.world import LOOKS, Panel

Rank = Callable[["Client", Mapping[str, Any]], Sequence[int]]
"""(client, task) → slots, best first."""

GIVE_UP_SECONDS = 60.0
"""Length of an outage after which a client gives up."""


class Client:
    """One annotator; changes are sent again, under their request id, until they are acknowledged."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    def task(self) -> dict[str, Any]:
        return dict(parse_json(self._retrying("/api/task")))

    def rank(self, instance: str, order: Sequence[int]) -> dict[str, Any]:
        """Send a ranking, and return the next state once the server has it on its disk."""
        return self._change("/api/rankings", {"instance": instance, "order": list(order)})

    def skip(self, instance: str, reason: str) -> dict[str, Any]:
        return self._change("/api/skips", {"instance": instance, "reason": reason})

    def image(self, address: str) -> bytes:
        return self._retrying(address)

    def work(self, rank: Rank, *, acknowledged: Callable[[str, Sequence[int]], None] | None = None) -> int:
        """Rank all tasks and return their number; `acknowledged` is called with each confirmed ranking."""
        done = 0
        state = self.task()
        while state["task"]:
            instance = state["task"]["instance"]
            order = rank(self, state["task"])
            state = self.rank(instance, order)
            if acknowledged:
                acknowledged(instance, order)
            done += 1
        return done

    def _change(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        # One id per change and not per try: the server counts an id once.
        return dict(parse_json(self._retrying(path, {**body, "request": secrets.token_hex(16)})))

    def _retrying(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        headers = {"Cookie": f"pacorl_annotator_{self._url.rpartition(':')[2]}={self._token}"}
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                if body is None:
                    answer = httpx2.get(self._url + path, headers=headers, timeout=30)
                else:
                    answer = httpx2.post(self._url + path, json=body, headers=headers, timeout=30)
                if answer.status_code < 400:
                    return answer.content
                if answer.status_code < 500:
                    # A refusal is final.
                    raise ValueError(f"{path}: {answer.text}")
            except httpx2.TransportError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


ORACLE = Oracle()


def simulate(
    url: str, tokens: Mapping[str, str], *, noise: float = 0.5, attend: Sequence[str] = LOOKS
) -> dict[str, int]:
    """Let all people rank at the same time until all tasks are done; returns each person's number of rankings."""

    def work(name: str) -> int:
        return Client(url, tokens[name]).work(oracle_with_noise(name, noise=noise, attend=attend))

    # A thread per person: they rank at the same time, as people do.
    with ThreadPoolExecutor(len(tokens)) as pool:
        return dict(zip(tokens, pool.map(work, tokens), strict=True))


def oracle_with_noise(name: str, *, noise: float, attend: Sequence[str] = LOOKS) -> Rank:
    """Rank by the number of attributes (of `attend`) that a candidate shares with the reference, plus Gaussian noise.

    `noise` is its standard deviation in attributes; 0 ranks like the oracle, ties by chance.
    """
    # By name: a person's rankings do not depend on the other people.
    rng = random.Random(name)

    def rank(client: Client, task: Mapping[str, Any]) -> Sequence[int]:
        reference = read_panel(client.image(task["reference"]))
        candidates = []
        for address in task["candidates"]:
            candidates.append(read_panel(client.image(address)))
        scores = []
        for candidate in candidates:
            shared = shared_attributes(reference, candidate, attend=attend)
            # The last term breaks ties by chance, also without noise.
            scores.append(shared + rng.gauss(0, noise) + 1e-6 * rng.random())
        return sorted(range(len(scores)), key=lambda slot: -scores[slot])

    return rank


# With 4 grids of 2×2 each image is shown 15 times, and reading compares it with thousands of templates.
@lru_cache(maxsize=50_000)
def read_panel(image: bytes) -> Panel:
    """Find the panel of the tiny world nearest to an image."""
    return ORACLE.nearest([open_image(image)])[0][0]


def shared_attributes(first: Panel, second: Panel, *, attend: Sequence[str] = LOOKS) -> int:
    """Count the attributes of `attend` that two panels share."""
    return sum(getattr(first, name) == getattr(second, name) for name in attend)
