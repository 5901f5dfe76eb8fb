"""The base of all servers: files with a strict policy, links that sign people in, errors as one line of JSON.

router = APIRouter(route_class=JsonRoute)

@router.get("/api/state")
def state(): ...

site = Site("pacorl studio", PAGE, cookie="pacorl_studio", sign_in=sign_in)
app = site.app(router, state=shared)
with listening("127.0.0.1", 8767) as (listener, url):
    run(app, sockets=[listener])
"""

from __future__ import annotations

import html
import secrets
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool

from pacorl.io.documents import read_text
from pacorl.web.forms import Form, JsonRoute, Text, validation_message
from pacorl.web.guard import BODY_BYTES, HEALTH, READING, Guard, RefusedError

SHARED_FILES = Path(__file__).parent / "page"
OPEN = ("/join", "/leave")
"""Paths that accept a post without a token."""
FILE_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MOST_CONNECTIONS = 800
"""Further requests are answered with 503; a process may have 1,024 files open by default."""
KEEP_ALIVE_SECONDS = 10
HEADERS = {
    # No content from other servers and no inline scripts: markup in a theme or a reason cannot run.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Session:
    """Rights of a token."""

    path: str = "/"
    """Target page of its join link."""
    expires: float | None = None
    """End of its cookie, in seconds since 1970; None for the end of the browser's session."""


class JoinForm(Form):
    token: Text


@dataclass(frozen=True, slots=True)
class Site:
    """Pages of a folder and the HTTP API behind them."""

    title: str
    folder: Path
    """index.html is served as `/`, NAME.html as `/NAME`, scripts and styles as `/page/NAME`, and `/page/base.css`."""
    cookie: str
    sign_in: Callable[[str], Session]
    """Raises RefusedError for an unknown token."""
    uploads: Collection[str] = ()
    """Paths whose bodies may have `upload_bytes`."""
    upload_bytes: int = BODY_BYTES

    def app(self, router: APIRouter, *, state: object) -> FastAPI:
        """Build the application of pages and a router's API; endpoints find `state` as `request.app.state.shared`."""
        app = FastAPI(title=self.title, docs_url=None, redoc_url=None, openapi_url=None)
        app.router.route_class = JsonRoute
        app.state.shared = state

        app.add_middleware(
            Guard,
            answer=error_response,
            admit=self._admit,
            uploads=self.uploads,
            upload_bytes=self.upload_bytes,
        )
        app.middleware("http")(with_headers)
        app.add_exception_handler(RefusedError, _refused)
        app.add_exception_handler(RequestValidationError, _malformed)

        for page in sorted(self.folder.glob("*.html")):
            app.get("/" if page.stem == "index" else f"/{page.stem}")(_endpoint(page))
        app.get("/page/{name}")(self._page_file)
        app.get("/join")(self._join_page)
        app.post("/join")(self._join)
        app.post("/leave")(self._leave)
        app.get(HEALTH)(lambda: {"status": "ok"})
        app.include_router(router)
        return app

    def token(self, request: Request) -> str:
        """Read a request's token, from `Authorization: Bearer` or the cookie; empty if it has neither."""
        # A bearer token first: programs have no cookies.
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return bearer
        return request.cookies.get(self._cookie(request), "")

    def browser(self, request: Request) -> str:
        """Read the id of a signed-in browser; empty for a client with a token instead of a cookie."""
        return request.cookies.get(self._cookie(request, "browser"), "")

    def _cookie(self, request: Request, suffix: str = "") -> str:
        # A cookie belongs to all ports of a host, and two servers must not overwrite each other's.
        _, port = request.scope.get("server") or ("", 0)
        if suffix:
            return f"{self.cookie}_{suffix}_{port}"
        return f"{self.cookie}_{port}"

    async def _admit(self, request: Request) -> None:
        """Refuse a change, before its body is read, from a client without a valid token."""
        if request.method not in READING and request.scope["path"] not in OPEN:
            token = self.token(request)
            if not token:
                raise RefusedError("open the page by the link that you were given", status=401)
            await run_in_threadpool(self.sign_in, token)  # it may look into a database

    def _page_file(self, name: str) -> Response:
        # By the folders' own listings, so that no name can lead out of them.
        for path in (*self.folder.iterdir(), *SHARED_FILES.iterdir()):
            if path.name == name and path.suffix in FILE_TYPES:
                return FileResponse(path, media_type=FILE_TYPES[path.suffix])
        raise RefusedError("there is no such file", status=404)

    def _join_page(self, request: Request) -> Response:
        """Return the page of every join link, whose script posts the token behind the `#`.

        A link on a foreign page could sign a person in as another, so a visitor from a page is asked first.
        """
        # "none": typed, a bookmark, or opened by another program.
        asks = "no" if request.headers.get("sec-fetch-site") == "none" else "yes"
        page = read_text(SHARED_FILES / "join.html")
        return HTMLResponse(page.format(title=html.escape(self.title), asks=asks))

    def _join(self, form: JoinForm, request: Request) -> Response:
        """Trade a link's token for cookies, and return the path of its page."""
        session = self.sign_in(form.token)
        response = JSONResponse({"path": session.path})
        expires = None if session.expires is None else formatdate(session.expires, usegmt=True)
        options = _cookie_options(request)
        browser = self.browser(request) or secrets.token_urlsafe(8)
        response.set_cookie(self._cookie(request), form.token, expires=expires, **options)
        response.set_cookie(self._cookie(request, "browser"), browser, expires=expires, **options)
        return response

    def _leave(self, request: Request) -> Response:
        """End this browser's cookies; the link opens the page again."""
        response = PlainTextResponse("You have signed out here. Your link opens the page again.\n")
        for suffix in ("", "browser"):
            response.delete_cookie(self._cookie(request, suffix), **_cookie_options(request))
        return response


def _cookie_options(request: Request) -> dict[str, Any]:
    # "strict": pages of other sites cannot send them, and so cannot act for the signed-in person.
    return {"httponly": True, "samesite": "strict", "secure": request.url.scheme == "https"}


def _endpoint(path: Path) -> Callable[[], Response]:
    # A closure: an endpoint's parameters are filled from the request, so the path must not be one.
    return lambda: FileResponse(path)


async def with_headers(request: Request, proceed: Callable[[Request], Any]) -> Response:
    """Add HEADERS to every response that does not set them itself; a middleware."""
    response: Response = await proceed(request)
    for name, text in HEADERS.items():
        response.headers.setdefault(name, text)
    return response


def error_response(error: Exception) -> JSONResponse:
    """Write `{"error": "one line"}` with the error's status, or 422 if it has none."""
    return JSONResponse({"error": str(error)}, status_code=getattr(error, "status", 422))


def _refused(request: Request, error: Exception) -> JSONResponse:
    return error_response(error)


def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(RefusedError(validation_message(error), status=422))


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """Bind a socket, and yield it with its URL; port 0 takes a free port. Raises OSError if the port is in use."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        # Otherwise closed connections would hold the port for a minute after its last server.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)  # early requests wait until the server starts
        except OSError as error:
            raise OSError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --port") from None
        yield listener, f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def run(app: Any, *, sockets: list[socket.socket], grace_seconds: int = 3) -> None:
    """Serve until SIGINT or SIGTERM, and finish running answers within `grace_seconds`."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        http="h11",
        ws="none",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace_seconds,
    )
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after it has shut down
        uvicorn.Server(config).run(sockets=sockets)
