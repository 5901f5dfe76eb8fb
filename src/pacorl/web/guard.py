"""Checks of a request before its body is read, by all servers: host, origin, token and size."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS_VARIABLE = "PACORL_HOSTS"
"""Further names of a server, separated by commas, for instance behind a proxy."""
HEALTH = "/health"
"""Path that answers under any name: a load balancer may have another than callers, and the answer is no secret."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
BODY_BYTES = 4 * 2**20
"""Largest body of a route without uploads, announced or received."""
MOST_MARKS = 2**16
"""Most brackets, braces and commas of a JSON body, which bound its values before it is parsed."""


class RefusedError(ValueError):
    """A refused request, without any effect. `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Guard:
    """ASGI middleware of all checks, in order of cost; a body is read last.

    Args:
        answer: turns a refusal into the server's form of an error.
        admit: raises RefusedError for a forbidden request, by its headers alone.
        uploads: paths whose bodies may have `upload_bytes`; others have BODY_BYTES, and reading requests no body.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        answer: Callable[[RefusedError], ASGIApp],
        admit: Callable[[Request], Awaitable[None]],
        uploads: Collection[str] = (),
        upload_bytes: int = BODY_BYTES,
    ) -> None:
        self.app = app
        self.answer = answer
        self.admit = admit
        self.uploads = uploads
        self.upload_bytes = upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            if scope["path"] != HEALTH:
                check_host(scope)
            check_origin(scope)
            await self.admit(Request(scope))
            body = await self._read(scope, receive)
        except RefusedError as refusal:
            await self.answer(refusal)(scope, receive, send)
            return
        replayed = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            """Return the body once more, and further messages afterwards."""
            return next(replayed, None) or await receive()

        await self.app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Read the whole body. Raises RefusedError if it is too large, or the client is gone."""
        # The announced length, which refuses most large bodies unread.
        most = self.upload_bytes if scope["path"] in self.uploads else BODY_BYTES
        most = 0 if scope["method"] in READING else most
        too_large = RefusedError(f"the body is larger than {most} bytes", status=413)
        headers = Headers(scope=scope)
        announced = headers.get("content-length", "0")
        if not (announced.isascii() and announced.isdigit()) or len(announced) > 20 or int(announced) > most:
            raise too_large

        # An announcement may be missing (a chunked body) or wrong, so the bytes are counted too. FastAPI parses JSON of
        # this content type alone.
        is_json = "json" in headers.get("content-type", "").lower()
        chunks: list[bytes] = []
        size = marks = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise too_large
            chunk = message.get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
            if size > most:
                raise too_large
            if is_json:
                marks += chunk.count(b"[") + chunk.count(b"{") + chunk.count(b",")
                if marks > MOST_MARKS:
                    raise RefusedError(f"the body has more than {MOST_MARKS:,} brackets and commas", status=413)
            if not message.get("more_body"):
                return b"".join(chunks)


def check_host(scope: Scope) -> None:
    """Raise RefusedError for a name of another machine: a page of that name may have been rebound to this one.

    Addresses are accepted, since no page can rebind an address.
    """
    try:
        host = (urlsplit(f"//{Headers(scope=scope).get('host', '')}").hostname or "").rstrip(".")
    except ValueError:
        host = ""
    if not _is_own(host):
        fix = f"open it by its address, or start it with {HOSTS_VARIABLE}={host[:80]}"
        raise RefusedError(f"this server is not called {host[:80]!r}; {fix}", status=421)


def check_public_url(url: str) -> None:
    """Raise ValueError for an address under which this server would answer nobody."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url[:80]!r} is no address; write https://NAME")
    if not _is_own(parts.hostname):
        raise ValueError(f"{url[:80]}: the server refuses this name; start it with {HOSTS_VARIABLE}={parts.hostname}")


def _is_own(host: str) -> bool:
    further = os.environ.get(HOSTS_VARIABLE, "").lower().replace(",", " ").split()
    return _is_address(host) or host in _own_names() or host in further


def check_origin(scope: Scope) -> None:
    """Raise RefusedError if a page of another origin asks for a change."""
    if scope["method"] in READING:
        return
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    # Not by urlsplit, which raises for half an address.
    foreign = origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
    if foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise RefusedError("a page of another site may change nothing here", status=403)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@cache
def _own_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, f"{name}.local", socket.getfqdn().lower()})
