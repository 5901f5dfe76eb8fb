"""A web application on a free loopback port, for stories and tests that speak HTTP to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from pacorl.web import listening


class QuickServer(uvicorn.Server):
    """Server that ends within a hundredth of a second instead of a tenth, since tests start dozens."""

    async def main_loop(self) -> None:
        await self.on_tick(0)  # sets the headers of every response
        while not self.should_exit:
            await asyncio.sleep(0.01)


@contextmanager
def serving_app(app: Any) -> Iterator[str]:
    """Serve `app` in a thread during the block; yield its URL."""
    server = QuickServer(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))
    # A request before the server runs waits in the socket's queue.
    with listening("127.0.0.1", 0) as (listener, url):
        # A thread and not a process, so that a test can look into the application.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join()
