"""Guard of all servers: Host, Origin and token, for requests and for the handshake of a websocket.

app = FastAPI(max_body_size=BODY_BYTES)
door = Door("pacorl_studio", page_of)      # token → path of its page
app.include_router(door.router())          # /join#TOKEN trades the token for a cookie
app.add_middleware(Guard, admit=door.admit)
with listening("127.0.0.1", 8767) as (listener, url):
    run(app, listener)
"""

import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Body, HTTPException, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pacorl.io.documents import read_text
from pacorl.io.files import PRIVATE, write_atomic

SHARED_FILES = Path(__file__).parent / "shared_page"
HOSTS_VARIABLE = "PACORL_HOSTS"
"""Further names of a server, separated by commas, for instance behind a proxy."""
HEALTH = "/health"
"""Path that answers under any name: a load balancer may have another than callers, and the answer is no secret."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
ADDRESS = re.compile(r"(\d+\.){3}\d+|\[[0-9a-f:.]+\]")
BODY_BYTES = 4 * 2**20
"""Largest body of a server without uploads, and of a join."""
COOKIE_SECONDS = 365 * 24 * 3600
GRACE_SECONDS = 5
ADVICE = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "10"}}
"""Headers of refusals by their status."""
HEADERS = {
    # No content from other servers and no inline scripts: markup in a theme or a reason cannot run.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
POLICY_VIOLATION = 1008
"""Close code of a refused websocket."""


class RefusedError(HTTPException):
    """A refused request, without any effect."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(status, message)


def refused(message: str, status: int) -> Response:
    """Answer with a refusal in FastAPI's form, and in OpenAI's, whose client shows no other."""
    return JSONResponse({"detail": message, "error": {"message": message, "code": status}}, status, ADVICE.get(status))


@dataclass(frozen=True)
class Guard:
    """ASGI middleware of all checks, in order of cost."""

    app: ASGIApp
    admit: Callable[[HTTPConnection], None]
    """Raises RefusedError for a forbidden connection, by its path and headers alone."""
    headers: Mapping[str, str] = field(default_factory=lambda: HEADERS)
    """Headers of every response that does not set them itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)

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
            self.admit(connection)
        except RefusedError as refusal:
            if scope["type"] == "websocket":
                # Closed with a code: uvicorn logs an error for each that is answered over HTTP.
                return await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            answer = refused(refusal.detail, refusal.status_code)
            # A person who opened a page reads a sentence.
            if connection.headers.get("accept", "").startswith("text/html"):
                sentence = f"This page does not open: {escape(refusal.detail)}."
                page = read_text(SHARED_FILES / "join.html").replace("<!-- refusal -->", sentence)
                answer = HTMLResponse(page, refusal.status_code)
            return await answer(scope, receive, send_with_headers)
        await self.app(scope, receive, send_with_headers)
        return None


def check_host(connection: HTTPConnection) -> None:
    """Raise RefusedError for a name of another machine: a page of that name may have been rebound to this one."""
    host = re.sub(r":\d*$", "", connection.headers.get("host", "").lower()).rstrip(".")
    # No page can rebind an address.
    if ADDRESS.fullmatch(host) or connection.scope["path"] == HEALTH:
        return
    hostname = socket.gethostname().lower()
    further = os.environ.get(HOSTS_VARIABLE, "").lower().replace(",", " ").split()
    if host not in {"localhost", hostname, *further}:
        raise RefusedError(f"open it by its address, or start it with {HOSTS_VARIABLE}={host}", status=421)


def check_origin(connection: HTTPConnection) -> None:
    """Raise RefusedError if a page of another origin asks for a change, or opens a websocket."""
    origin = connection.headers.get("origin", "")
    is_own = origin.partition("://")[2].lower() == connection.headers.get("host", "").lower()
    # Browsers name the origin of every change; programs have none.
    if origin and not is_own and connection.scope.get("method") not in READING:
        raise RefusedError("a page of another site may change nothing here", status=403)


def secret_in(path: Path) -> str:
    """Read the secret of a folder's links, or make it: links and their cookies stay good at every start."""
    if not path.is_file():
        write_atomic(path, secrets.token_urlsafe(32), mode=PRIVATE)
    return read_text(path).strip()


@dataclass(frozen=True, slots=True)
class Door:
    """Links that sign people in: `/join#TOKEN` trades the token for a cookie."""

    cookie: str
    page_of: Callable[[str], str]
    """Token → path of its page. Raises RefusedError for an unknown token."""

    def token(self, connection: HTTPConnection) -> str:
        """Read the token from the cookie; empty without one."""
        return connection.cookies.get(self._cookie(connection), "")

    def admit(self, connection: HTTPConnection) -> None:
        """Refuse a connection without a valid token; pages without content are read by everybody."""
        if not re.match(r"/join$|/page/", connection.scope["path"]):
            self.page_of(self.token(connection))

    def router(self) -> APIRouter:
        """Serve the page of every join link, whose script posts the token behind the `#`, and the shared files."""
        router = APIRouter(max_body_size=BODY_BYTES)
        router.get("/join")(lambda: FileResponse(SHARED_FILES / "join.html"))
        router.mount("/page/shared", StaticFiles(directory=SHARED_FILES))

        @router.post("/join")
        def join(token: Annotated[str, Body(embed=True)], request: Request) -> Response:
            response = JSONResponse({"path": self.page_of(token)})
            # "strict": pages of other sites cannot send it, and so cannot act for the signed-in person.
            options: dict[str, Any] = {"secure": request.url.scheme == "https", "max_age": COOKIE_SECONDS}
            response.set_cookie(self._cookie(request), token, httponly=True, samesite="strict", **options)
            return response

        return router

    def _cookie(self, connection: HTTPConnection) -> str:
        # A cookie belongs to all ports of a host, and two servers must not overwrite each other's.
        return f"{self.cookie}_{connection.scope['server'][1]}"


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """Bind a socket, and yield it with its URL; port 0 takes a free port. Raises OSError, such as for a port in use."""
    is_v6 = ":" in host
    # Early requests wait in its queue until the server starts.
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if is_v6 else socket.AF_INET)
    except OSError as error:
        raise OSError(f"{error.strerror}; --port takes another one") from None
    with listener:
        yield listener, f"http://{f'[{host}]' if is_v6 else host}:{listener.getsockname()[1]}"


def run(app: Any, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, and finish running answers within `GRACE_SECONDS`."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has shut down
        uvicorn.Server(config).run(sockets=[listener])
