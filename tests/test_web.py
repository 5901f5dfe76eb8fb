"""The guard of all servers: Host, Origin, token and body sizes, for requests and for a websocket's handshake."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from pacorl.web import BODY_BYTES, HOSTS_VARIABLE, Door, Guard, RefusedError, listening

TOKEN = "a-secret-of-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def page_of(token: str) -> str:
    if token != TOKEN:
        raise RefusedError("this link is not known", status=401)
    return "/people"


@pytest.fixture
def client():
    door = Door("a <site>", "a_cookie", page_of, is_open=lambda path: path == "/")
    app = FastAPI()
    app.include_router(door.router())

    @app.get("/")
    @app.get("/private")
    def read() -> str:
        return "read"

    async def take(request: Request) -> int:
        return len(await request.body())

    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    # The annotations of functions inside a test are texts that FastAPI cannot look up.
    take.__annotations__, talk.__annotations__ = {"request": Request}, {"socket": WebSocket}
    app.post("/upload")(take)
    app.post("/small")(take)
    app.websocket("/socket")(talk)
    app.add_middleware(Guard, admit=door.admit, is_upload=lambda path: path == "/upload", upload_bytes=2 * BODY_BYTES)
    with TestClient(app, base_url="http://localhost:8767", follow_redirects=False) as client:
        yield client


def test_a_link_becomes_a_cookie_that_scripts_and_other_sites_cannot_have(client):
    assert TOKEN not in client.get("/join").text
    assert client.post("/join", json={"token": "another"}).status_code == 401
    answer = client.post("/join", json={"token": TOKEN})
    assert answer.json() == {"path": "/people"}
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert client.get("/private").status_code == 200


@pytest.mark.parametrize(("site", "asks"), [("none", "no"), ("cross-site", "yes"), ("same-origin", "yes")])
def test_who_was_led_to_a_link_is_asked_first(client, site, asks):
    page = client.get("/join", headers={"sec-fetch-site": site}).text
    assert f'data-asks="{asks}"' in page
    assert "a &lt;site&gt;" in page


def test_only_open_paths_and_shared_files_are_read_without_a_token(client):
    codes = {path: client.get(path).status_code for path in ("/", "/private", "/page/shared/base.css")}
    assert codes == {"/": 200, "/private": 401, "/page/shared/base.css": 200}
    assert client.get("/page/shared/..%2f..%2fweb.py").status_code == 404
    assert client.get("/", headers=BEARER).headers["content-security-policy"].startswith("default-src 'self'")


HOSTS = [("localhost", 200), ("127.0.0.1:80", 200), ("[::1]", 200), ("evil.example", 421), ("", 421), ("[", 421)]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_a_name_that_was_rebound_to_this_machine_is_refused(client, host, status):
    assert client.get("/", headers={"host": host}).status_code == status


def test_further_names_come_from_the_environment(client, monkeypatch):
    monkeypatch.setenv(HOSTS_VARIABLE, "rank.example.org")
    assert client.get("/", headers={"host": "rank.example.org"}).status_code == 200


FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://localhost:8767", "sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_page_of_another_origin_changes_nothing(client, headers):
    assert client.post("/small", headers=BEARER | headers).status_code == 403
    headers = BEARER | {"host": "localhost:8767"} | headers
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/socket", headers=headers):
        pass


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, BEARER | {"host": "evil.example"}])
def test_a_websocket_is_opened_by_the_token_under_an_own_name_alone(client, headers):
    headers = {"host": "localhost:8767"} | headers  # the test client's own is another for websockets
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/socket", headers=headers):
        pass


def test_a_websocket_of_the_own_page_is_opened(client):
    own = {"origin": "http://localhost:8767", "sec-fetch-site": "same-origin"}
    with client.websocket_connect("/socket", headers=BEARER | own | {"host": "localhost:8767"}) as socket:
        assert socket.receive_text() == "hello"


def test_bodies_have_one_limit_and_uploads_another(client):
    large = b"x" * (BODY_BYTES + 1)

    def chunks():
        yield large

    assert client.post("/small", content=large[1:], headers=BEARER).json() == BODY_BYTES
    assert client.post("/small", content=large, headers=BEARER).status_code == 413
    assert client.post("/small", content=chunks(), headers=BEARER).status_code == 413  # without an announcement
    assert client.post("/upload", content=chunks(), headers=BEARER).json() == len(large)
    assert client.post("/upload", content=large * 2, headers=BEARER).status_code == 413


def test_no_body_is_read_of_whom_nobody_knows(client):
    def chunks():
        raise AssertionError("read")
        yield b""

    assert client.post("/upload", content=chunks()).status_code == 401


def test_a_taken_port_is_named():
    with listening("127.0.0.1", 0) as (_, url):
        port = int(url.rpartition(":")[2])
        with pytest.raises(OSError, match=f":{port}"), listening("127.0.0.1", port):
            pass
