"""The base of the pages: files, sign-in, guards and errors, on a site of two pages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient

from pacorl.web.forms import JsonRoute
from pacorl.web.guard import BODY_BYTES, HOSTS_VARIABLE, MOST_MARKS, RefusedError
from pacorl.web.site import Session, Site, listening, run


def sign_in(token: str) -> Session:
    if token != "secret":
        raise RefusedError("this link is not known", status=401)
    return Session("/people", time.time() + 3600)


def echo(site, request):
    if not site.token(request):
        raise RefusedError("who are you?", status=403)
    return {"token": site.token(request)}


@pytest.fixture
def client(tmp_path):
    from fastapi import Request

    folder = tmp_path / "page"
    folder.mkdir()
    for name in ("index.html", "people.html", "page.js", "style.css", "notes.txt"):
        (folder / name).write_text(name)
    (tmp_path / "outside.js").write_text("secret")
    site = Site("a <site>", folder, cookie="a_cookie", sign_in=sign_in, uploads=["/upload"], upload_bytes=100)

    async def whoami(request: Request) -> dict[str, str]:
        return echo(site, request)

    async def double(number: int) -> int:
        return 2 * number

    router = APIRouter(route_class=JsonRoute)
    # The annotations of functions inside a test are texts that FastAPI cannot look up.
    whoami.__annotations__, double.__annotations__ = {"request": Request}, {"number": int}
    router.api_route("/whoami", methods=["GET", "POST"])(whoami)
    router.get("/double")(double)
    with TestClient(site.app(router, state=None), follow_redirects=False, base_url="http://localhost:8767") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/people", "text/html"),
        ("/page/page.js", "text/javascript"),
        ("/page/style.css", "text/css"),
        ("/page/base.css", "text/css"),
    ],
)
def test_pages_and_their_files_come_with_a_strict_policy(client, path, kind):
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("name", ["notes.txt", "index.html", "..%2foutside.js", "%2e%2e/outside.js", "none.js"])
def test_no_other_file_is_served(client, name):
    assert client.get(f"/page/{name}").status_code == 404


def test_no_parameter_names_another_page(client, tmp_path):
    assert client.get("/", params={"page": str(tmp_path / "outside.js"), "path": "x"}).text == "index.html"


def join(client, token="secret", url="/join", **headers):
    return client.post(url, json={"token": token}, headers=headers)


def test_a_link_becomes_a_cookie_that_other_sites_cannot_send(client):
    answer = join(client)
    assert (answer.status_code, answer.json()) == (200, {"path": "/people"})
    cookies = answer.headers.get_list("set-cookie")
    assert [cookie.partition("=")[0] for cookie in cookies] == ["a_cookie_8767", "a_cookie_browser_8767"]
    for cookie in cookies:
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert "expires=" in cookie.lower()
    assert client.get("/whoami").json() == {"token": "secret"}
    refused = join(client, "other")
    assert (refused.status_code, refused.json()) == (401, {"error": "this link is not known"})
    assert "set-cookie" not in refused.headers
    assert join(client, Origin="http://evil").status_code == 403


@pytest.mark.parametrize(
    ("site", "asks"),
    [({}, "yes"), ({"Sec-Fetch-Site": "cross-site"}, "yes"), ({"Sec-Fetch-Site": "none"}, "no")],
)
def test_who_was_led_to_a_link_is_asked_before_the_cookie_changes(client, site, asks):
    answer = client.get("/join", headers=site)
    assert (answer.status_code, "set-cookie" in answer.headers) == (200, False)
    assert f'data-asks="{asks}"' in answer.text
    assert "<title>a &lt;site&gt;</title>" in answer.text
    assert "<script>" not in answer.text


def test_no_path_has_a_token(client):
    assert client.get("/join/secret", headers={"Sec-Fetch-Site": "none"}).status_code == 404


@pytest.mark.parametrize(("scheme", "secure"), [("https", True), ("http", False)])
def test_cookies_of_an_encrypted_page_go_nowhere_else(client, scheme, secure):
    for answer in (
        join(client, url=f"{scheme}://localhost:8767/join"),
        client.post(f"{scheme}://localhost:8767/leave"),
    ):
        cookies = answer.headers.get_list("set-cookie")
        assert len(cookies) == 2
        assert ["secure" in cookie.lower() for cookie in cookies] == [secure] * 2


def test_who_leaves_is_signed_out_and_may_come_back(client):
    assert client.post("/leave").status_code == 200  # also who is not here
    join(client)
    assert client.post("/leave", headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.get("/whoami").json() == {"token": "secret"}
    assert client.post("/leave").status_code == 200
    assert client.cookies == {}
    assert client.get("/whoami").status_code == 403
    join(client)
    assert client.get("/whoami").json() == {"token": "secret"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8767", 200),
        ("127.0.0.1", 200),
        ("[::1]:8767", 200),
        ("192.168.1.7:8767", 200),
        (socket.gethostname(), 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8767", 421),
        ("[::1", 421),
        ("", 421),
    ],
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(client, host, status):
    assert client.get("/join", headers={"Host": host}).status_code == status
    assert client.get("/health", headers={"Host": host}).status_code == 200


def test_further_names_are_taken_from_the_environment(client, monkeypatch):
    monkeypatch.setenv(HOSTS_VARIABLE, "rank.example, other.example")
    assert client.get("/join", headers={"Host": "rank.example"}).status_code == 200
    assert HOSTS_VARIABLE in client.get("/join", headers={"Host": "evil.example"}).json()["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://localhost:9999"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://[::1"},
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_pages_of_other_origins_change_nothing(client, headers):
    join(client)
    assert client.post("/whoami", headers=headers).status_code == 403
    assert client.get("/whoami", headers=headers).status_code == 200
    same = {"Origin": "http://localhost:8767", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/whoami", headers=same).status_code == 200


def post_in_chunks(client, path, chunk, *, announced=None, token="secret", kind="text/plain"):
    """(status, chunks that were read) of a post whose body never ends."""
    sent, read = [], []

    async def receive():
        read.append(1)
        return {"type": "http.request", "body": chunk, "more_body": True}

    async def send(message):
        sent.append(message)

    headers = [
        (b"host", b"localhost"),
        (b"authorization", f"Bearer {token}".encode()),
        (b"content-type", kind.encode()),
    ]
    headers += [(b"content-length", str(announced).encode())] if announced else []
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    asyncio.run(client.app(scope | {"headers": headers}, receive, send))
    return sent[0]["status"], len(read)


@pytest.mark.parametrize("token", ["", "wrong"])
def test_no_body_is_read_of_whom_nobody_knows(client, token):
    assert post_in_chunks(client, "/whoami", b"x", announced=1, token=token) == (401, 0)


def test_uploads_have_a_limit_and_all_other_bodies_another_before_they_are_read(client):
    for path, limit, piece in (("/upload", 100, 10), ("/join", BODY_BYTES, 2**20), ("/nowhere", BODY_BYTES, 2**20)):
        assert post_in_chunks(client, path, b"x", announced=limit + 1, token="secret") == (413, 0)
        assert post_in_chunks(client, path, b"x" * piece) == (413, limit // piece + 1)


def test_json_is_bounded_before_it_is_parsed(client):
    for mark in (b"[", b"{", b","):
        assert post_in_chunks(client, "/whoami", mark * 2**14, kind="application/json") == (413, 5)
    assert post_in_chunks(client, "/whoami", b"[" * 2**20, kind="image/png") == (413, 5)
    known = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    assert client.post("/nowhere", content=b"," * MOST_MARKS, headers=known).status_code == 404


def test_a_sign_in_is_one_small_field(client):
    refused = client.post("/join", json={"token": "secret", "name": "ann"})
    assert (refused.status_code, refused.json()) == (422, {"error": "name: Extra inputs are not permitted"})
    assert client.post("/join", content="token=secret").status_code == 422


def test_a_request_that_reads_has_no_body(client):
    assert client.request("GET", "/whoami", content=b"x").status_code == 413


def test_a_bearer_comes_before_the_cookie(client):
    join(client)
    assert client.get("/whoami", headers={"Authorization": "Bearer other"}).json() == {"token": "other"}


def test_errors_are_one_line_of_json(client):
    refused = client.get("/whoami")
    assert (refused.status_code, refused.json()) == (403, {"error": "who are you?"})
    malformed = client.get("/double", params={"number": "x"})
    assert malformed.status_code == 422
    assert malformed.json()["error"].startswith("number: ")


@pytest.mark.parametrize("body", [b"x" * 101, (b"x" * 60 for _ in range(2))], ids=["announced", "chunked"])
def test_large_bodies_are_refused(client, body):
    join(client)
    answer = client.post("/upload", content=body)
    assert (answer.status_code, answer.json()) == (413, {"error": "the body is larger than 100 bytes"})
    assert client.post("/upload", content=b"x" * 100).status_code == 404


def test_a_taken_port_is_named():
    with listening("127.0.0.1", 0) as (listener, url):
        port = listener.getsockname()[1]
        assert url == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            pass  # whoever is early is kept waiting, not refused
        with (
            pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} cannot be listened on .*give another --port"),
            listening("127.0.0.1", port),
        ):
            pass


# --- serving -----------------------------------------------------------------------------------------------------


def test_a_stopped_server_finishes_its_requests(monkeypatch):
    import uvicorn

    begun, servers = threading.Event(), []
    monkeypatch.setattr(uvicorn.Server, "capture_signals", lambda self: contextlib.nullcontext(servers.append(self)))

    async def app(scope, receive, send):
        if scope["type"] == "http":
            begun.set()
            while not servers[0].should_exit:
                await asyncio.sleep(0.01)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    with listening("127.0.0.1", 0) as (listener, _):
        thread = threading.Thread(target=run, args=[app], kwargs={"sockets": [listener], "grace_seconds": 60})
        thread.start()
        # A connection without a request is not waited for.
        with (
            socket.create_connection(listener.getsockname(), timeout=60),
            socket.create_connection(listener.getsockname(), timeout=60) as asking,
        ):
            asking.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert begun.wait(60)
            servers[0].should_exit = True
            assert asking.recv(100).startswith(b"HTTP/1.1 200")
            thread.join(60)
            assert not thread.is_alive()


RUNNING = """
from pathlib import Path
from fastapi import APIRouter

from pacorl.web.guard import RefusedError
from pacorl.web.site import Site, listening, run

def sign_in(token):
    raise RefusedError("this link is not known", status=401)

with listening("127.0.0.1", 0) as (listener, url):
    print(listener.getsockname()[1], flush=True)
    run(Site("a site", Path("."), "a_cookie", sign_in).app(APIRouter(), state=None), sockets=[listener])
"""


@pytest.mark.slow
def test_a_server_logs_no_links(tmp_path):
    requests = {b"/join?a-secret-token": b"Connection: close", b"/join": b"X: y\x00"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-c", RUNNING], stdout=subprocess.PIPE, stderr=log, text=True)
        with server:
            address = ("127.0.0.1", int(server.stdout.readline()))
            for path, header in requests.items():
                with socket.create_connection(address, timeout=20) as connection:
                    connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n")
                    assert connection.recv(100).startswith(b"HTTP/1.1 ")
            server.terminate()
            printed = server.stdout.read()
    written = printed + (tmp_path / "log").read_text()
    assert "token" not in written
    assert "Invalid HTTP request" in written, "the log is read"
