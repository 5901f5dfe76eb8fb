"""What a request's JSON may hold, on all servers: bounded lists and objects, faults that are counted early."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field, ValidationError

import pacorl.studio.annotate.routes
import pacorl.studio.server
from pacorl.serve.builtin import create_app
from pacorl.serve.schema import ChatRequest, ConsistencyRequest
from pacorl.web.forms import MOST_ENTRIES, Form, JsonRoute, Text
from pacorl.web.site import Session, Site

SITE = Site("a site", Path("nowhere"), "cookie", lambda token: Session())


def studio() -> FastAPI:
    return pacorl.studio.server.make_app(SimpleNamespace(site=SITE))  # type: ignore[arg-type]


def annotate(tmp_path: Path) -> FastAPI:
    from pacorl.studio.annotate.store import Store

    with Store(tmp_path / "annotations.db") as store:
        return pacorl.studio.annotate.routes.make_app(tmp_path, store)


def request_models(app: FastAPI) -> list[type[BaseModel]]:
    """The models of all bodies that an application parses."""
    fields = [getattr(route, "body_field", None) for route in iter_route_contexts(app.routes)]
    return [field.field_info.annotation for field in fields if field]  # type: ignore[misc]


def unbounded(schema: Any, path: str) -> Iterator[str]:
    """The lists and objects of any length within a core schema, and fields that take anything."""
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from unbounded(part, path)
    if not isinstance(schema, dict):
        return
    collection = schema.get("type") in ("list", "tuple", "set", "frozenset", "dict", "generator")
    if (collection and "max_length" not in schema) or schema.get("type") == "any":
        yield f"{path}: {schema['type']}"
    for key, part in schema.items():
        if key not in ("metadata", "ref", "serialization"):
            yield from unbounded(part, f"{path}.{key}")


def test_every_list_and_object_of_every_request_has_a_limit(tmp_path: Path) -> None:
    for app, count in ((create_app({}), 4), (studio(), 16), (annotate(tmp_path), 7)):
        models = request_models(app)
        assert len(models) == count
        for model in models:
            assert issubclass(model, Form)
            assert list(unbounded(model.__pydantic_core_schema__, model.__name__)) == []


def test_the_walk_finds_what_has_no_limit() -> None:
    class Inner(Form):
        names: list[Text]
        anything: Any

    class Outer(Form):
        inner: Annotated[list[Inner], Field(max_length=3)]
        counts: dict[str, int] = Field({})

    found = [path.rpartition(" ")[2] for path in unbounded(Outer.__pydantic_core_schema__, "Outer")]
    assert sorted(found) == ["any", "dict", "list"]


MANY = 20 * MOST_ENTRIES


@pytest.mark.parametrize(
    ("model", "document", "fault"),
    [
        (ChatRequest, {"model": "m", "messages": [0] * MANY}, "messages has 20,480 entries; at most 1,024 are taken"),
        (ChatRequest, {f"k{number}": 0 for number in range(MANY)}, "20,480 fields are not known, k0 first"),
        (ConsistencyRequest, {"images": [], "criteria": dict.fromkeys(map(str, range(MANY)))}, "criteria has 20,480"),
        (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": [0] * MANY}]}, "content has 20,480"),
        (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": "a", "x": 0}] * 30}, "Extra inputs"),
    ],
)
def test_a_form_stops_at_the_first_thing_that_is_too_long(
    model: type[Form], document: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValidationError, match=fault) as refused:
        model.model_validate(document)
    assert refused.value.error_count() <= 2


# --- parsing -----------------------------------------------------------------------------------------------------


class Numbers(Form):
    numbers: Annotated[list[int], Field(max_length=64)]
    note: Text = ""


def add_up(form: Numbers) -> int:
    return sum(form.numbers)


@pytest.fixture
def client() -> Iterator[TestClient]:
    router = APIRouter(route_class=JsonRoute)
    router.post("/sum")(add_up)
    with TestClient(
        SITE.app(router, state=None), base_url="http://localhost", headers={"Authorization": "Bearer token"}
    ) as client:
        yield client


@pytest.mark.parametrize(
    "body", [b"{", b"[" * 50_000, b'{"numbers": [' + b"1" * 5000 + b"]}", b'"\xff"', b'"\\ud800"', b"NaN"]
)
def test_what_is_no_json_is_refused_in_a_short_line(client: TestClient, body: bytes) -> None:
    answer = client.post("/sum", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert re.match("not valid JSON|the text:1: not UTF-8", answer.json()["error"])


def test_three_faults_are_listed_and_the_rest_is_counted(client: TestClient) -> None:
    answer = client.post("/sum", json={"numbers": ["x"] * 60})
    assert answer.status_code == 422
    assert [fault.partition(":")[0] for fault in answer.json()["error"].split("; ")] == [
        *("numbers.0", "numbers.1", "numbers.2"),
        "and 57 more",
    ]


def test_a_fault_repeats_little_of_what_was_sent(client: TestClient) -> None:
    answer = client.post("/sum", json={"numbers": [], "x" * 100_000: 1})
    assert (answer.status_code, len(answer.content) < 500) == (422, True)
