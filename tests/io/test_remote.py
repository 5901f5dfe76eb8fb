"""Images by URL: what is fetched, and everything that is refused, from servers on this machine."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image

from pacorl.io import remote as remote_images
from pacorl.io.images import ImageError, open_image
from pacorl.io.net import is_url
from pacorl.io.remote import PRIVATE_VARIABLE, fetch, fetch_image, is_public, open_source

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


def anything(address: str) -> bool:
    return True


def test_an_image_is_fetched_without_credentials_or_cookies(site: ThreadingHTTPServer) -> None:
    image = fetch_image(at(site, "hops/3"), allow_private=True)
    assert (image.getpixel((0, 0)), image.mode) == ((0, 0, 255), "RGB")
    requests = site.requests[-4:]  # type: ignore[attr-defined]
    assert [path for path, _ in requests] == ["/hops/3", "/hops/2", "/hops/1", "/image/blue"]
    for _, headers in requests:
        assert {"Cookie", "Authorization", "Referer"}.isdisjoint(headers)
        assert headers["Host"] == f"{LOOPBACK}:{site.server_address[1]}"


def test_a_source_is_a_file_or_an_url(site: ThreadingHTTPServer, tmp_path: Any) -> None:
    (tmp_path / "a.png").write_bytes(png("lime"))
    assert open_source(str(tmp_path / "a.png")).getpixel((0, 0)) == (0, 255, 0)
    assert open_source(at(site, "image/lime"), allow_private=True).getpixel((0, 0)) == (0, 255, 0)
    assert [is_url(source) for source in ("HTTPS://a/b", "http://a", "a.png", "ftp://a", tmp_path)] == [
        True, True, False, False, False
    ]  # fmt: skip


def test_private_addresses_are_not_connected_to(site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRIVATE_VARIABLE, raising=False)
    before = len(site.requests)  # type: ignore[attr-defined]
    for host in (LOOPBACK, "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"):
        with pytest.raises(ImageError, match=r"is not a public address; give a public URL, .*give its file"):
            fetch_image(at(site, "image", host))
    assert len(site.requests) == before  # type: ignore[attr-defined]
    monkeypatch.setenv(PRIVATE_VARIABLE, "1")
    assert fetch_image(at(site, "image")).size == (16, 16)
    with pytest.raises(ImageError, match="not a public address"):
        fetch_image(at(site, "image"), allow_private=False)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::5db8:d822", True),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("169.254.169.254", False),  # where clouds hand out credentials
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
        # The interpreter's own list calls the following public, in some versions or in all.
        ("::127.0.0.1", False),
        ("::10.0.0.1", False),
        ("::ffff:0:7f00:1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::7f00:1", False),
        ("64:ff9b:1::5db8:d822", False),
        ("fec0::1", False),
        ("3fff::1", False),
        ("5f00::1", False),
        ("192.88.99.1", False),
        ("168.63.129.16", False),
        ("::ffff:168.63.129.16", False),
        ("192.0.0.192", False),
        ("198.18.0.1", False),
        ("240.0.0.1", False),
        ("2001:db8::1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
        ("100::1", False),
        ("2001:4860:4860::8888", True),
        ("168.63.129.17", True),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_every_hop_is_checked(serving: Callable[..., ThreadingHTTPServer], site: ThreadingHTTPServer) -> None:
    inner = serving("127.0.0.2")
    url = at(site, f"to/{at(inner, 'image', '127.0.0.2')}")
    with pytest.raises(ImageError, match=r"127\.0\.0\.2, which is not a public address"):
        fetch(url, max_bytes=1000, seconds=5, allowed=lambda address: address == LOOPBACK)
    assert inner.requests == []  # type: ignore[attr-defined]
    assert fetch(url, max_bytes=1000, seconds=5, allowed=anything) == png()


def test_the_connection_goes_to_the_address_that_was_checked(
    serving: Callable[..., ThreadingHTTPServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver that answers otherwise the second time, as one that rebinds a name does."""
    inner = serving("127.0.0.2")
    port, answers, resolve = inner.server_address[1], iter([LOOPBACK, "127.0.0.2", "127.0.0.2"]), socket.getaddrinfo

    def rebinding(host: str, *arguments: Any, **options: Any) -> Any:
        return resolve(next(answers) if host == "rebinding.test" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with pytest.raises(ImageError, match="refused"):  # nobody listens at that port of the checked address
        fetch(
            f"http://rebinding.test:{port}/image",
            max_bytes=1000,
            seconds=5,
            allowed=lambda address: address == LOOPBACK,
        )
    assert inner.requests == []  # type: ignore[attr-defined]
    assert next(answers) == "127.0.0.2"  # the name was looked up once


def test_a_host_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def several(host: str, port: int, **options: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in ("93.184.216.34", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    with pytest.raises(ImageError, match=r"10\.0\.0\.1, which is not a public address"):
        fetch_image("http://both.test/a.png", allow_private=False)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hops/4", "more than 3 redirects; give the image's own URL"),
        ("nowhere", "the server answers 404; check the URL"),
        ("to/file:///etc/hostname", "leads to 'file:///etc/hostname', and only http"),
        ("to/http://user:secret@127.0.0.1/", "holds a user name or password"),
        ("page", "not an image of a known format"),
        ("large/20000001", "is larger than 20,000,000 bytes"),
        ("claims/20000001", "is larger than 20,000,000 bytes"),
        ("claims/many", "cannot be fetched .*check the URL"),
        ("claims/10", "cannot be fetched|empty"),
    ],
)
def test_what_is_refused_is_named_in_one_line(site: ThreadingHTTPServer, path: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as error:
        fetch_image(at(site, path), allow_private=True)
    assert str(error.value).startswith(f"{at(site, path.partition('http://user')[0])}")
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user:secret@127.0.0.1/a.png", r"http://\*\*\*@127.* holds a user name or password"),
        ("http://127.0.0.1/a b.png", "spaces or control characters"),
        ("http://127.0.0.1/a\r\nHost: b", "spaces or control characters"),
        ("http:///a.png", "only http"),
        ("http://127.0.0.1:99999/a.png", "Port out of range"),
        ("http://no-such-host.invalid/a.png", "there is no host 'no-such-host.invalid'"),
        ("ftp://127.0.0.1/a.png", "only http"),
    ],
)
def test_a_faulty_url_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as error:
        fetch_image(url, allow_private=True)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_the_deadline_holds_however_slowly_a_server_drips(site: ThreadingHTTPServer) -> None:
    start = time.monotonic()
    with pytest.raises(ImageError, match=r"not fetched within 0\.3 s"):
        fetch_image(at(site, "drip"), seconds=0.3, allow_private=True)
    assert time.monotonic() - start < 45  # the body takes a minute


def test_a_server_that_never_answers_is_left_at_the_deadline() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        for scheme in ("http", "https"):
            with pytest.raises(ImageError, match="not fetched within"):
                fetch_image(f"{scheme}://{LOOPBACK}:{silent.getsockname()[1]}/", seconds=0.2, allow_private=True)


def test_tls_is_spoken_to_https(site: ThreadingHTTPServer) -> None:
    with pytest.raises(ImageError, match=r"(?i)cannot be fetched \(.*ssl"):
        fetch_image(at(site, "image").replace("http:", "https:"), allow_private=True)


def test_pixels_are_limited_as_in_files(site: ThreadingHTTPServer) -> None:
    with pytest.raises(ImageError, match="16x16 is too large"):
        fetch_image(at(site, "image"), max_pixels=100, allow_private=True)
    assert remote_images.MAX_BYTES == 20_000_000


def test_the_fetched_pixels_are_the_files(site: ThreadingHTTPServer) -> None:
    fetched = fetch_image(at(site, "image/teal?query=ä"), allow_private=True)
    assert fetched.tobytes() == open_image(png("teal")).tobytes()
