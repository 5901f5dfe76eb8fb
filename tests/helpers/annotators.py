"""Annotators without a browser: the page's HTTP API."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx2

from pacorl.io.documents import parse_json

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
        return dict(parse_json(self._retrying("/api/task").decode()))

    def rank(self, instance: str, order: Sequence[int]) -> dict[str, Any]:
        """Send a ranking, and return the next state once the server has it on its disk."""
        return self._change("/api/rankings", {"instance": instance, "order": list(order)})

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
        return dict(parse_json(self._retrying(path, {**body, "request": secrets.token_hex(16)}).decode()))

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
