"""A web application on a free loopback port, for stories and tests that speak HTTP to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from pacorl.web.site import listening


class QuickServer(uvicorn.Server):
    """Sees within a hundredth of a second that it is to end, not within a tenth: tests start dozens."""

    async def main_loop(self) -> None:
        await self.on_tick(0)  # it writes the headers that every response has
        while not self.should_exit:
            await asyncio.sleep(0.01)


@contextmanager
def serving_app(app: Any) -> Iterator[str]:
    """Serves `app` in a thread while the block runs; yields its URL."""
    server = QuickServer(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))
    with listening("127.0.0.1", 0) as (listener, url):  # who asks before the server runs waits in the socket's queue
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join()
