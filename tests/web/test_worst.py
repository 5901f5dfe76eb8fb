"""The worst request of each route: it costs the server little more than its caller, and nobody else waits for it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from PIL import Image
from qa.attack.serving import TOKEN
from tests.web.worst import Seen, Server, running

pytestmark = pytest.mark.slow

MIB = 2**20
CPU_SECONDS = 5
"""Most that one request may take. 2 MiB of zeros took 17 while each was reported, and 60 MiB are sent here."""
ANSWER_BYTES = 1000
WAIT_SECONDS = 2
"""Most that /health may take, other processes' share of the machine aside."""
CHAT, CONSISTENCY = "/v1/chat/completions", "/v1/consistency"
KNOWN = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
TURN = '{"model":"judge","max_tokens":1,"messages":[{"role":"user","content":'
IMAGE = TURN + '[{"type":"image_url","image_url":{"url":"data:image/png;base64,'


@dataclass(frozen=True, slots=True)
class Worst:
    """A request that repeats one piece."""

    path: str
    before: str
    piece: str
    after: str
    size: int
    """Most bytes of its body."""
    status: int
    """Of its refusal."""

    def body(self) -> bytes:
        before, piece, after = self.before.encode(), self.piece.encode(), self.after.encode()
        return before + piece * ((self.size - len(before) - len(after)) // len(piece)) + after


JUDGE = {
    "zeros": Worst(CHAT, '{"model":"judge","messages":[', "0,", "0]}", 60 * MIB, 413),
    "as many zeros as are parsed": Worst(CHAT, '{"model":"judge","messages":[', "0,", "0]}", 2**17, 400),
    "lists": Worst(CONSISTENCY, '{"images":[', "[],", "[]]}", 60 * MIB, 413),
    "lists without images": Worst("/tokenize", '{"prompt":[', "[],", "[]]}", 60 * MIB, 413),
    "lists within lists": Worst(CHAT, "", "[", "", 2**16, 400),
    "unknown fields": Worst(CHAT, TURN + "[", '{"a":0,"b":0,"c":0,"d":0},', "0]}]}", 2**18, 400),
    "a text without images": Worst("/tokenize", '{"prompt":"', "a ", '"}', 4 * MIB, 400),
    "a text of escapes": Worst(CHAT, TURN + '"', "\\n", '"}]}', 60 * MIB, 400),
    "a text of emojis": Worst(CHAT, TURN + '"', "\N{GRINNING FACE}", '"}]}', 60 * MIB, 400),
    "digits": Worst(CHAT, '{"model":', "1", "}", 60 * MIB, 400),
    "an image": Worst(CHAT, IMAGE, "A", '"}}]}]}', 60 * MIB, 400),
    "a torn image": Worst(CHAT, IMAGE, "A", '="}}]}]}', 60 * MIB, 400),
}
STUDIO = {
    "zeros": Worst("/api/taste", '{"name":"a","prompts":[', "0,", "0]}", 20 * MIB, 413),
    "as many zeros as are parsed": Worst("/api/taste", '{"name":"a","prompts":[', "0,", "0]}", 2**17, 422),
    "a text": Worst("/api/sets", '{"panels":[],"theme":"', "\N{GRINNING FACE}", '"}', 4 * MIB, 422),
    "an upload": Worst("/api/uploads", "", "[", "", 20 * MIB, 422),
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Server]:
    with running("judge") as server:
        yield server


@pytest.fixture(scope="module")
def studio() -> Iterator[Server]:
    with running("studio") as server:
        yield server


def check(seen: Seen, *, status: int, sent: int) -> None:
    assert (seen.status, len(seen.answer) < ANSWER_BYTES) == (status, True), seen.answer[:200]
    assert seen.cpu_seconds < CPU_SECONDS
    # The body as it came, as text, as the form's field, and decoded.
    assert seen.bytes_more < 8 * sent + 32 * MIB
    assert seen.slowest < WAIT_SECONDS


@pytest.mark.parametrize("name", JUDGE)
def test_the_judge_refuses_cheaply(judge: Server, name: str) -> None:
    body = JUDGE[name].body()
    check(judge.while_others_ask(JUDGE[name].path, body, KNOWN), status=JUDGE[name].status, sent=len(body))


@pytest.mark.parametrize("name", STUDIO)
def test_the_studio_refuses_cheaply(studio: Server, name: str) -> None:
    body = STUDIO[name].body()
    check(studio.while_others_ask(STUDIO[name].path, body, KNOWN), status=STUDIO[name].status, sent=len(body))


def test_a_stranger_who_signs_in_at_length_is_not_read(studio: Server) -> None:
    body = Worst("/join", "", "a=1&", "", 19 * MIB, 413).body()
    check(studio.while_others_ask("/join", body, FORM), status=413, sent=4096)


def blank(width: int, height: int) -> str:
    """A PNG of a few kilobytes."""
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def asking_about(*urls: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    document = {"model": "judge", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}
    return json.dumps(document).encode()


def test_eight_large_images_of_few_bytes_are_not_decoded(judge: Server) -> None:
    body = asking_about(*[blank(7900, 8000)] * 8)
    seen = judge.while_others_ask(CHAT, body, KNOWN)
    check(seen, status=400, sent=len(body))
    assert b"505,600,000 pixels together; send at most 64,000,000" in seen.answer
