"""Guard of all servers: Host, Origin, token and body size, for requests and for the handshake of a websocket.

door = Door("pacorl studio", cookie="pacorl_studio", page_of=page_of)   # token → path of its page
app.include_router(door.router())                                       # /join#TOKEN trades the token for a cookie
app.add_middleware(Guard, admit=door.admit)
with listening("127.0.0.1", 8767) as (listener, url):
    run(app, listener)
"""

from __future__ import annotations

import html
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pacorl.io.documents import read_text

SHARED_FILES = Path(__file__).parent / "shared_page"
HOSTS_VARIABLE = "PACORL_HOSTS"
"""Further names of a server, separated by commas, for instance behind a proxy."""
HEALTH = "/health"
"""Path that answers under any name: a load balancer may have another than callers, and the answer is no secret."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
BODY_BYTES = 4 * 2**20
"""Largest body of a route without uploads."""
COOKIE_SECONDS = 365 * 24 * 3600
HEADERS = {
    # No content from other servers and no inline scripts: markup in a theme or a reason cannot run.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
POLICY_VIOLATION = 1008
"""Close code of a refused websocket."""


class RefusedError(ValueError):
    """A refused request, without any effect. `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def error_response(refusal: RefusedError) -> JSONResponse:
    return JSONResponse({"error": str(refusal)}, status_code=refusal.status)


@dataclass(frozen=True)
class Guard:
    """ASGI middleware of all checks, in order of cost; a body is read last."""

    app: ASGIApp
    admit: Callable[[HTTPConnection], Awaitable[None]]
    """Raises RefusedError for a forbidden connection, by its path and headers alone."""
    answer: Callable[[RefusedError], ASGIApp] = error_response
    """The server's form of an error."""
    is_upload: Callable[[str], bool] = lambda path: False
    """Whether a path's bodies may have `upload_bytes`; others have BODY_BYTES."""
    upload_bytes: int = BODY_BYTES
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)
    """Headers of every response that does not set them itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, text in self.headers.items():
                    headers.setdefault(name, text)
            await send(message)

        connection = HTTPConnection(scope)
        try:
            check_host(connection)
            check_origin(connection)
            await self.admit(connection)
            if scope["type"] == "http":
                receive = await self._read(scope["path"], receive)
            await self.app(scope, receive, send_with_headers)  # an endpoint may refuse too, before it answers
        except RefusedError as refusal:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            else:
                await self.answer(refusal)(scope, receive, send_with_headers)

    async def _read(self, path: str, receive: Receive) -> Receive:
        """Read the whole body, and return what gives it again. Raises RefusedError if it is too large."""
        most = self.upload_bytes if self.is_upload(path) else BODY_BYTES
        body = b""
        message: Message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
            if len(body) > most:
                raise RefusedError(f"the body is larger than {most} bytes", status=413)
        replayed = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(replayed, None) or await receive()

        return replay


def check_host(connection: HTTPConnection) -> None:
    """Raise RefusedError for a name of another machine: a page of that name may have been rebound to this one."""
    try:
        host = (urlsplit(f"//{connection.headers.get('host', '')}").hostname or "").rstrip(".")
    except ValueError:
        host = ""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return  # no page can rebind an address
    own = socket.gethostname().lower()
    further = os.environ.get(HOSTS_VARIABLE, "").lower().replace(",", " ").split()
    if host not in {"localhost", own, f"{own}.local", *further} and connection.scope["path"] != HEALTH:
        fix = f"open it by its address, or start it with {HOSTS_VARIABLE}={host[:80]}"
        raise RefusedError(f"this server is not called {host[:80]!r}; {fix}", status=421)


def check_origin(connection: HTTPConnection) -> None:
    """Raise RefusedError if a page of another origin asks for a change, or opens a websocket."""
    if connection.scope.get("method") in READING:
        return
    origin = connection.headers.get("origin")
    # Not by urlsplit, which raises for half an address.
    foreign = origin is not None and origin.partition("://")[2].lower() != connection.headers.get("host", "").lower()
    if foreign or connection.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise RefusedError("a page of another site may change nothing here", status=403)


class JoinForm(BaseModel):
    token: str = Field(max_length=1000)


@dataclass(frozen=True, slots=True)
class Door:
    """Links that sign people in: `/join#TOKEN` trades the token for a cookie."""

    title: str
    cookie: str
    page_of: Callable[[str], str]
    """Token → path of its page. Raises RefusedError for an unknown token."""
    is_open: Callable[[str], bool] = lambda path: False
    """Whether a path is read without a token; /join and /page are."""

    def token(self, connection: HTTPConnection) -> str:
        """Read the token, from `Authorization: Bearer` (programs have no cookies) or the cookie; empty without one."""
        scheme, _, bearer = connection.headers.get("authorization", "").partition(" ")
        return bearer if scheme.lower() == "bearer" else connection.cookies.get(self._cookie(connection), "")

    async def admit(self, connection: HTTPConnection) -> None:
        """Refuse a connection without a valid token."""
        path = connection.scope["path"]
        is_read = connection.scope.get("method") in READING
        if path in ("/join", HEALTH) or (is_read and (path.startswith("/page/") or self.is_open(path))):
            return
        token = self.token(connection)
        if not token:
            raise RefusedError("open the page by the link that you were given", status=401)
        self.page_of(token)

    def router(self) -> APIRouter:
        """Serve the page of every join link, whose script posts the token behind the `#`, and the shared files."""
        router = APIRouter()
        router.get(HEALTH)(lambda: {"status": "ok"})
        router.mount("/page/shared", StaticFiles(directory=SHARED_FILES))

        @router.get("/join")
        def join_page(request: Request) -> Response:
            # A link on a foreign page could sign a person in as another, so a visitor from a page is asked first.
            asks = "no" if request.headers.get("sec-fetch-site") == "none" else "yes"
            page = read_text(SHARED_FILES / "join.html")
            return HTMLResponse(page.format(title=html.escape(self.title), asks=asks))

        @router.post("/join")
        def join(form: JoinForm, request: Request) -> Response:
            response = JSONResponse({"path": self.page_of(form.token)})
            # "strict": pages of other sites cannot send it, and so cannot act for the signed-in person.
            is_secure = request.url.scheme == "https"
            options: dict[str, Any] = {"httponly": True, "samesite": "strict", "secure": is_secure}
            response.set_cookie(self._cookie(request), form.token, max_age=COOKIE_SECONDS, **options)
            return response

        return router

    def _cookie(self, connection: HTTPConnection) -> str:
        # A cookie belongs to all ports of a host, and two servers must not overwrite each other's.
        return f"{self.cookie}_{(connection.scope.get('server') or ('', 0))[1]}"


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """Bind a socket, and yield it with its URL; port 0 takes a free port. Raises OSError if the port is in use."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        # Else closed connections would hold the port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)  # early requests wait until the server starts
        except OSError as error:
            raise OSError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --port") from None
        yield listener, f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def run(app: Any, listener: socket.socket, *, grace_seconds: int = 3) -> None:
    """Serve until SIGINT or SIGTERM, and finish running answers within `grace_seconds`."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace_seconds)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has shut down
        uvicorn.Server(config).run(sockets=[listener])
