"""A person without a browser: the page's HTTP API over one kept-alive connection, for rehearsals and load tests."""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pacorl.io.documents import parse_json

Rank = Callable[["Client", Mapping[str, Any]], Sequence[int]]
"""(client, task) → slots, best first."""

GIVE_UP_SECONDS = 60.0
"""How long a server may be away before a client stops trying."""


class Client:
    """One annotator's connection. Changes are sent again, under their request id, until they are acknowledged."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=30)
        self._token = token

    def close(self) -> None:
        self._connection.close()

    def task(self) -> dict[str, Any]:
        return dict(parse_json(self._patiently("GET", "/api/task")))

    def rank(self, instance: str, order: Sequence[int], *, request: str = "") -> dict[str, Any]:
        """Returns the next state when the server has the ranking on its disk."""
        return self._change("/api/rankings", {"instance": instance, "order": list(order)}, request)

    def skip(self, instance: str, reason: str) -> dict[str, Any]:
        return self._change("/api/skips", {"instance": instance, "reason": reason}, "")

    def undo(self) -> dict[str, Any]:
        return self._change("/api/undo", {}, "")

    def picture(self, address: str) -> bytes:
        return self._patiently("GET", address)

    def work(
        self, rank: Rank, *, acknowledged: Callable[[str, Sequence[int]], None] = lambda instance, order: None
    ) -> int:
        """Ranks until nothing is left; `acknowledged` hears of each ranking that the server confirmed."""
        state, done = self.task(), 0
        while state["task"]:
            instance, order = state["task"]["instance"], rank(self, state["task"])
            state = self.rank(instance, order)
            acknowledged(instance, order)
            done += 1
        return done

    def _change(self, path: str, body: Mapping[str, Any], request: str) -> dict[str, Any]:
        content = json.dumps({**body, "request": request or secrets.token_hex(16)})
        return dict(parse_json(self._patiently("POST", path, content)))

    def _patiently(self, method: str, path: str, body: str | None = None) -> bytes:
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                return self._once(method, path, body)
            except (http.client.HTTPException, OSError):
                self._connection.close()  # the next request opens it anew
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _once(self, method: str, path: str, body: str | None) -> bytes:
        headers = {"Authorization": f"Bearer {self._token}"} | ({"Content-Type": "application/json"} if body else {})
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= 500:
            raise http.client.HTTPException(f"{path}: {answer.status}")
        if answer.status >= 400:
            raise ValueError(f"{path}: {parse_json(content)['error']}")
        return content
