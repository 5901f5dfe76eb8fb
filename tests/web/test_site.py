"""The base of the pages: files, sign-in, guards and errors, on a site of two pages."""

from __future__ import annotations

import socket
import time

import pytest
from fastapi.testclient import TestClient

from pacorl.web.site import RefusedError, Session, Site, listening

EXPIRES = time.time() + 3600


def sign_in(token: str) -> Session:
    if token != "secret":
        raise RefusedError("this link is not known", status=401)
    return Session("/people", EXPIRES)


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
    site = Site("a site", folder, cookie="a_cookie", sign_in=sign_in, max_body=100)

    async def whoami(request: Request) -> dict[str, str]:
        return echo(site, request)

    async def double(number: int) -> int:
        return 2 * number

    routes = [("GET", "/whoami", whoami), ("POST", "/whoami", whoami), ("GET", "/double", double)]
    # The annotations of functions inside a test are texts that FastAPI cannot look up.
    whoami.__annotations__, double.__annotations__ = {"request": Request}, {"number": int}
    with TestClient(site.app(routes, state=None), follow_redirects=False) as client:
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


def test_a_link_becomes_a_cookie_that_other_sites_cannot_send(client):
    answer = client.get("/join/secret")
    assert (answer.status_code, answer.headers["location"]) == (303, "/people")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "expires=" in cookie
    assert client.get("/whoami").json() == {"token": "secret"}
    refused = client.get("/join/other")
    assert (refused.status_code, refused.text) == (401, "this link is not known.\n")
    assert "set-cookie" not in refused.headers


def test_a_bearer_comes_before_the_cookie(client):
    client.get("/join/secret")
    assert client.get("/whoami", headers={"Authorization": "Bearer other"}).json() == {"token": "other"}


def test_errors_are_one_line_of_json(client):
    refused = client.get("/whoami")
    assert (refused.status_code, refused.json()) == (403, {"error": "who are you?"})
    malformed = client.get("/double", params={"number": "x"})
    assert malformed.status_code == 422
    assert malformed.json()["error"].startswith("number: ")


@pytest.mark.parametrize("body", [b"x" * 101, (b"x" * 60 for _ in range(2))], ids=["announced", "chunked"])
def test_large_bodies_are_refused(client, body):
    answer = client.post("/whoami", content=body)
    assert (answer.status_code, answer.json()) == (413, {"error": "the body is larger than 100 bytes"})
    assert client.post("/whoami", content=b"x" * 100, headers={"Authorization": "Bearer me"}).status_code == 200


def test_a_taken_port_is_named():
    with listening("127.0.0.1", 0) as (listener, url):
        port = listener.getsockname()[1]
        assert url == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass  # whoever is early is kept waiting, not refused
        with (
            pytest.raises(OSError, match=rf"127\.0\.0\.1:{port} cannot be listened on .*give another --port"),
            listening("127.0.0.1", port),
        ):
            pass
