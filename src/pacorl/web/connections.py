"""The project's way to run uvicorn: no connection is held for nothing, and there are never more than files allow."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""How long a connection may take to say what it wants, and for each BODY_BYTES of what it sends with it."""
BODY_BYTES = 2**16
"""Of a body in HEADER_SECONDS, at least: as much as the slowest mobile networks carry."""
PIECE_BYTES = 2**14
"""Most bytes of a connection that are parsed before others have their turn: of chunks of one byte, 30 ms."""
FRAMING_BYTES = 2**19
"""Most bytes of a request that are not its body: a header, and the sizes of chunks. Chunks of 1 KiB need 7 in 1,024."""
SPARE_FILES = 128
"""Of the files that a process may have open, so many are not connections: models, a database, the log, and the few
batches of connections that were accepted before the first of them is seen here."""
UNLIMITED = 10_000
"""Most connections where the system sets no limit."""
ACCEPTED_TOGETHER = 16
QUEUED = 1024
"""Connections that wait in the kernel until they are accepted; it then drops further ones, which come again."""


class Connection(H11Protocol):
    """Hangs up on who sends no whole request in time, and first on them if there are too many connections.

    uvicorn waits for a header and a body for ever, and asyncio fills the log once no file is left for the next
    connection.
    """

    _received = 0
    """Bytes since the clock was set."""
    _framing = 0
    """Bytes of the request that were no part of its body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pieces: deque[bytes] = deque()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._look)
        # One that is closing stays in the set for another turn of the loop, in which several may come.
        live = [c for c in self.connections if isinstance(c, Connection) and not c.transport.is_closing()]
        if len(live) > most_connections():
            min((c for c in live if c.waits), key=lambda waiting: waiting._since).transport.abort()

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn: no request is under way, or its body is not all there."""
        return self.cycle is None or bool(self.cycle.response_complete) or bool(self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        is_idle = not self._pieces
        self._pieces += (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
        if is_idle:
            self._parse_next()

    def _parse_next(self) -> None:
        """Parse one piece, and let other connections have their turn before the next."""
        if self.transport.is_closing():
            self._pieces.clear()
        else:
            self._parse(self._pieces[0])
            self._pieces.popleft()
        if self._pieces:
            self.loop.call_soon(self._parse_next)

    def _parse(self, data: bytes) -> None:
        cycle, content = self.cycle, len(self.cycle.body) if self.cycle else 0
        super().data_received(data)
        self._received += len(data)
        is_new = self.cycle is not cycle
        if is_new or self._received >= BODY_BYTES:  # a header is whole, or a body comes along
            self._since, self._received = self.loop.time(), 0

        # A body in chunks of one byte costs a hundred times what it costs the sender.
        framing = len(data) - (len(self.cycle.body) - content if self.cycle and not is_new else 0)
        self._framing = 0 if is_new else self._framing + framing
        if self._framing > FRAMING_BYTES:
            self.transport.abort()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Answer a websocket request as a plain one, in silence: uvicorn's advice to install one is not for users."""

    def _look(self) -> None:
        if not self.waits:
            self._since = self.loop.time()
        if (left := self._since + HEADER_SECONDS - self.loop.time()) <= 0:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(left, self._look)


class Server(uvicorn.Server):
    """Accepts few connections at a time, and lets many wait.

    asyncio has one number for both, accepts as many before it looks at the first, and logs each that finds no file.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUED)


def most_connections() -> int:
    """How many connections the process's limit of open files leaves room for."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return UNLIMITED
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, files - SPARE_FILES) if files != resource.RLIM_INFINITY else UNLIMITED


def run(app: Any, *, sockets: list[socket.socket], grace_seconds: int = 3) -> None:
    """Serve until SIGINT or SIGTERM, which answers that are under way outlive by `grace_seconds`."""
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "http": Connection, "ws": "none"}
    config = uvicorn.Config(app, timeout_graceful_shutdown=grace_seconds, backlog=ACCEPTED_TOGETHER, **options)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has shut down
        Server(config).run(sockets=sockets)
