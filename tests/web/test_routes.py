"""Each route of the three servers answers a behaving request, and refuses one without a token or from elsewhere."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from httpx2 import Response
from PIL import Image

from pacorl.io.files import text_digest
from pacorl.io.images import png_bytes
from pacorl.tiny.characters import EDITS, draw, set_of

TOKEN, ADMIN_TOKEN = "a-token-of-the-tests", "a-token-of-the-administrator"


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


SMALL = png_bytes(Image.new("RGB", (28, 28)))
PICTURE = data_url(SMALL)
SCENE = set_of(("red", "round", "crown", "night"), 1, random.Random(1))[0]
HERO = data_url(png_bytes(draw(SCENE, 64)))
"""An image that the tiny judge knows: the controls of a check hold with it."""
CHAT = {
    "model": "judge", "max_tokens": 1, "temperature": 1, "logprobs": True, "top_logprobs": 5, "seed": 1,
    "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "Is it right?"},
    ]}],
}  # fmt: skip
SAMPLING = {"candidates": 2, "seed": 1, "steps": 3, "size": "32x64", "lora_scale": 1.0, "compare": False}
PANELS = ["waving, flag", "jumping, boat", "standing, tree", "waving, lamp"]
SET = SAMPLING | {"theme": "red round hero, crown, night", "panels": PANELS, "layout": "2x2"}
BOARD = SAMPLING | {"title": "t", "style": "night", "scenes": [f"{{hero}}, {panel}" for panel in PANELS]}
BOARD |= {"layout": "2x2", "characters": {"hero": "red round hero, crown"}}
EDIT = SAMPLING | {"instruction": EDITS["colour"].format("blue"), "sources": ["UPLOAD"]}
MODELS = {"model": "tiny", "editor": "tiny", "judge": "tiny", "memory": "auto", "writer": "template", "loras": {}}
CHARACTER = {"description": "red round hero", "uploads": [], "sheet": [], "of": "", "captions": {}, "removed": []}
SHEET = SAMPLING | {"scenes": [EDIT["instruction"]], "again": "", "picture": 0}
JUDGEMENT = {"uploads": ["UPLOAD"], "layout": "1x2", "theme": "t", "criteria": ["c"], "symmetric": True}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it should be."""

    method: str
    path: str
    body: Any = None
    """A document for JSON, bytes as they are."""
    key: str = TOKEN
    status: int = 200


REQUESTS: dict[str, tuple[Asked, ...]] = {
    "judge": (
        Asked("POST", "/v1/chat/completions", CHAT),
        Asked("POST", "/v1/consistency", {"model": "judge", "images": [PICTURE, PICTURE], "criteria": {"c": "same"}}),
        Asked("POST", "/v1/check", {"panels": [HERO], "references": {"hero": [HERO]}, "least": 0.5}),
        Asked("POST", "/tokenize", {"model": "judge", "prompt": "Yes", "add_special_tokens": False}),
        Asked("GET", "/v1/models"),
        Asked("GET", "/metrics"),
        Asked("GET", "/version"),
    ),
    "studio": (
        Asked("POST", "/api/sets", SET),
        Asked("POST", "/api/edits", EDIT),
        Asked("POST", "/api/storyboards", BOARD),
        Asked("GET", "/api/history"),
        Asked("GET", "/api/history/000001"),
        Asked("DELETE", "/api/history/000002"),
        Asked("POST", "/api/history/000001", {"favourite": True}),
        Asked("POST", "/api/history/000001/panels", {"candidate": 0, "panel": 9}, status=404),
        Asked("GET", "/sets/000001/0.png"),
        Asked("GET", "/sets/000001/0.zip"),
        Asked("POST", "/api/judgements", JUDGEMENT),
        Asked("POST", "/api/checks", JUDGEMENT | {"least": 0.5}),
        Asked("POST", "/api/repairs", JUDGEMENT | {"least": 0.5, "texts": ["waving, flag", "x"]}, status=422),
        Asked("POST", "/api/uploads?name=cat.png", SMALL),
        Asked("DELETE", "/api/uploads/1"),
        Asked("GET", "/api/state"),
        Asked("GET", "/api/jobs/1"),
        Asked("GET", "/images/1/0.png", status=404),
        Asked("GET", "/api/example?number=3"),
        Asked("GET", "/api/models"),
        Asked("POST", "/api/models", MODELS),
        Asked("POST", "/api/models", MODELS | {"check": True}),
        Asked("POST", "/api/downloads", {"model": "owner/name", "accepted": False, "token": "x"}, status=409),
        Asked("DELETE", "/api/downloads"),
        Asked("GET", "/api/characters"),
        Asked("POST", "/api/characters/hero", CHARACTER),
        Asked("POST", "/api/characters/hero/first", {"picture": "0001.png"}, status=404),
        Asked("POST", "/api/characters/hero/sheet", SHEET, status=422),
        Asked("POST", "/api/characters/hero/train", {"steps": 3, "resume": ""}, status=422),
        Asked("POST", "/api/characters/hero/captions", {}, status=422),
        Asked("POST", "/api/characters/hero/stop"),
        Asked("DELETE", "/api/characters/nobody", status=404),
        Asked("GET", "/characters/hero/01.png", status=404),
        Asked("GET", "/loras/hero/before-0.png", status=404),
        Asked("POST", "/api/panels", {"text": "Generate four images of the same dentist: a, b, c and d."}),
        Asked("DELETE", "/api/jobs/1"),
        Asked("POST", "/join", {"token": TOKEN}),
        Asked("POST", "/leave"),
    ),
    "annotate": (
        Asked("POST", "/api/rankings", {"instance": "INSTANCE", "order": [1, 0, 3, 2], "request": "request-1"}),
        Asked("POST", "/api/undo", {"request": "request-3"}),
        Asked("POST", "/api/skips", {"instance": "INSTANCE", "reason": "unclear", "request": "request-2"}),
        Asked("POST", "/api/admin/people", {"name": "ben", "days": 3, "adjudicates": True}, ADMIN_TOKEN),
        Asked("POST", "/api/admin/links", {"name": "eve", "days": 3}, ADMIN_TOKEN, status=404),
        Asked("POST", "/api/admin/links", {"name": "ann", "days": 3}, status=403),
        Asked("POST", "/api/admin/pauses", {"name": "eve", "paused": True}, ADMIN_TOKEN, status=404),
        Asked("GET", "/api/task"),
        Asked("GET", "/images/INSTANCE/reference"),
        Asked("GET", "/images/INSTANCE/1"),
        Asked("GET", "/api/admin", None, ADMIN_TOKEN),
        Asked("GET", "/api/admin/rankings.jsonl", None, ADMIN_TOKEN),
        Asked("GET", "/api/admin/audit.jsonl", None, ADMIN_TOKEN),
        Asked("GET", "/join"),
        Asked("POST", "/join", {"token": TOKEN}),
        Asked("POST", "/leave"),
    ),
}  # fmt: skip


OPEN = ("/join", "/leave")
"""Paths that need no token: they sign a browser in or out."""


# --- applications ------------------------------------------------------------------------------------------------


def judge() -> FastAPI:
    from pacorl.judge.local import LocalJudge
    from pacorl.serve.builtin import create_app

    return create_app({"judge": LocalJudge.from_pretrained("tiny")}, api_key=TOKEN)


def studio(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """The studio without the work of its models."""
    from pacorl.studio import server
    from pacorl.studio.models import ModelHost

    for name in ("load", "make_set", "make_sheet", "make_storyboard", "judge"):
        monkeypatch.setattr(ModelHost, name, lambda self, job, *_, **__: {})
    state = server.AppState(TOKEN)
    base = {"image": "base-0", "layout": "1x2", "base": None, "rank": 1, "score": 0.4, "matrix": [[None, 0.4]]}
    base |= {"recipe": {"seed": "0"}, "error": ""}
    document = {"kind": "set", "theme": "t", "candidates": [{**base, "image": "0", "base": base}]}
    document |= {"sources": ["source-1"], "asked": {"seed": 0}}
    for _ in range(2):
        state.history.add(document, dict.fromkeys(("0", "base-0", "source-1"), SMALL))
    return server.make_app(state)


def annotate(folder: Path) -> FastAPI:
    from pacorl.dataset.folder import Instance, write_records
    from pacorl.studio.annotate.links import Sharing
    from pacorl.studio.annotate.routes import make_app, prepare
    from pacorl.studio.annotate.store import Store

    names = [f"{number}.png" for number in range(5)]
    for name in names:
        (folder / name).write_bytes(SMALL)
    rows = [Instance(f"i{number}", "g", names[0], tuple(names[1:])) for number in range(8)]
    write_records(folder / "instances.jsonl", rows)
    store = Store(folder / "annotations.db")
    prepare(store, folder, ["ann"], sharing=Sharing(controls=0))
    with store._transaction() as db:
        for name, token in {"ann": TOKEN, "admin": ADMIN_TOKEN}.items():
            db.execute("UPDATE people SET token_hash = ? WHERE name = ?", (text_digest(token), name))
    return make_app(folder, store)


@pytest.fixture(params=REQUESTS)
def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, TestClient]]:
    """A server's name, and a client of it."""
    makers = {"judge": judge, "studio": lambda: studio(monkeypatch), "annotate": lambda: annotate(tmp_path)}
    with TestClient(makers[request.param](), base_url="http://localhost", follow_redirects=False) as client:
        yield request.param, client


def ask(client: TestClient, asked: Asked, facts: dict[str, str], **headers: str) -> Response:
    content = asked.body if isinstance(asked.body, bytes) else b"" if asked.body is None else json.dumps(asked.body)
    path = asked.path
    for name, fact in facts.items():
        path = path.replace(name, fact)
        content = content.replace(name, fact) if isinstance(content, str) else content
    if isinstance(content, str):
        headers |= {"Content-Type": "application/json"}
    client.cookies.clear()
    return client.request(asked.method, path, content=content, headers=headers)


def facts_of(name: str, client: TestClient) -> dict[str, str]:
    """What a server names itself: name in requests → its value."""
    known = {"Authorization": f"Bearer {TOKEN}"}
    if name == "studio":
        return {"UPLOAD": client.post("/api/uploads?name=cat.png", content=SMALL, headers=known).json()["id"]}
    if name == "annotate":
        return {"INSTANCE": client.get("/api/task", headers=known).json()["task"]["instance"]}
    return {}


def test_every_route_answers_and_refuses_without_a_token_or_from_elsewhere(served: tuple[str, TestClient]) -> None:
    name, client = served
    facts = facts_of(name, client)
    for asked in REQUESTS[name]:
        known = {"Authorization": f"Bearer {asked.key}"}
        if asked.path not in OPEN:
            assert ask(client, asked, facts).status_code in (401, 403), asked
            assert ask(client, asked, facts, Authorization="Bearer x").status_code in (401, 403), asked
        assert ask(client, asked, facts, Host="evil.example", **known).status_code == 421, asked
        if asked.method != "GET":
            assert ask(client, asked, facts, Origin="http://evil.example", **known).status_code == 403, asked
        answer = ask(client, asked, facts, **known)
        assert answer.status_code == asked.status, (asked, answer.text[:300])


def test_every_route_that_changes_something_is_asked(served: tuple[str, TestClient]) -> None:
    name, client = served
    sent = [(asked.method, asked.path.partition("?")[0]) for asked in REQUESTS[name]]
    missed = []
    for route in iter_route_contexts(client.app.routes):  # type: ignore[attr-defined]
        for method in sorted({"POST", "DELETE"} & set(route.methods or ())):
            pattern = re.compile(re.sub(r"\{[^}]+\}", "[^/]+", str(route.path)))
            if not any(asked == method and pattern.fullmatch(to) for asked, to in sent):
                missed.append(f"{method} {route.path}")
    assert missed == []
