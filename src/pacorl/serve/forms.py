"""Requests' JSON: parsed within bounds, validated by forms that stop early, refused in one short line."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pacorl.io.documents import parse_json

MOST_LETTERS = 2**21
"""Length of any text of a form; most fields allow far fewer letters."""
MOST_ENTRIES = 1024
"""Length of any list or object of a form; each field's own limit is lower."""
SHOWN_FAULTS = 3
SHOWN_LETTERS = 200


Text = Annotated[str, Field(max_length=MOST_LETTERS)]
"""A text of a form."""


class Form(BaseModel):
    """The JSON of a request. Unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _is_short(cls, document: Any) -> Any:
        """Refuse many unknown fields and many values at once: pydantic would report each."""
        if not isinstance(document, dict):
            return document
        unknown = document.keys() - cls.model_fields.keys()
        if len(unknown) > SHOWN_FAULTS:
            raise ValueError(f"{len(unknown):,} fields are not known, {min(unknown)[:SHOWN_LETTERS]} first")
        for name, value in document.items():
            if isinstance(value, dict | list) and len(value) > MOST_ENTRIES:
                raise ValueError(
                    f"{name[:SHOWN_LETTERS]} has {len(value):,} entries; at most {MOST_ENTRIES:,} are taken"
                )
        return document


class JsonRoute(APIRoute):
    """A route whose requests are JsonRequests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class JsonRequest(Request):
    """A request whose JSON is parsed as files are."""

    async def json(self) -> Any:
        """Parse the body.

        Raises:
            JSONDecodeError: it is no JSON, not UTF-8, or nested too deeply.
        """
        body = await self.body()
        try:
            return parse_json(body)
        except ValueError as fault:
            raise json.JSONDecodeError(str(fault), "", 0) from None


def validation_message(error: RequestValidationError) -> str:
    """List the first faults of a request on one line, and the number of further faults."""
    faults = error.errors()
    # The body of a request without JSON's content type stays bytes.
    if any(isinstance(fault.get("input"), bytes) for fault in faults):
        return "the body is not read as JSON; send the header `Content-Type: application/json`"
    shown = []
    for fault in faults[:SHOWN_FAULTS]:
        if fault["type"] == "json_invalid":
            return str(fault["ctx"]["error"])
        field = ".".join([str(name) for name in fault["loc"][1:]])
        shown.append(f"{field}: {fault['msg']}".removeprefix(": ")[:SHOWN_LETTERS])
    if len(faults) > SHOWN_FAULTS:
        shown.append(f"and {len(faults) - SHOWN_FAULTS:,} more")
    return "; ".join(shown) or "malformed request"
