"""uvicorn with time-outs of idle connections, and a bound on their number below the limit of open files."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""Timeout of the request head, and of each BODY_BYTES of body."""
BODY_BYTES = 2**16
"""Least bytes of a body in HEADER_SECONDS: the rate of the slowest mobile networks."""
PIECE_BYTES = 2**14
"""Most bytes parsed in one turn of a connection."""
SMALL_PIECE_BYTES = 2**11
"""The same of a body in tiny chunks: 16 KiB in chunks of one byte take 30 ms, while all others wait."""
FRAMING_BYTES = 2**19
"""Most bytes of a request outside of its body: header and sizes of chunks. Chunks of 1 KiB need 7 in 1,024."""
FRAMING_AHEAD = 2**16
"""Most of them beyond the bytes of the body so far: chunks of one byte need five times as many."""
SPARE_FILES = 128
"""Open files of a process reserved for models, a database, the log, and the few batches of connections that are
accepted before the first of them is counted here."""
UNLIMITED = 10_000
"""Most connections where the system sets no limit."""
ACCEPTED_TOGETHER = 16
QUEUED = 1024
"""Connections that wait in the kernel until they are accepted; it drops further connections, whose clients retry."""


class Connection(H11Protocol):
    """Connection with a timeout of incomplete requests; the longest waiting is closed if there are too many.

    uvicorn waits for a header and a body for ever, and asyncio fills the log once no file is left for the next
    connection.
    """

    _received = 0
    """Bytes since the last reset of the clock."""
    _framing = 0
    """Bytes of the request outside of its body."""
    _content = 0
    """Bytes of the request's body."""
    _piece_bytes = PIECE_BYTES
    """Most bytes of the next turn."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pieces: deque[bytes] = deque()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._look)
        # A closing connection stays in the set for another turn of the loop, in which several may come.
        live = []
        for c in self.connections:
            if isinstance(c, Connection) and not c.transport.is_closing():
                live.append(c)

        if len(live) > most_connections():
            waiting = [connection for connection in live if connection.waits]
            min(waiting, key=attrgetter("_since")).transport.abort()

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
            piece = self._pieces[0]
            if len(piece) > self._piece_bytes:
                self._pieces.insert(1, piece[self._piece_bytes :])
            self._parse(piece[: self._piece_bytes])
            self._pieces.popleft()
        if self._pieces:
            self.loop.call_soon(self._parse_next)

    def _parse(self, data: bytes) -> None:
        cycle = self.cycle
        content = len(cycle.body) if cycle else 0
        super().data_received(data)
        self._received += len(data)
        is_new = self.cycle is not cycle
        if is_new or self._received >= BODY_BYTES:  # a header is whole, or a body comes along
            self._since = self.loop.time()
            self._received = 0

        # A body in chunks of one byte costs the server a hundred times as much as the sender.
        if is_new:
            self._framing = 0
            self._content = 0
            self._piece_bytes = PIECE_BYTES
        else:
            added = len(cycle.body) - content if cycle else 0
            self._framing += len(data) - added
            self._content += added
            self._piece_bytes = SMALL_PIECE_BYTES if 2 * added < len(data) else PIECE_BYTES
        if self._framing > min(FRAMING_BYTES, FRAMING_AHEAD + self._content):
            self.transport.abort()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _unsupported_upgrade_warning(self) -> None:
        """Answer a websocket request as a plain request, without uvicorn's advice to install a library."""

    def _look(self) -> None:
        if not self.waits:
            self._since = self.loop.time()
        left = self._since + HEADER_SECONDS - self.loop.time()
        if left <= 0:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(left, self._look)


class Server(uvicorn.Server):
    """Server with separate limits of accepted and of waiting connections.

    asyncio has one number for both, accepts as many before it handles the first, and logs each connection without a
    free file.
    """

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[int], None] | None = None) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_stop:
            connections = list(self.server_state.connections)
            self._on_stop(sum(isinstance(c, Connection) and not c.waits for c in connections))
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUED)


def most_connections() -> int:
    """Return the number of connections within the process's limit of open files."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return UNLIMITED
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return UNLIMITED
    return max(8, files - SPARE_FILES)


def run(
    app: Any,
    *,
    sockets: list[socket.socket],
    grace_seconds: int = 3,
    on_stop: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, and finish running answers within `grace_seconds`.

    Args:
        on_stop: called at the signal with the number of running requests.
    """
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "http": Connection, "ws": "none"}
    config = uvicorn.Config(app, timeout_graceful_shutdown=grace_seconds, backlog=ACCEPTED_TOGETHER, **options)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has shut down
        Server(config, on_stop).run(sockets=sockets)
