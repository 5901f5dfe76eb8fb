"""The base of the project's pages: files with a strict policy, links that sign people in, errors as one line of JSON.

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

from pacorl.web.guards import BodyLimit, RefusedError

Route = tuple[str, str, Callable[..., Any]]
"""(method, path, endpoint)."""

SHARED_FILES = Path(__file__).parent / "page"
FILE_TYPES = {".js": "text/javascript", ".css": "text/css"}
HEADERS = {
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
        app.add_exception_handler(RefusedError, _refused)
        app.add_exception_handler(RequestValidationError, _malformed)
        for method, path, endpoint in [*self._own_routes(), *routes]:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
        return app

    def token(self, request: Request) -> str:
        """The token of a request, from `Authorization: Bearer` or the cookie; empty if it has neither."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        return bearer if scheme.lower() == "bearer" else request.cookies.get(self.cookie, "")

    def _own_routes(self) -> Iterator[Route]:
        for page in sorted(self.folder.glob("*.html")):
            yield "GET", "/" if page.stem == "index" else f"/{page.stem}", _file_endpoint(page)
        yield "GET", "/page/{name}", self._page_file
        yield "GET", "/health", lambda: {"status": "ok"}
        yield "GET", "/join/{token}", self._join

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


def _file_endpoint(path: Path) -> Callable[[], Response]:
    # A closure: an endpoint's parameters are filled from the request, so the path must not be one.
    return lambda: FileResponse(path)


async def _with_headers(request: Request, proceed: Callable[[Request], Any]) -> Response:
    response: Response = await proceed(request)
    for name, text in HEADERS.items():
        response.headers.setdefault(name, text)
    return response


# --- errors ------------------------------------------------------------------------------------------------------


def error_response(error: Exception) -> JSONResponse:
    """`{"error": "one line"}` with the error's status; 422 for an error that has none."""
    return JSONResponse({"error": str(error)}, status_code=getattr(error, "status", 422))


def validation_message(error: RequestValidationError) -> str:
    """Every field of a request that is not as its form demands, on one line."""
    faults = (f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in error.errors())
    return "; ".join(faults) or "malformed request"


def _refused(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(RefusedError(validation_message(error), status=422))


# --- serving -----------------------------------------------------------------------------------------------------


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A bound socket and its URL; port 0 takes a free one.

    Raises:
        OSError: if the port is taken; it names the option.
    """
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
