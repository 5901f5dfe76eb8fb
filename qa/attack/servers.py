"""Hostile HTTP against the judge server, the studio and the annotation page, over raw sockets.

Whatever is sent, the server answers with a status below 500 or hangs up, in SECONDS; it goes on answering others; its
log holds no traceback; it grows by less than BYTES; and nobody without the token gets anything but a refusal.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qa.attack.damage import SNIPPETS, mutant
from qa.attack.harness import BYTES, SECONDS, Outcome, Tally
from qa.attack.images import png
from qa.attack.machine import Moment
from qa.attack.serving import ADMIN_TOKEN, TOKEN

from pacorl.io.images import png_bytes
from pacorl.tiny.characters import EDITS, draw, set_of

INPUTS = 1000
"""For each server, at share 1."""
CHECKED_EVERY = 40
PATIENCE = 0.3
LONGEST = 240.0
"""Seconds by the clock, after which a server that does nothing has hung."""
WHOLE = ("value", "path", "method", "no_key")
"""Damages that leave a request whole, so that it must be answered."""
OPEN = (b"GET /join", b"POST /join", b"POST /leave")
"""Requests that need no token: they sign a browser in or out."""
PUBLIC = ("/health", "/page/base.css", "/page/app.js", "/", "/admin")
PNG = "data:image/png;base64,"
PICTURE = PNG + base64.b64encode(png(28, 28)).decode()
SCENE = set_of(("red", "round", "crown", "night"), 1, random.Random(1))[0]
HERO = PNG + base64.b64encode(png_bytes(draw(SCENE, 64))).decode()
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
    """Of the answer, if nothing is damaged."""


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
        Asked("POST", "/api/uploads?name=cat.png", png(28, 28)),
        Asked("DELETE", "/api/uploads/1"),
        Asked("GET", "/api/state"),
        Asked("GET", "/api/jobs/1"),
        Asked("GET", "/images/1/0.png", status=404),
        Asked("GET", "/api/example?number=3"),
        Asked("GET", "/api/taste"),
        Asked("POST", "/api/taste", {"name": "x", "prompts": ["a|b", "c|d"], "rounds": 3, "groups": 2}, status=422),
        Asked("POST", "/api/taste/x/ranks", {"group": "g", "ranks": [1, 2, 3]}, status=404),
        Asked("POST", "/api/taste/x/continue", status=404),
        Asked("POST", "/api/taste/x/stop", status=404),
        Asked("GET", "/api/models"),
        Asked("POST", "/api/models", MODELS),
        Asked("POST", "/api/models", MODELS | {"check": True}),
        Asked("POST", "/api/downloads", {"model": "owner/name", "accepted": False, "token": "x"}, status=409),
        Asked("DELETE", "/api/downloads"),
        Asked("GET", "/api/characters"),
        Asked("POST", "/api/characters/hero", CHARACTER),
        Asked("POST", "/api/characters/hero/first", {"picture": "0001.png"}, status=422),
        Asked("POST", "/api/characters/hero/sheet", SHEET, status=422),
        Asked("POST", "/api/characters/hero/train", {"steps": 3, "resume": ""}, status=422),
        Asked("POST", "/api/characters/hero/captions", {}, status=422),
        Asked("POST", "/api/characters/hero/stop"),
        Asked("DELETE", "/api/characters/nobody", status=404),
        Asked("GET", "/characters/hero/01.png", status=404),
        Asked("GET", "/loras/loras/hero/before-0.png", status=404),
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
        Asked("POST", "/api/rehearsal", {}, status=409),
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
FACTS: dict[str, dict[str, tuple[Asked, Callable[[Any], str]]]] = {
    "studio": {"UPLOAD": (Asked("POST", "/api/uploads?name=cat.png", png(28, 28)), lambda body: body["id"])},
    "annotate": {"INSTANCE": (Asked("GET", "/api/task"), lambda body: body["task"]["instance"])},
}
"""What a server names itself: name in requests → how it is learned."""
HEADERS = [
    *["Host: evil.example", "Host: ", "Host: a\r\nHost: b", "Host: [::1", "Host: \xff", "Origin: http://evil.example"],
    *[
        "Origin: null",
        "Origin: http://[::1",
        "Origin: ",
        "Sec-Fetch-Site: cross-site",
        "Cookie: " + "a=b; " * 3000,
        "Cookie: \x00=\xff",
        "X: " + "y" * 70_000,
    ],
    *["Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999999", "Content-Length: abc"],
    *[
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: identity",
        "Connection: close",
    ],
    *[
        "Content-Type: text/plain",
        "Content-Type: application/json; charset=utf-16",
        "Content-Type: multipart/form-data",
    ],
    *[
        "Content-Encoding: gzip",
        "Expect: 100-continue",
        "Upgrade: websocket\r\nConnection: Upgrade",
        "Range: bytes=5-1",
    ],
    *[
        "Authorization: Bearer ",
        "Authorization: Bearer \xff\xfe",
        "Authorization: Basic YTpi",
        "X-Request-Id: \xe9" * 50,
    ],
    *[
        "If-Modified-Since: yesterday",
        "If-None-Match: *",
        "nonsense",
        ": empty",
        " folded: x",
        "X-Pacorl-Decline: maybe",
    ],
]
VALUES = [
    *[
        "[",
        "]",
        "http://[::1",
        "[::1]:x",
        "127.0.0.1/health?",
        "x@127.0.0.1",
        "=;=",
        "bytes=-",
        "bytes=0-,0-",
        "-0",
        "+5",
    ],
    *["5, 5", "a" * 5000, "\xff", "%", "%ff", "?", "#", '"', "\\", ", ", ";", "0x5", "1e9", "\t", "W/", "*/*", "off"],
    *["application/json; charset=\xff", "application/x-www-form-urlencoded", "text/html; charset=utf-7", "a/b/c; d"],
]
PATHS = [
    *[
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/page/..%2f..%2fserver.py",
        "/images/../../x.png",
        "//",
        "/%00",
    ],
    *[
        "/" + "a" * 60_000,
        "/\xff",
        "/%ff%fe",
        "/api/%2e%2e/admin",
        "/images/%31/%2e%2e",
        "*",
        "http://evil.example/",
        "/;?#",
    ],
    *[
        "/join?" + "x" * 5000,
        "/join?%ed%a0%80",
        "/api/jobs/" + "9" * 5000,
        "/api/jobs/²",
        "/images/1/" + "9" * 400,
        "/openapi.json",
    ],
]
RAW = [
    *[
        b"",
        b"\0" * 50,
        b"\r\n" * 50,
        b"GET",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    *[
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"A" * 100_000,
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 5000,
    ],
    *[b"CONNECT evil:443 HTTP/1.1\r\nHost: evil:443\r\n\r\n", b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
]


@dataclass
class Running:
    """A server in a process of its own."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    facts: dict[str, str] = field(default_factory=dict)
    """What stands for the names of FACTS in requests."""

    def peak(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii", errors="replace")
        found = re.search(r"VmHWM:\s+(\d+)", status)
        return int(found[1]) * 1024 if found else 0


@contextlib.contextmanager
def running(name: str) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="attack-server-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as errors:
            command = [sys.executable, "-m", "qa.attack.serving", name]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().decode().strip()
            if not url:
                raise AssertionError(f"{name} did not start: {log.read_text()[-2000:]}")
            server = Running(name, process, int(url.rpartition(":")[2]), log)
            for fact, (asked, read) in FACTS.get(name, {}).items():
                server.facts[fact] = read(json.loads(sent(server, built(server, asked))[1]))
            yield server
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


# --- requests --------------------------------------------------------------------------------------------------


def built(server: Running, asked: Asked, *more: str, body: bytes | None = None, key: str | None = None) -> bytes:
    """The bytes of a request; `more` are further header lines."""
    key = asked.key if key is None else key
    content, path = body if body is not None else encoded(asked.body), asked.path
    for name, fact in server.facts.items():
        content, path = content.replace(name.encode(), fact.encode()), path.replace(name, fact)
    lines = [f"{asked.method} {path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", *more]
    lines += [f"Authorization: Bearer {key}"] if key else []
    if content:
        lines += [f"Content-Length: {len(content)}"]
        lines += ["Content-Type: application/json"] if not isinstance(asked.body, bytes) else []
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1", errors="replace")
    return head + content


def encoded(body: Any) -> bytes:
    return b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()


def hostile(server: Running, draw: random.Random) -> tuple[str, bytes]:
    """(what it is, bytes): a request of the server's own, damaged."""
    asked = draw.choice(REQUESTS[server.name])
    damages = {
        _value: 35,
        _body: 10,
        _head: 10,
        _header: 12,
        _path: 8,
        _method: 5,
        _no_key: 8,
        _raw: 4,
        _chunked: 5,
        _twice: 3,
    }
    damage = draw.choices(list(damages), list(damages.values()))[0]
    if damage is _value and not isinstance(asked.body, dict):
        damage = _header
    return damage.__name__.strip("_"), damage(server, asked, draw)


def _value(server: Running, asked: Asked, draw: random.Random) -> bytes:
    changed = mutant(asked.body, draw)
    # Else all but the first are repeated. A changed empty body may be no object.
    if isinstance(changed, dict) and "request" in changed and draw.random() < 0.5:
        changed["request"] = f"request-{draw.random()}"
    return built(server, asked, body=json.dumps(changed).encode())


def _body(server: Running, asked: Asked, draw: random.Random) -> bytes:
    content = bytearray(encoded(asked.body) or b"x")
    at = draw.randrange(len(content))
    content[at : at + draw.randrange(6)] = draw.choice(SNIPPETS)
    return built(server, asked, body=bytes(content[: draw.choice([None, at])]))


def _head(server: Running, asked: Asked, draw: random.Random) -> bytes:
    content = bytearray(built(server, asked))
    for _ in range(draw.randrange(1, 5)):
        content[draw.randrange(min(len(content), 200))] = draw.randrange(256)
    return bytes(content)


def _header(server: Running, asked: Asked, draw: random.Random) -> bytes:
    chosen = draw.sample(HEADERS, draw.choice([1, 1, 2]))
    if draw.random() < 0.5:  # a value that any header may have
        chosen = [f"{line.partition(':')[0]}: {draw.choice(VALUES)}" for line in chosen]
    return built(server, asked, *chosen)


def _path(server: Running, asked: Asked, draw: random.Random) -> bytes:
    return built(server, Asked(draw.choice(["GET", "POST"]), draw.choice(PATHS), draw.choice([None, {}])))


def _method(server: Running, asked: Asked, draw: random.Random) -> bytes:
    methods = ["PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "GET", "POST", "BREW", "get", ""]
    return built(server, replace(asked, method=draw.choice(methods)))


def _no_key(server: Running, asked: Asked, draw: random.Random) -> bytes:
    return built(server, asked, key=draw.choice(["", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\xff"]))


def _raw(server: Running, asked: Asked, draw: random.Random) -> bytes:
    return draw.choice(RAW)


def _twice(server: Running, asked: Asked, draw: random.Random) -> bytes:
    return built(server, asked).replace(b"Connection: close\r\n", b"") + built(server, asked)


def _chunked(server: Running, asked: Asked, draw: random.Random) -> bytes:
    head = built(server, replace(asked, body=None), "Transfer-Encoding: chunked", "Content-Type: application/json")
    content = encoded(asked.body) or b"{}"
    size = draw.choice([f"{len(content):x}", "zz", "-1", "ffffffffffff", "0", f"{len(content):x};a=b", "1"])
    return head + size.encode() + b"\r\n" + content + b"\r\n" + draw.choice([b"0\r\n\r\n", b"", b"0\r\nX: y\r\n\r\n"])


def sent(server: Running, request: bytes, *, whole: bool = True) -> tuple[int, bytes]:
    """(status, body) of the first answer to the bytes; status 0 if the server hung up. Raises TimeoutError.

    The time is that of a machine with nothing else to do. For more of a request that may not be `whole` the server may
    wait, and is told soon that there is none.
    """
    since = Moment.of(server.process.pid)
    with socket.create_connection(("127.0.0.1", server.port), timeout=LONGEST) as connection:
        answer = bytearray()
        with contextlib.suppress(ConnectionError):  # it need not read what it will not take
            connection.sendall(request)
            if not whole and not select.select([connection], [], [], PATIENCE)[0]:
                connection.shutdown(socket.SHUT_WR)
            while True:
                if not select.select([connection], [], [], 0.25)[0]:
                    _check_time(server, since)
                elif chunk := connection.recv(2**16):
                    answer += chunk
                else:
                    break
    found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
    return (int(found[1]) if found else 0), bytes(answer).partition(b"\r\n\r\n")[2]


def _check_time(server: Running, since: Moment) -> None:
    """Raise TimeoutError if an answer takes too long, or the server is gone."""
    now = Moment.of(server.process.pid)
    if now.waited(since) > SECONDS or now.clock - since.clock > LONGEST:
        raise TimeoutError


# --- outcomes --------------------------------------------------------------------------------------------------


def outcome(server: Running, number: int, *, seed: int) -> Outcome:
    """What became of one request."""
    what, request = hostile(server, random.Random(f"{seed}/servers/{server.name}/{number}"))
    started = time.monotonic()
    try:
        status, body = sent(server, request, whole=what in WHOLE)
    except TimeoutError:
        return Outcome(number, "slow", SECONDS, f"{what}: {request[:300]!r}")
    seconds = time.monotonic() - started
    path = request.split(b" ")[1:2]
    public = bool(path) and path[0].split(b"?")[0].decode(errors="replace") in PUBLIC
    if status >= 500 and status != 503:
        return Outcome(number, "traceback", seconds, f"{what}: {status} {body[:200]!r} to {request[:600]!r}")
    # Who shows no token is shown no page.
    if what == "no_key" and status < 400 and not public and not request.startswith(OPEN):
        return Outcome(number, "wrong", seconds, f"{what}: {status} {body[:200]!r} to {request[:300]!r}")
    return Outcome(number, "fine" if 200 <= status < 400 else "refused", seconds, what)


def health(server: Running, number: int, base: int) -> Outcome | None:
    """The first fault of the server as a whole, if there is one."""
    log = server.log.read_text(errors="replace")
    if server.process.poll() is not None:
        return Outcome(number, "died", 0, log[-1500:])
    if "Traceback" in log:
        server.log.write_text("")
        return Outcome(number, "traceback", 0, log[-1500:])
    if server.peak() > base + BYTES:
        return Outcome(number, "memory", 0, f"{server.peak() - base:,} bytes more")
    try:
        status, _ = sent(server, built(server, Asked("GET", "/health")))
    except (TimeoutError, OSError):
        status = 0
    return None if status == 200 else Outcome(number, "slow", SECONDS, f"/health answers {status}")


def attacked(name: str, count: int, *, seed: int, first: int = 0) -> Tally:
    """The outcomes of `count` requests to one server, and of connections that are held open."""
    tally = Tally(f"servers/{name}")
    with running(name) as server:
        for asked in REQUESTS[name]:
            status, body = sent(server, built(server, asked))  # whatever is loaded once
            assert status == asked.status, f"{asked} is answered {status} {body[:300]!r}"
        base = server.peak()
        for number in range(first, first + count):
            tally.add(outcome(server, number, seed=seed))
            if number % CHECKED_EVERY == 0 and (fault := health(server, number, base)):
                tally.add(fault)
        for number, fault in enumerate(held_open(server), count):
            tally.add(fault or Outcome(number, "refused", 0, "held open"))
        tally.add(health(server, count, base) or Outcome(count, "fine", 0, "healthy"))
    return tally


def held_open(server: Running) -> Iterator[Outcome | None]:
    """Headers and bodies that never end: the server hangs up by itself."""
    asked = REQUESTS[server.name][0]
    whole = built(server, asked)
    cuts = {
        "no header": b"",
        "half a header": whole[:30],
        "half a body": whole[:-5],
        "no body": whole[: whole.find(b"\r\n\r\n") + 4],
    }
    opened = {}
    for what, request in cuts.items():
        opened[what] = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        opened[what].sendall(request)
    deadline = time.monotonic() + 2 * SECONDS
    for number, (what, connection) in enumerate(opened.items()):
        with connection:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection.recv(1)
                yield None
            except ConnectionError:
                yield None
            except TimeoutError:
                yield Outcome(number, "slow", 2 * SECONDS, f"{what} is waited for")


def tallies(*, seed: int, share: float, target: str = "", number: int | None = None) -> Iterator[Tally]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in REQUESTS:
        if target in ("", name):
            first, count = (0, max(10, round(share * INPUTS))) if number is None else (number, 1)
            yield attacked(name, count, seed=seed, first=first)
