"""The base of the project's servers: files with a strict policy, links that sign people in, errors as one line of JSON.

site = Site("pacorl studio", PAGE, cookie="pacorl_studio", sign_in=sign_in, max_body=2**20)
app = site.app([("GET", "/api/state", state)], state=shared)
with listening("127.0.0.1", 8767) as (listener, url):
    run(app, listener)
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Route = tuple[str, str, Callable[..., Any]]
"""(method, path, endpoint)."""

SHARED_FILES = Path(__file__).parent / "page"
FILE_TYPES = {".js": "text/javascript", ".css": "text/css"}
HEADERS = {
    # Nothing from elsewhere and nothing inline: a theme or a reason that holds markup can run nothing.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # a join link holds a token
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Session:
    """What a token opens."""

    path: str = "/"
    """The page that its join link leads to."""
    expires: float | None = None
    """When its cookie ends, in seconds since 1970; None for the end of the browser's session."""


@dataclass(frozen=True, slots=True)
class Site:
    """A folder of pages and the HTTP API behind them."""

    title: str
    folder: Path
    """index.html is served as `/`, NAME.html as `/NAME`, scripts and styles as `/page/NAME`, and `/page/base.css`."""
    cookie: str
    sign_in: Callable[[str], Session]
    """Raises RefusedError for a token that opens nothing."""
    max_body: int
    """Bytes of one request."""

    def app(self, routes: Sequence[Route], *, state: object) -> FastAPI:
        """The site as an application; endpoints find `state` as `request.app.state.shared`."""
        app = FastAPI(title=self.title, docs_url=None, redoc_url=None, openapi_url=None)
        app.state.shared = state
        app.add_middleware(BodyLimit, max_bytes=self.max_body, answer=error_response)
        app.middleware("http")(_with_headers)
        app.add_exception_handler(RefusedError, lambda request, error: error_response(error))
        app.add_exception_handler(RequestValidationError, _malformed)
        pages = sorted(self.folder.glob("*.html"))
        addresses = {"/" if page.stem == "index" else f"/{page.stem}": page for page in pages}
        shared: list[Route] = [("GET", address, _endpoint(page)) for address, page in addresses.items()]
        shared += [("GET", "/page/{name}", self._page_file), ("GET", "/join/{token}", self._join)]
        shared.append(("GET", "/health", lambda: {"status": "ok"}))
        for method, path, endpoint in [*shared, *routes]:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
        return app

    def token(self, request: Request) -> str:
        """The token of a request, from `Authorization: Bearer` or the cookie; empty if it has neither."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        return bearer if scheme.lower() == "bearer" else request.cookies.get(self.cookie, "")

    def _page_file(self, name: str) -> Response:
        # By the folders' own listings, so that no name can lead out of them.
        folders = (SHARED_FILES, self.folder)
        files = {path.name: path for folder in folders for path in folder.iterdir() if path.suffix in FILE_TYPES}
        if name not in files:
            raise RefusedError("there is no such file", status=404)
        return FileResponse(files[name], media_type=FILE_TYPES[files[name].suffix])

    def _join(self, token: str) -> Response:
        """Trades the link's token for a cookie, so that it leaves the address bar."""
        try:
            session = self.sign_in(token)
        except RefusedError as error:
            return PlainTextResponse(f"{error}.\n", status_code=error.status)
        expires = None if session.expires is None else formatdate(session.expires, usegmt=True)
        response = RedirectResponse(session.path, status_code=303)
        # "strict": other sites' pages cannot send it along, so they cannot act for whoever is signed in.
        response.set_cookie(self.cookie, token, httponly=True, samesite="strict", expires=expires)
        return response


def _endpoint(path: Path) -> Callable[[], Response]:
    # A closure: an endpoint's parameters are filled from the request, so the path must not be one.
    return lambda: FileResponse(path)


async def _with_headers(request: Request, proceed: Callable[[Request], Any]) -> Response:
    response: Response = await proceed(request)
    for name, text in HEADERS.items():
        response.headers.setdefault(name, text)
    return response


class RefusedError(ValueError):
    """A request that is not carried out; nothing has changed. `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class BodyLimit:
    """ASGI middleware: refuses a body of more than `max_bytes`, as announced or as it comes, before the application.

    `answer` turns the refusal (413) into the server's form of an error.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, answer: Callable[[RefusedError], ASGIApp]) -> None:
        self.app, self.max_bytes, self.answer = app, max_bytes, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        fits = announced.isdigit() and int(announced) <= self.max_bytes
        # An announcement may be missing (a chunked body) or wrong, so the bytes are counted too.
        body = await self._read(receive) if fits else None
        if body is None:
            refusal = RefusedError(f"the body is larger than {self.max_bytes} bytes", status=413)
            await self.answer(refusal)(scope, receive, send)
            return
        replayed = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            """The body once more, and afterwards whatever comes."""
            return next(replayed, None) or await receive()

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if it is too large, or the client has gone."""
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_bytes:
                return None
            if not message.get("more_body"):
                return b"".join(chunks)


def error_response(error: Exception) -> JSONResponse:
    """`{"error": "one line"}` with the error's status; 422 for an error that has none."""
    return JSONResponse({"error": str(error)}, status_code=getattr(error, "status", 422))


def validation_message(error: RequestValidationError) -> str:
    """Every field of a request that is not as its form demands, on one line."""
    faults = (f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors())
    return "; ".join(faults) or "malformed request"


def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(RefusedError(validation_message(error), status=422))


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A bound socket and its URL; port 0 takes a free one. Raises OSError if the port is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)  # whoever follows the link at once is kept waiting, not refused
        except OSError as error:
            raise OSError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --port") from None
        yield listener, f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM."""
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has shut down
        uvicorn.Server(config).run(sockets=[listener])
