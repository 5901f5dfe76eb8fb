"""Requests that a server does not carry out: refused by name, or too large to read. Needs no web framework."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RefusedError(ValueError):
    """A request that is not carried out; nothing has changed. `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class BodyLimit:
    """ASGI middleware: refuses a body of more than `max_bytes`, as announced or as it comes, before the application.

    Args:
        answer: turns the refusal (413) into the server's form of an error.
    """

    def __init__(self, app: App, *, max_bytes: int, answer: Callable[[RefusedError], App]) -> None:
        self.app, self.max_bytes, self.answer = app, max_bytes, answer

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        fits = announced.isdigit() and int(announced) <= self.max_bytes
        # An announcement may be missing (a chunked body) or wrong, so the bytes are counted too.
        body = await self._read(receive) if fits else None
        if body is None:
            refusal = RefusedError(f"the body is larger than {self.max_bytes} bytes", status=413)
            await self.answer(refusal)(scope, receive, send)
            return
        await self.app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if it is too large, or the client has gone."""
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.max_bytes:
                return None
            if not message.get("more_body"):
                return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands the body out once more, and afterwards whatever comes."""
    replayed = False

    async def again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
