"""A judge's server that misbehaves in every way that we could think of: `BEHAVIOURS` by name.

Each behaviour is given the right answer, and returns the bytes that go over the wire instead; then the server hangs up.
None of them is a plain lie (an answer of the right form with another number in it), which nobody can see.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
from fake_server import FakeServer, Handler, completion, p_of, p_of_images
from PIL import Image

from pacorl.judge import http as judge_http
from pacorl.judge.http import HttpJudge
from pacorl.types import Question

Json = dict[str, Any]
Behaviour = Callable[[Json], bytes]

RED, BLUE = (Image.new("RGB", (8, 6), colour) for colour in ("red", "blue"))
LIE = 0.123456  # what answers to other questions say
elsewhere = {"url": "http://127.0.0.1:9/v1"}
"""Where redirects lead: a test puts a server there that lies."""


def http(body: bytes, *headers: str, status: str = "200 OK", length: object = None) -> bytes:
    """A response as it should be."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + body


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


def chunked(body: bytes, *, size: str = "") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    half = len(body) // 2
    chunks = [f"{size or format(len(part), 'x')}\r\n".encode() + part + b"\r\n" for part in (body[:half], body[half:])]
    return head + b"".join(chunks) + b"0\r\n\r\n"


@cache
def bomb() -> bytes:
    return gzip.compress(bytes(30_000_000), 1)


def first(answer: Json) -> Json:
    return answer["choices"][0]["logprobs"]["content"][0]  # type: ignore[no-any-return]


def with_first(**changes: Any) -> Behaviour:
    """The first position's entry, changed."""

    def behave(answer: Json) -> bytes:
        first(answer).update(changes)
        return http(dumped(answer))

    return behave


def with_top(change: Callable[[list[Json]], Any]) -> Behaviour:
    """The list of the likeliest, changed."""

    def behave(answer: Json) -> bytes:
        first(answer)["top_logprobs"] = change(first(answer)["top_logprobs"])
        return http(dumped(answer))

    return behave


def with_answer(**changes: Any) -> Behaviour:
    return lambda answer: http(dumped(answer | changes))


def with_choice(**changes: Any) -> Behaviour:
    return lambda answer: http(dumped(answer | {"choices": [answer["choices"][0] | changes]}))


def with_value(value: Any) -> Behaviour:
    """Another log-probability for the first listed token."""
    return with_top(lambda top: [top[0] | {"logprob": value}, *top[1:]])


def lying(answer: Json) -> Json:
    """An answer of the right form to another question."""
    lie = json.loads(dumped(answer))
    named = [entry["token"] for entry in first(answer)["top_logprobs"]]
    values = [math.log(LIE * 0.9), math.log((1 - LIE) * 0.9), math.log(0.05)]
    entries = [{"token": token, "logprob": value, "bytes": None} for token, value in zip(named, values, strict=True)]
    lie["choices"][0]["logprobs"]["content"] = [{**entries[0], "top_logprobs": entries}]
    return lie  # type: ignore[no-any-return]


def nested(answer: Json) -> bytes:
    return http(b'{"model": "judge", "choices": ' + b"[" * 100_000)


def digits(answer: Json) -> bytes:
    text = dumped(answer).decode()
    value = str(first(answer)["top_logprobs"][0]["logprob"])
    return http(text.replace(value, "-" + "9" * 400).encode())


def duplicate_keys(answer: Json) -> bytes:
    return http(dumped(answer)[:-1] + b', "choices": []}')


def rounded_sample(answer: Json) -> bytes:
    first(answer)["logprob"] += 1e-4
    return http(dumped(answer))


def statuses() -> dict[str, Behaviour]:
    """Answers whose body would be right, under statuses that are not 200."""
    codes = (201, 202, 204, 206, 226, 300, 304, 400, 402, 404, 405, 408, 409, 410, 413, 418, 422, 425, 429, 451)
    codes += (500, 501, 502, 503, 504, 507, 599)

    def of(code: int) -> Behaviour:
        return lambda answer: http(dumped(answer), status=f"{code} X")

    return {f"status {code}": of(code) for code in codes}


def redirects() -> dict[str, Behaviour]:
    def to(code: int) -> Behaviour:
        return lambda answer: http(b"", f"Location: {elsewhere['url']}/chat/completions", status=f"{code} Moved")

    return {f"redirect {code}": to(code) for code in (301, 302, 303, 307, 308)}


WIRE: dict[str, Behaviour] = {
    "silence": lambda answer: b"",
    "half a status line": lambda answer: b"HTTP/1.1 2",
    "no status line": lambda answer: b"hello\r\n\r\n",
    "HTTP/0.9": dumped,
    "another protocol": lambda answer: b"SSH-2.0-OpenSSH_9.6\r\n",
    "status of letters": lambda answer: http(dumped(answer), status="okay OK"),
    "headers that do not end": lambda answer: b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n",
    "a header of 200 KB": lambda answer: http(dumped(answer), "X: " + "x" * 200_000),
    "150 headers": lambda answer: http(dumped(answer), *["X: y"] * 150),
    "a header without a colon": lambda answer: http(dumped(answer), "nonsense"),
    "a folded header": lambda answer: http(dumped(answer), "X: a", " b"),
    "two lengths": lambda answer: http(dumped(answer), "Content-Length: 10"),
    "a negative length": lambda answer: http(dumped(answer), length=-1),
    "a length in words": lambda answer: http(dumped(answer), length="many"),
    "a length that is too short": lambda answer: http(dumped(answer), length=len(dumped(answer)) // 2),
    "a length that is too long": lambda answer: http(dumped(answer), length=len(dumped(answer)) + 100),
    "a length of 10 GB": lambda answer: http(dumped(answer), length=10**10),
    "no length": lambda answer: b"HTTP/1.1 200 OK\r\n\r\n" + dumped(answer),
    "HTTP/1.0": lambda answer: http(dumped(answer)).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "chunked": lambda answer: chunked(dumped(answer)),
    "a bad chunk": lambda answer: chunked(dumped(answer), size="zz"),
    "a chunk of too many bytes": lambda answer: chunked(dumped(answer), size="fffffff"),
    "chunks that end early": lambda answer: chunked(dumped(answer))[:-60],
    "chunks and a length": lambda answer: chunked(dumped(answer)).replace(b"\r\n", b"\r\nContent-Length: 5\r\n", 1),
    "one response too many": lambda answer: http(dumped(answer)) + http(dumped(lying(answer))),
    "100 Continue first": lambda answer: b"HTTP/1.1 100 Continue\r\n\r\n" + http(dumped(answer)),
    "103 Early Hints first": lambda answer: b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + http(dumped(answer)),
    "500 times 100 Continue": lambda answer: b"HTTP/1.1 100 Continue\r\n\r\n" * 500 + http(dumped(answer)),
    "an upgrade": lambda answer: http(b"", "Upgrade: h2c", "Connection: Upgrade", status="101 Switching"),
    "gzip": lambda answer: http(gzip.compress(dumped(answer)), "Content-Encoding: gzip"),
    "gzip that is none": lambda answer: http(dumped(answer), "Content-Encoding: gzip"),
    "a bomb": lambda answer: http(bomb(), "Content-Encoding: gzip"),
    "identity": lambda answer: http(dumped(answer), "Content-Encoding: identity"),
    "2 MB": lambda answer: http(dumped(answer) + b" " * 2_000_000),
    "2 MB in chunks": lambda answer: chunked(dumped(answer) + b" " * 2_000_000),
    "kept alive": lambda answer: http(dumped(answer), "Connection: keep-alive", "Keep-Alive: timeout=600"),
    "cookies": lambda answer: http(dumped(answer), "Set-Cookie: a=b; Path=/"),
    "the id of a gateway": lambda answer: http(dumped(answer), "X-Request-Id: req_0123456789abcdef"),
    "Retry-After in words": lambda answer: http(b"{}", "Retry-After: soon", status="503 Busy"),
}
DOCUMENTS: dict[str, Behaviour] = {
    "nothing": lambda answer: http(b""),
    "HTML": lambda answer: http(b"<html>Bad gateway</html>"),
    "cut JSON": lambda answer: http(dumped(answer)[:-30]),
    "JSON and more": lambda answer: http(dumped(answer) + b" and more"),
    "two documents": lambda answer: http(dumped(lying(answer)) + dumped(answer)),
    "server-sent events": lambda answer: http(b"data: " + dumped(answer) + b"\n\ndata: [DONE]\n\n"),
    "a mark": lambda answer: http(b"\xef\xbb\xbf" + dumped(answer)),
    "UTF-16": lambda answer: http(dumped(answer).decode().encode("utf-16")),
    "no UTF-8": lambda answer: http(dumped(answer)[:-1] + b', "x": "\xff\xfe\xff"}'),
    "a zero byte": lambda answer: http(dumped(answer) + b"\0"),
    "a list": lambda answer: http(dumped([answer])),
    "a text": lambda answer: http(dumped(json.dumps(answer))),
    "null": lambda answer: http(b"null"),
    "a number": lambda answer: http(b"0.7"),
    "100,000 levels": nested,
    "400 digits": digits,
    "keys twice": duplicate_keys,
    "single quotes": lambda answer: http(str(answer).encode()),
}
ANSWERS: dict[str, Behaviour] = {
    "an error": lambda answer: http(dumped({"error": {"message": "no", "code": 500}})),
    "an error beside it": with_answer(object="error", message="out of memory"),
    "no choices": with_answer(choices=[]),
    "null choices": with_answer(choices=None),
    "choices by name": with_answer(choices={"0": {}}),
    "choices of numbers": with_answer(choices=[1]),
    "no index": lambda answer: http(
        dumped(answer | {"choices": [{k: v for k, v in answer["choices"][0].items() if k != "index"}]})
    ),
    "no log-probabilities": with_choice(logprobs=None),
    "no positions": with_choice(logprobs={"content": []}),
    "positions of null": with_choice(logprobs={"content": [None]}),
    "the old form": with_choice(logprobs={"tokens": ["Yes"], "token_logprobs": [-0.1]}),
    "no list": with_first(top_logprobs=None),
    "an empty list": with_first(top_logprobs=[]),
    "a list of texts": with_first(top_logprobs=["Yes", "No"]),
    "a token that is null": with_first(token=None),
    "a token that is a number": with_first(token=7),
    "a log-probability of null": with_value(None),
    "a log-probability of letters": with_value("high"),
    "a log-probability as text": with_value("-0.5"),
    "a log-probability that is true": with_value(True),
    "NaN": with_value(math.nan),
    "infinity": with_value(math.inf),
    "minus infinity": with_value(-math.inf),
    "logits": with_value(12.5),
    "1e308": with_value(1e308),
    "the sampled token rounded": rounded_sample,
    "the sampled token far off": with_first(logprob=-0.4),
    "every entry twice": with_top(lambda top: [entry for entry in top for _ in range(2)]),
    "every entry twice, rounded": with_top(
        lambda top: [*top, *({**entry, "logprob": entry["logprob"] - 1e-3} for entry in top)]
    ),
    "shuffled": with_top(lambda top: random.Random(0).sample(top, len(top))),
    "half a character": with_top(lambda top: [*top, {"token": "\ud800", "logprob": -9.0}]),
    "unknown fields": with_top(lambda top: [{**entry, "rank": 3} for entry in top]),
    "one of the two": with_top(lambda top: top[:1]),
    "neither of the two": with_top(lambda top: top[2:]),
    "vLLM's floor": with_top(lambda top: [{**entry, "logprob": -9999.0} for entry in top]),
}
BEHAVIOURS = WIRE | DOCUMENTS | ANSWERS | statuses() | redirects()


RIGHT = {
    "no length", "HTTP/1.0", "chunked", "chunks and a length", "one response too many", "100 Continue first",
    "500 times 100 Continue", "103 Early Hints first", "identity", "kept alive", "cookies", "the id of a gateway",
    "150 headers", "a folded header", "a mark", "no index", "the sampled token rounded", "every entry twice",
    "shuffled", "half a character", "unknown fields",
    "an error beside it", "2 MB", "2 MB in chunks", "gzip", "UTF-16", "status 201", "status 202", "status 206",
    "status 226", "every entry twice, rounded", "the sampled token far off",
    "a token that is null", "a token that is a number",
}  # fmt: skip
"""Behaviours that no right client need mind."""
REFUSED = {"status 404", *redirects()}
"""Behaviours that are raised: the address is wrong."""
SLOW = ("hangs", "drips", "hangs within the body")
"""Behaviours that last until the client gives up."""
LONGEST = 60.0
"""Seconds that they last at most."""


def misbehave(handler: Handler, answer: Json, name: str, behaviours: dict[str, Behaviour] = BEHAVIOURS) -> None:
    """Sends what the behaviour says, and hangs up."""
    handler.close_connection = True
    raw = behaviours[name](answer) if name in behaviours else http(dumped(answer))
    try:
        match name:
            case "reset":
                handler.wfile.write(raw[:100])
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case "hangs" | "hangs within the body":
                handler.wfile.write(raw[:-20] if name == "hangs within the body" else b"")
                handler.connection.settimeout(LONGEST)
                handler.connection.recv(1)  # ends when the client hangs up
            case "drips":
                for byte in raw:
                    handler.wfile.write(bytes([byte]))
                    time.sleep(LONGEST / len(raw))
            case _:
                handler.wfile.write(raw)
    except OSError:  # the client has seen enough
        return


class Draws:
    """Which behaviour each try of each question gets; it follows from the seed, in whatever order they are asked."""

    HONEST = "honest"

    def __init__(self, names: Sequence[str], *, seed: int, honest: float = 0.3) -> None:
        self._names, self._seed, self._honest = names, seed, honest
        self._drawn: dict[str, list[str]] = {}

    def draw(self, text: str) -> str:
        drawn = self._drawn.setdefault(text, [])
        draw = random.Random(f"{self._seed}/{text}/{len(drawn)}")
        drawn.append(self.HONEST if draw.random() < self._honest else draw.choice(self._names))
        return drawn[-1]

    def missing_by_design(self, text: str) -> bool:
        """Whether somebody answered, and nobody so that a right client has a verdict of it."""
        drawn = self._drawn.get(text, [])
        return bool(drawn) and not any(name == self.HONEST or name in RIGHT for name in drawn)


def misbehaving(draws: Draws) -> FakeServer:
    """A server that draws a behaviour for each question, or answers it."""
    server = FakeServer()

    def behave(handler: Handler, number: int) -> bool:
        body = server.chats[number - 1]
        name = draws.draw(body["messages"][0]["content"][-1]["text"])
        if name != Draws.HONEST:
            misbehave(handler, completion(body, p_of(body)), name)
        return name != Draws.HONEST

    server.behave = behave
    return server


# --- who asks --------------------------------------------------------------------------------------------------


@contextmanager
def impatient() -> Iterator[None]:
    """Within the block nobody waits long before asking again, nor gives a server up that hangs now and then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
        patch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
        patch.setattr(judge_http, "COOLDOWN_SECONDS", 0.01)
        yield


@contextmanager
def asking(servers: Sequence[FakeServer], **options: Any) -> Iterator[HttpJudge]:
    """A judge of these options that asks these servers."""
    with ExitStack() as stack:
        urls = [stack.enter_context(server.running()).url for server in servers]
        yield stack.enter_context(HttpJudge("judge", urls, **options))


def questions(count: int) -> list[Question]:
    return [Question((RED, BLUE), f"Is {number} right?") for number in range(count)]


def truth_of(question: Question) -> float:
    """What an honest server answers."""
    return p_of_images(list(question.images), question.text)


@contextmanager
def lying_elsewhere() -> Iterator[FakeServer]:
    """A server where redirects lead, and which nobody may ask."""

    def lie(handler: Handler, number: int) -> bool:
        handler.answer(completion(fake.chats[number - 1], 0.5))
        return True

    fake = FakeServer(behave=lie)
    with fake.running(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(elsewhere, "url", fake.url)
        yield fake
