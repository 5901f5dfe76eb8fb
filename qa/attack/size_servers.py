"""Requests of 1 to 64 MiB to the three servers, and what becomes of everybody else meanwhile.

While a request is under way, an honest client asks for `/health` and for one small thing that the server is for. It is
answered within ANSWERED seconds; the server and its decoders grow by less than 20 × the bytes sent, or than their
pixels take, and MARGIN; the request takes less than COMPUTED seconds of a processor; and its answer is no fault of the
server, and short.

A busy machine cannot make a fault. From the seconds that the honest client waits are taken those in which a thread of
the server, of its decoders, or of this process was ready to run and did not, as far as other processes had the
processors then, and those in which the machine under this one had them (`/proc/PID/task/*/schedstat`, `/proc/stat`).
Whatever the honest client waits for is, at any moment, computing, waiting for a processor, or asleep; load adds to the
second alone. Too much may be taken off, if threads wait that nobody waits for, so a busy machine may hide a fault; what
the server's event loop itself computes in the meantime is therefore never taken off, since every answer waits for that.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from qa.attack.harness import LONGEST_LINE, Outcome, Tally
from qa.attack.images import png
from qa.attack.machine import Moment, children, forget_peak, memory
from qa.attack.servers import PUBLIC, REQUESTS, Asked, Running, built, running, sent
from qa.attack.shapes import IMAGES, JSON, MIB, below_a_limit, inside, repeated, size

from pacorl.io.decoder import DECODERS
from pacorl.io.images import MAX_PIXELS
from pacorl.serve.schema import Limits
from pacorl.studio import models

INPUTS = 80
"""For each server, at share 1."""
ANSWERED, COMPUTED = 2.0, 10.0
MARGIN, TIMES = 64 * MIB, 20
BYTES_PER_PIXEL = 4
"""Of a decoded image: Pillow has four bytes for a pixel of three colours."""
HELD = {"judge": Limits().held_pixels, "studio": DECODERS * models.MAX_PIXELS, "annotate": 0}
"""Pixels of the images that a server holds at a time, its budget."""
DECODED = {"judge": DECODERS * MAX_PIXELS, "studio": DECODERS * models.MAX_PIXELS, "annotate": 0}
"""Pixels that the decoders have at a time, beside the server's: one image each."""
PATIENCE = 240.0
"""Seconds by the clock, after which the honest client or the hostile one waits for a server that does nothing."""
PAUSE = 0.2
LONGEST_REFUSAL = 2 * LONGEST_LINE
"""Bytes: a line, in JSON, with a letter of an alphabet other than Latin here and there."""
CUT = 2**30
"""Of an answer that is read."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """What one input sends, all at once."""

    what: str
    requests: Sequence[bytes]
    key: str
    public: bool

    @property
    def bytes(self) -> int:
        return sum(map(len, self.requests))


# --- hostile requests ------------------------------------------------------------------------------------------


def hostile(server: Running, draw: random.Random) -> Hostile:
    kinds: dict[Callable[..., tuple[str, bytes]], int] = {
        _value: 30,
        _many: 20,
        _whole: 8,
        _form: 10,
        _chunked: 4,
        _query: 4,
        _pictures: 24 if server.name != "annotate" else 0,
    }
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    key = draw.choices([None, "", "x"], [80, 14, 6])[0]
    together = draw.choices([1, 4, 8], [70, 15, 15])[0]
    what, request = kind(server, draw, key)
    path = request.split(b" ", 2)[1].split(b"?")[0].decode(errors="replace")
    says = f"{what} to {path}, {len(request):,} bytes × {together}{'' if key is None else f', key {key!r}'}"
    shown = "a key" if key is None else key
    return Hostile(says, [request] * together, shown, path in PUBLIC or path.startswith("/join"))


def _asked_with_a_body(server: Running, draw: random.Random) -> Asked:
    return draw.choice([asked for asked in REQUESTS[server.name] if isinstance(asked.body, dict)])


def _value(server: Running, draw: random.Random, key: str | None) -> tuple[str, bytes]:
    """One of a request's values is enormous."""
    asked, name = _asked_with_a_body(server, draw), draw.choice(list(JSON))
    body = inside(asked.body, JSON[name](below_a_limit(draw)), draw)
    return f"{name} in a value", built(server, asked, body=body, key=key)


def _whole(server: Running, draw: random.Random, key: str | None) -> tuple[str, bytes]:
    """There is nothing but an enormous value."""
    asked, name = _asked_with_a_body(server, draw), draw.choice(list(JSON))
    return name, built(server, asked, body=JSON[name](below_a_limit(draw)), key=key)


def _many(server: Running, draw: random.Random, key: str | None) -> tuple[str, bytes]:
    """A list of a request has its items again and again, or an object has thousands of entries."""
    asked = _asked_with_a_body(server, draw)
    mark, count = "\x01", below_a_limit(draw)
    changed: Any = json.loads(json.dumps(asked.body))
    places = [found for found in _collections(changed) if found[2]]
    section, name, value = draw.choice(places or [(changed, draw.choice([*changed] or ["x"]), ["x"])])
    section[name] = mark
    if isinstance(value, dict):
        last = json.dumps(next(iter(value.values())))
        entries = ",".join([f'"{number:06d}":{last}' for number in range(min(count, 8 * MIB) // (len(last) + 10) + 1)])
        items = b"{" + entries.encode() + b"}"
    else:
        items = repeated(json.dumps(draw.choice([value[0], value[-1]])).encode(), count)
    body = json.dumps(changed).encode().replace(json.dumps(mark).encode(), items, 1)
    return f"{name} again and again", built(server, asked, body=body, key=key)


def _collections(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(where, key, list or object) of all collections in a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        if isinstance(inner, dict | list):
            yield value, key, inner
            yield from _collections(inner)


def _form(server: Running, draw: random.Random, key: str | None) -> tuple[str, bytes]:
    """A form of thousands of fields, to /join as anybody can reach it, or where JSON is taken."""
    unit = draw.choice(
        [b"a=1&", b"token=x&", b"&", b"a&", b"%41=%41&", b"a" * 1000 + b"=&", b"=", b"token=" + b"%e9" * 200]
    )
    count = below_a_limit(draw)
    body = unit * (count // len(unit))
    taken = draw.random() < 0.2 or server.name == "judge"
    path = _asked_with_a_body(server, draw).path if taken else "/join"
    request = built(
        server, Asked("POST", path, b""), "Content-Type: application/x-www-form-urlencoded", body=body, key=key
    )
    return f"form of {unit[:12]!r}", request


def _chunked(server: Running, draw: random.Random, key: str | None) -> tuple[str, bytes]:
    """A body in chunks of one byte each."""
    asked = _asked_with_a_body(server, draw)
    head = built(
        server, Asked(asked.method, asked.path), "Transfer-Encoding: chunked", "Content-Type: application/json", key=key
    )
    return "chunks of a byte", head + b"1\r\n0\r\n" * (size(draw, most=8) // 6) + b"0\r\n\r\n"


def _query(server: Running, draw: random.Random, key: str | None) -> tuple[str, bytes]:
    """What stands before the body may have some 60 KB."""
    asked = draw.choice(REQUESTS[server.name])
    unit = draw.choice(["a=1&", "number=9", "&", "%41", "a", "name=x&"])
    if draw.random() < 0.5:
        longer = Asked(asked.method, f"{asked.path.partition('?')[0]}?{unit * (55_000 // len(unit))}", asked.body)
        return f"query of {unit!r}", built(server, longer, key=key)
    cookies = draw.choice(["a=b; ", "a", ";", '"', "=", "pacorl=x; ", '\\"'])
    return f"cookies of {cookies!r}", built(server, asked, "Cookie: " + cookies * (55_000 // len(cookies)), key=key)


def _pictures(server: Running, draw: random.Random, key: str | None) -> tuple[str, bytes]:
    """Pictures that a decoder works hard for, as many as a request may have."""
    name = draw.choice(list(IMAGES))
    content = IMAGES[name](size(draw, most=19))
    if server.name == "studio":
        return name, built(server, Asked("POST", "/api/uploads?name=cat.png", b""), body=content, key=key)
    number = draw.choice([1, 2, 8])
    content = content if number * len(content) * 4 / 3 < 60 * MIB else content[: 6 * MIB]
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    if draw.random() < 0.3:
        body: Any = {"model": "judge", "images": [url] * max(2, number), "theme": "t"}
        return f"{name} × {number}", built(server, Asked("POST", "/v1/consistency", body), key=key)
    chat = REQUESTS["judge"][0]
    parts = [{"type": "image_url", "image_url": {"url": url}}] * number + [{"type": "text", "text": "Is it right?"}]
    body = chat.body | {"messages": [{"role": "user", "content": parts}]}
    return f"{name} × {number}", built(server, Asked("POST", chat.path, body), key=key)


# --- everybody else --------------------------------------------------------------------------------------------


HONEST: dict[str, Asked] = {
    "judge": REQUESTS["judge"][0],
    "studio": Asked("POST", "/api/uploads?name=cat.png", png(28, 28)),
    "annotate": Asked("GET", "/api/task"),
}
"""A small thing that a server is for."""


@dataclass
class Fault(Exception):
    """What a request must not lead to; `kind` is one of harness.FAULTS."""

    kind: str
    detail: str


@dataclass
class Watch:
    """A server under attack: its resources, and what others are answered."""

    server: Running
    started: Moment = field(init=False)
    resident: int = field(init=False)
    cost: float = 0.0
    """Of a processor, of one round of honest questions."""
    rounds: int = 0
    longest: float = 0.0
    peaks: dict[int, int] = field(default_factory=dict)
    """Of its decoders."""

    def __post_init__(self) -> None:
        before = self.now()
        for _ in range(3):
            self.ask()
        self.cost = (self.now().computed - before.computed) / 3
        self.begin()

    def now(self) -> Moment:
        return Moment.of(self.server.process.pid)

    def begin(self) -> None:
        pid = self.server.process.pid
        self.rounds, self.longest = 0, 0.0
        self.peaks = {child: memory(child, "VmRSS") for child in children(pid)}
        for member in (pid, *self.peaks):
            forget_peak(member)
        self.base = dict(self.peaks)
        self.resident, self.started = memory(pid, "VmRSS"), self.now()

    def ask(self) -> None:
        """One round of honest questions. Raises Fault if it is not answered as it should be, and in time."""
        for asked in (Asked("GET", "/health"), HONEST[self.server.name]):
            body = self._answered(asked)
            if asked.path.startswith("/api/uploads"):
                self._answered(Asked("DELETE", f"/api/uploads/{json.loads(body)['id']}"))
        self.rounds += 1

    def _answered(self, asked: Asked) -> bytes:
        since, answer = self.now(), bytearray()
        try:
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as connection:
                connection.sendall(built(self.server, asked))
                connection.settimeout(0.25)
                while True:
                    try:
                        if not (received := connection.recv(2**16)):
                            break
                        answer += received
                    except TimeoutError:
                        self._check_wait(asked, since)
        except ConnectionError as error:
            answer = bytearray(f"by {error}".encode())
        self._check_wait(asked, since)
        if not answer.startswith(f"HTTP/1.1 {asked.status}".encode()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.server.process.wait(1)
                raise Fault("died", self.server.log.read_text(errors="replace")[-1500:])
            raise Fault("lost", f"{asked.path} is answered {bytes(answer[:300])!r}")
        return bytes(answer).partition(b"\r\n\r\n")[2]

    def _check_wait(self, asked: Asked, since: Moment) -> None:
        now = self.now()
        waited = now.waited(since)
        self.longest = max(self.longest, waited)
        if waited > ANSWERED or now.clock - since.clock > PATIENCE:
            raise Fault("slow", f"{asked.path} waited {waited:.1f} s ({now.clock - since.clock:.1f} s by the clock)")

    def check(self, hostile: Hostile) -> None:
        """Raises Fault if the hostile requests have used up too much."""
        pid = self.server.process.pid
        if self.server.process.poll() is not None:
            raise Fault("died", self.server.log.read_text(errors="replace")[-1500:])
        for child in children(pid):
            self.peaks[child] = max(self.peaks.get(child, 0), memory(child, "VmHWM"))
        grown = memory(pid, "VmHWM") - self.resident
        grown += sum(max(0, peak - self.base.get(child, 0)) for child, peak in self.peaks.items())
        pixels = HELD[self.server.name] + DECODED[self.server.name]
        most = max(TIMES * hostile.bytes, BYTES_PER_PIXEL * pixels) + MARGIN
        if grown > most:
            raise Fault("memory", f"{grown // MIB:,} MiB more, and {most // MIB:,} are allowed")
        computed = self.now().computed - self.started.computed - self.rounds * self.cost
        if computed > COMPUTED * len(hostile.requests):
            raise Fault("slow", f"{computed:.1f} s of a processor")


# --- outcomes --------------------------------------------------------------------------------------------------


@dataclass
class Sender(threading.Thread):
    """Sends one request and reads the answer, while others ask."""

    server: Running
    request: bytes
    status: int = 0
    length: int = 0
    head: bytes = b""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE) as connection,
        ):
            with contextlib.suppress(ConnectionError):  # it need not read what it will not take
                connection.sendall(self.request)
            while (received := connection.recv(2**18)) and self.length < CUT:
                self.head += received[: max(0, 1000 - len(self.head))]
                self.length += len(received)
        found = re.match(rb"HTTP/1\.1 (\d{3})", self.head)
        self.status = int(found[1]) if found else 0


def outcome(watch: Watch, number: int, *, seed: int) -> Outcome:
    """What became of one input."""
    sends = hostile(watch.server, random.Random(f"{seed}/size/{watch.server.name}/{number}"))
    return sent_while_others_ask(watch, sends, number)


def sent_while_others_ask(watch: Watch, sends: Hostile, number: int) -> Outcome:
    """Sends requests, and asks for honest things until they are answered."""
    server = watch.server
    watch.begin()
    senders = [Sender(server, request) for request in sends.requests]
    for sender in senders:
        sender.start()
    try:
        while any(sender.is_alive() for sender in senders):
            watch.ask()
            watch.check(sends)
            time.sleep(PAUSE)
        watch.ask()
        watch.check(sends)
        for sender in senders:
            _check_answer(sender, sends)
        if "Traceback" in (log := server.log.read_text(errors="replace")):
            raise Fault("traceback", log[-1500:])
    except Fault as fault:
        return Outcome(
            number, fault.kind, watch.now().computed - watch.started.computed, f"{sends.what}: {fault.detail}"
        )
    seconds = watch.now().computed - watch.started.computed
    fine = all(200 <= sender.status < 400 for sender in senders)
    return Outcome(number, "fine" if fine else "refused", seconds, f"{sends.what}: {watch.longest:.1f} s")


def _check_answer(sender: Sender, sends: Hostile) -> None:
    if sender.status >= 500 and sender.status != 503:
        raise Fault("traceback", f"{sender.head!r}")
    if sends.key in ("", "x") and not sends.public and 200 <= sender.status < 400:
        raise Fault("wrong", f"without a key: {sender.head!r}")
    if sender.status >= 400 and sender.length > LONGEST_REFUSAL:
        raise Fault("nameless", f"a refusal of {sender.length:,} bytes: {sender.head[:300]!r}")


@contextlib.contextmanager
def watched(name: str) -> Iterator[Watch]:
    with running(name) as server:
        for asked in REQUESTS[name]:
            sent(server, built(server, asked))  # whatever is loaded once
        yield Watch(server)


def attacked(name: str, numbers: range, *, seed: int) -> Tally:
    """The outcomes of these inputs of one server, which is started anew after each fault."""
    tally, left = Tally(f"size/{name}"), list(numbers)
    while left:
        with ExitStack() as stack:
            watch = stack.enter_context(watched(name))
            while left:
                tally.add(found := outcome(watch, left.pop(0), seed=seed))
                if tally.faults and tally.faults[-1] is found:
                    break
                _tidy(watch.server)
    return tally


def _tidy(server: Running) -> None:
    """Takes back what was uploaded, so that the next input is not refused for that."""
    if server.name == "studio":
        state = json.loads(sent(server, built(server, Asked("GET", "/api/state")))[1])
        for upload in state["uploads"]:
            sent(server, built(server, Asked("DELETE", f"/api/uploads/{upload['id']}")))


def tallies(*, seed: int, share: float, target: str = "", number: int | None = None) -> Iterator[Tally]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in REQUESTS:
        if target in ("", name):
            first, count = (0, max(3, round(share * INPUTS))) if number is None else (number, 1)
            yield attacked(name, range(first, first + count), seed=seed)
