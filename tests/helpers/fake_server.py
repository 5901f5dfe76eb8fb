"""A judge's server that misbehaves on command."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

YES, NO = 7, 9
TOKENS = {"Yes": [YES], "No": [NO]}


@dataclass
class FakeServer:
    """Answers with `p_of` (texts and images → P(Yes)), unless `behave` (the number of a chat request) does instead."""

    served: tuple[str, ...] = ("judge",)
    tokens: dict[str, list[int]] | None = field(default_factory=lambda: dict(TOKENS))
    """What /tokenize answers; None for a server without it."""
    key: str = ""
    behave: Callable[[Handler, int], bool] = lambda handler, number: False
    chats: list[dict[str, Any]] = field(default_factory=list)
    busiest: int = 0
    url: str = ""
    port: int = 0
    _busy: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        server = PatientServer(("127.0.0.1", self.port), type("Bound", (Handler,), {"fake": self}))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def requests(self) -> list[list[dict[str, Any]]]:
        """Messages of each chat request."""
        return [body["messages"] for body in self.chats]

    @contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[int]:
        with self._lock:
            self.chats.append(body)
            number = len(self.chats)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        try:
            yield number
        finally:
            with self._lock:
                self._busy -= 1


class PatientServer(ThreadingHTTPServer):
    request_queue_size = 256  # the default 5 resets connections when the machine is busy


class Handler(BaseHTTPRequestHandler):
    """One request."""

    fake: FakeServer
    protocol_version = "HTTP/1.1"
    # Head and body are two writes, and the second would wait 40 ms until the first is acknowledged.
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._allowed():
            return
        if self.path == "/v1/models":
            self.answer({"object": "list", "data": [{"id": name, "object": "model"} for name in self.fake.served]})
        else:
            self.fail(404)

    def do_POST(self) -> None:
        raw = self.rfile.read(length := int(self.headers["Content-Length"]))
        if len(raw) < length:  # the client gave up
            self.close_connection = True
            return
        body = json.loads(raw)
        if not self._allowed():
            return
        if self.path == "/tokenize" and self.fake.tokens is not None:
            self.answer({"tokens": self.fake.tokens.get(body["prompt"], [1, 2])})
        elif self.path == "/v1/chat/completions":
            with self.fake.counted(body) as number:
                answered = self.fake.behave(self, number)
            # It is not counted while it answers: who has read the answer may ask again before this thread goes on.
            if not answered:
                self._chat(body)
        else:
            self.fail(404)

    def _allowed(self) -> bool:
        if self.fake.key and self.headers.get("Authorization") != f"Bearer {self.fake.key}":
            self.fail(401, f"wrong key {self.headers.get('Authorization')}")
            return False
        return True

    def _chat(self, body: dict[str, Any]) -> None:
        if body["model"] not in self.fake.served:
            self.fail(404, f"no model {body['model']}")
        else:
            self.answer(completion(body, p_of(body)))

    def answer(self, document: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(document).encode(), status=status, headers=headers)

    def fail(self, status: int, message: str = "no", **headers: str) -> None:
        self.answer(
            {"error": {"message": message}}, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    def send(
        self, data: bytes, *, status: int = 200, length: int | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data) if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def p_of(body: dict[str, Any]) -> float:
    """A probability that depends on the images and the text, and on nothing else."""
    text = body["messages"][0]["content"][-1]["text"]
    return p_of_images(images_of(body), text)


def images_of(body: dict[str, Any]) -> list[Image.Image]:
    *parts, _ = body["messages"][0]["content"]
    return [decoded(part["image_url"]["url"].partition(",")[2]) for part in parts]


def p_of_images(images: list[Image.Image], text: str) -> float:
    digest = hashlib.sha256(b"|".join([*(image.tobytes() for image in images), text.encode()])).digest()
    return (digest[0] + 1) / 258


def decoded(content: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")


def completion(body: dict[str, Any], p: float) -> dict[str, Any]:
    """An answer whose Yes and No share nine tenths."""
    yes, no = math.log(p * 0.9), math.log((1 - p) * 0.9)
    named = {YES: "token_id:7", NO: "token_id:9"} if body.get("return_tokens_as_token_ids") else {YES: "Yes", NO: "No"}
    return chat_answer([(named[YES], yes), (named[NO], no), ("Maybe", math.log(0.05))], model=body["model"])


def chat_answer(entries: list[tuple[str, float]], *, model: str = "judge") -> dict[str, Any]:
    """A chat completion whose first token is the first entry and whose likeliest are all of them."""
    listed = [{"token": token, "logprob": value, "bytes": None} for token, value in entries]
    first = {**listed[0], "top_logprobs": listed}
    message = {"role": "assistant", "content": entries[0][0]}
    return {"model": model, "choices": [{"index": 0, "message": message, "logprobs": {"content": [first]}}]}


Says = Callable[[list[dict[str, Any]], int], "str | tuple[int, bytes]"]
"""Messages and the number of earlier requests → a text, or a status with its body."""


def chatting(says: Says, **options: Any) -> FakeServer:
    """A server of a language model."""

    def behave(handler: Handler, number: int) -> bool:
        said = says(server.requests[number - 1], number - 1)
        if isinstance(said, tuple):
            handler.send(said[1], status=said[0])
        else:
            handler.answer(spoken(said, model=server.chats[number - 1]["model"]))
        return True

    server = FakeServer(behave=behave, **options)
    return server


def spoken(text: str, *, model: str) -> dict[str, Any]:
    """A chat completion of a text, with its price."""
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    choices = [{"index": 0, "finish_reason": "stop", "message": message}]
    return {"id": "x", "object": "chat.completion", "created": 0, "model": model, "choices": choices, "usage": usage}
