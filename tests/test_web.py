"""The guard of all servers: Host, Origin, token and body sizes, for requests and for a websocket's handshake."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from pacorl.web import BODY_BYTES, HOSTS_VARIABLE, Door, Guard, RefusedError, listening, run

TOKEN = "a-secret-of-the-tests"
HOST = "localhost:8767"
KNOWN = {"cookie": f"a_cookie_8767={TOKEN}; a_cookie_80={TOKEN}"}
"""The test client's websockets are at port 80."""


def page_of(token: str) -> str:
    if token != TOKEN:
        raise RefusedError("this link is not known", status=401)
    return "/people"


@pytest.fixture
def client():
    door = Door("a_cookie", page_of)
    app = FastAPI(max_body_size=2 * BODY_BYTES)
    app.include_router(door.router())

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
    app.post("/change")(take)
    app.websocket("/socket")(talk)
    app.add_middleware(Guard, admit=door.admit)
    with TestClient(app, base_url=f"http://{HOST}", follow_redirects=False) as client:
        yield client


def test_a_link_becomes_a_cookie_that_scripts_and_other_sites_cannot_have(client):
    paths = ("/private", "/join", "/page/shared/base.css", "/page/shared/..%2f..%2fweb.py")
    assert [client.get(path).status_code for path in paths] == [401, 200, 200, 404]
    assert client.post("/join", json={"token": "another"}).status_code == 401
    answer = client.post("/join", json={"token": TOKEN})
    assert answer.json() == {"path": "/people"}
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert client.get("/private").status_code == 200
    assert client.get("/private").headers["content-security-policy"].startswith("default-src 'self'")


def test_a_refused_page_is_a_sentence_for_people_and_json_for_programs(client):
    assert client.get("/private").json()["detail"] == "this link is not known"
    for headers in ({"cookie": "a_cookie_8767=of-before"}, {"host": "evil.example<b>"}):
        answer = client.get("/private", headers=headers | {"accept": "text/html,*/*"})
        assert answer.status_code in (401, 421)
        assert answer.headers["content-type"].startswith("text/html")
        assert "This page does not open: " in answer.text
        assert "<b>" not in answer.text


HOSTS = [(HOST, 200), ("127.0.0.1:80", 200), ("[::1]", 200), ("evil.example", 421), ("", 421), ("[", 421)]


@pytest.mark.parametrize(("host", "status"), HOSTS)
def test_a_name_that_was_rebound_to_this_machine_is_refused(client, host, status, monkeypatch):
    assert client.get("/private", headers=KNOWN | {"host": host}).status_code == status
    monkeypatch.setenv(HOSTS_VARIABLE, "another.example, evil.example")
    expected = 200 if host == "evil.example" else status
    assert client.get("/private", headers=KNOWN | {"host": host}).status_code == expected


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "localhost"])
def test_a_page_of_another_origin_changes_nothing(client, origin):
    assert client.post("/change", headers=KNOWN | {"origin": origin}).status_code == 403
    assert client.post("/change", headers=KNOWN | {"origin": f"http://{HOST}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"cookie": "a_cookie_8767=wrong"},
        KNOWN | {"host": "evil.example"},
        KNOWN | {"origin": "http://evil.example"},
    ],
)
def test_a_websocket_is_opened_by_the_token_from_the_own_page_alone(client, headers):
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/socket", headers={"host": HOST} | headers):
        pass
    own = KNOWN | {"host": HOST, "origin": f"http://{HOST}"}
    with client.websocket_connect("/socket", headers=own) as socket:
        assert socket.receive_text() == "hello"


def test_bodies_are_limited_and_none_is_read_of_whom_nobody_knows(client):
    large = b"x" * (BODY_BYTES + 1)
    assert client.post("/join", content=iter([large])).status_code == 413  # without an announcement
    assert client.post("/change", content=iter([large]), headers=KNOWN).json() == len(large)
    assert client.post("/change", content=large * 2, headers=KNOWN).status_code == 413
    assert client.post("/change", content=map(pytest.fail, ["read"])).status_code == 401


def test_a_signal_ends_a_server_in_order():
    events = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        events.append("ready")
        os.kill(os.getpid(), signal.SIGINT)
        yield
        events.append("ended")

    with listening("127.0.0.1", 0) as (listener, _):
        run(FastAPI(lifespan=lifespan), listener)
    assert events == ["ready", "ended"]
