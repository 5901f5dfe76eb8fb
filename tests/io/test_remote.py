"""Images by URL: what is fetched, and everything that is refused, from servers on this machine."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pacorl.io.images import ImageError, open_image
from pacorl.io.net import is_url
from pacorl.io.remote import fetch, open_source

LOOPBACK = "127.0.0.1"


def png(colour: str = "red", side: int = 16) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, "png")
    return buffer.getvalue()


class Site(BaseHTTPRequestHandler):
    """Answers by path; what was asked for lies in `server.requests`."""

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        kind, _, argument = self.path.removeprefix("/").partition("/")
        getattr(self, f"serve_{kind}", self.serve_missing)(argument)

    def answer(self, status: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def serve_image(self, argument: str) -> None:
        self.answer(200, png(argument.partition("?")[0] or "red"))

    def serve_page(self, argument: str) -> None:
        self.answer(200, b"<html>an image viewer</html>")

    def serve_missing(self, argument: str) -> None:
        self.answer(404)

    def serve_hops(self, argument: str) -> None:
        count = int(argument)
        self.answer(302, Location=f"/hops/{count - 1}" if count > 1 else "/image/blue", Set_Cookie="a=b")

    def serve_to(self, argument: str) -> None:
        self.answer(301, Location=argument)

    def serve_large(self, argument: str) -> None:
        """A body without a length, of as many bytes as are asked for."""
        self.send_response(200)
        self.end_headers()
        with self.lenient():
            self.wfile.write(bytes(int(argument)))

    def serve_claims(self, argument: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", argument)
        self.end_headers()

    def serve_drip(self, argument: str) -> None:
        """A byte now and then, each well within any timeout of a read."""
        self.send_response(200)
        self.end_headers()
        with self.lenient():
            for _ in range(1200):
                self.wfile.write(b"x")
                time.sleep(0.05)

    def lenient(self) -> Any:
        import contextlib

        return contextlib.suppress(OSError)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[[str], ThreadingHTTPServer]]:
    servers = []

    def serve(host: str) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer((host, 0), Site)
        server.requests = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def site(serving: Callable[[str], ThreadingHTTPServer]) -> ThreadingHTTPServer:
    return serving(LOOPBACK)


def at(server: ThreadingHTTPServer, path: str, host: str = LOOPBACK) -> str:
    return f"http://{host}:{server.server_address[1]}/{path}"


def test_an_image_is_fetched_without_credentials(site: ThreadingHTTPServer) -> None:
    image = open_source(at(site, "hops/3"))
    assert (image.getpixel((0, 0)), image.mode) == ((0, 0, 255), "RGB")
    requests = site.requests[-4:]  # type: ignore[attr-defined]
    assert [path for path, _ in requests] == ["/hops/3", "/hops/2", "/hops/1", "/image/blue"]
    for _, headers in requests:
        assert {"Authorization", "Referer"}.isdisjoint(headers)


def test_a_source_is_a_file_or_an_url(site: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png("lime"))
    assert open_source(str(tmp_path / "a.png")).getpixel((0, 0)) == (0, 255, 0)
    fetched = open_source(at(site, "image/teal?query=ä"))
    assert fetched.tobytes() == open_image(png("teal")).tobytes()
    assert [is_url(source) for source in ("HTTPS://a/b", "http://a", "a.png", "ftp://a", tmp_path)] == [
        True, True, False, False, False
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hops/4", "Exceeded maximum allowed redirects"),
        ("nowhere", "the server answers 404; check the URL"),
        ("to/file:///etc/hostname", "unsupported protocol|not supported"),
        ("page", "not an image of a known format"),
        ("large/20000001", "20,000,000|20000000"),
        ("claims/20000001", "check the URL"),
        ("claims/many", "check the URL"),
    ],
)
def test_what_is_refused_is_named_in_one_line(site: ThreadingHTTPServer, path: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as error:
        open_source(at(site, path))
    assert str(error.value).startswith(f"{at(site, path)}")
    assert "\n" not in str(error.value)


def test_the_deadline_holds_however_slowly_a_server_drips(site: ThreadingHTTPServer) -> None:
    start = time.monotonic()
    with pytest.raises(ImageError, match=r"no answer within 0\.3 s"):
        fetch(at(site, "drip"), seconds=0.3)
    assert time.monotonic() - start < 45  # the body takes a minute
