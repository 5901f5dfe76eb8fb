"""The only HTTP client: judges, reward services, language models and images by URL are asked through `exchange`.

A server may be broken or hostile, so an answer is bounded on every side: a new connection, no redirects, no
compression, at most `max_bytes`, and one deadline from the resolver to the last byte. Faults of the wire and of parsing
are a TransientError: another try may succeed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pacorl import __version__
from pacorl.io.documents import JsonObject

if TYPE_CHECKING:
    import ssl


T = TypeVar("T")

MAX_ANSWER_BYTES = 2**20
PASSING = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 that another try may not see."""
UNAVAILABLE = frozenset({502, 503, 504})
"""HTTP statuses of a gateway, or of a loading server, in place of a silent service."""
MAX_BACKOFF_SECONDS = 20.0
COOLDOWN_SECONDS = 10.0
"""Pause before an unanswered service is asked again."""
PATIENCE = 3
"""Time-outs of silence after which a service is broken: with a judge's default, three minutes. Without a limit, a
hanging judge would be asked every question seven times, which takes a day for an epoch of the paper."""
REQUEST_ID = "X-Request-Id"
ID_PREFIX = "pacorl-"
"""Prefix of our ids, which gateways' own ids lack."""
SHOWN = 200  # characters of an URL or of an error in a message
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""Errors of reading a malformed document: any of Python's complaints about values."""


class TransientError(Exception):
    """An attempt failed; another may not. `unreachable`: there was no answer at all."""

    def __init__(self, reason: str, *, wait: float = 0.0, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        self.unreachable = unreachable


class DeadlineError(TransientError):
    """No whole answer came in time."""


class SilentError(TransientError):
    """The service has been silent for so long that asking again now would be in vain."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """Looked up in any case of letters."""
    body: bytes = field(repr=False)
    key: str = field(default="", repr=False)
    """The request's key, which no message may show."""

    @property
    def passing(self) -> bool:
        """Whether another try may see another status."""
        return self.status in PASSING or self.status >= 500

    @property
    def redirect(self) -> str:
        """Target of a redirect; empty for any other status."""
        if 300 <= self.status < 400:
            return shown_url(self.headers.get("location", "nowhere"))
        return ""

    def document(self) -> JsonObject:
        """Parse the body's JSON object. Raises TransientError if it is none."""
        try:
            # Not by `parse_json`: a judge may list half a character as a token.
            numbers: Any = {"parse_constant": _finite, "parse_float": _finite, "parse_int": _whole}
            document = json.loads(self.body.decode("utf-8-sig"), **numbers)
        except MALFORMED as fault:
            reason = self._one_line(str(fault)) if isinstance(fault, ValueError) else type(fault).__name__
            raise TransientError(f"an answer that is not JSON ({reason})") from None
        if not isinstance(document, dict):
            raise TransientError("an answer that is not a JSON object")
        return document

    def error(self) -> JsonObject:
        """Return the `error` object of an API's refusal; empty if there is none."""
        try:
            error = self.document().get("error")
        except TransientError:
            return {}
        if isinstance(error, dict):
            return error
        return {"message": str(error)}

    def fault(self, *, unreachable: bool = False) -> TransientError:
        """Return the status as an error, with the wait of the header `Retry-After`."""
        try:
            wait = min(MAX_BACKOFF_SECONDS, max(0.0, float(self.headers.get("retry-after", "0"))))
        except ValueError:  # it may be a date
            wait = 0.0
        # The API's own message, else the beginning of the body.
        message = self._one_line(str(self.error().get("message") or self.body[:300].decode(errors="replace")))
        return TransientError(f"HTTP {self.status} {message}".strip(), wait=wait, unreachable=unreachable)

    def _one_line(self, text: str) -> str:
        clean = " ".join(text.split())[:300]
        if self.key:
            return clean.replace(self.key, "***")
        return clean


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


def _whole(number: str) -> int:
    value = int(number)
    float(value)  # OverflowError, as a later computation would raise
    return value


async def exchange(
    url: str,
    document: Any = None,
    *,
    seconds: float,
    key: str = "",
    headers: Mapping[str, str] | None = None,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> Answer:
    """Ask once: GET, or POST of a document as JSON.

    Args:
        seconds: the deadline of everything together.
        key: sent as a bearer token.

    Raises:
        TransientError: for any fault of the wire, and for answers beyond a bound. Statuses are no faults.
    """
    import httpx2

    # The request.
    own_id = ID_PREFIX + uuid.uuid4().hex
    sent = {"User-Agent": f"pacorl/{__version__}", "Accept-Encoding": "identity", "Connection": "close"}
    sent[REQUEST_ID] = own_id
    if key:
        sent["Authorization"] = f"Bearer {key}"
    method = "GET"
    request: dict[str, Any] = {}
    if document is not None:
        method = "POST"
        sent["Content-Type"] = "application/json"
        request["content"] = json.dumps(document).encode()
    request["headers"] = sent | dict(headers or {})

    # A client, and so a connection, per question: left-over bytes of one answer can never begin the next. It takes
    # 0.1 ms more than a kept connection.
    # Connecting ends before the deadline does: cancelling a TLS handshake from outside leaves its socket open.
    timeout = httpx2.Timeout(None, connect=0.9 * seconds)
    client = httpx2.AsyncClient(verify=_tls(), timeout=timeout, follow_redirects=False)
    try:
        async with (
            asyncio.timeout(seconds),  # over everything: each chunk of a slow body would reset the client's own
            client,
            client.stream(method, url, **request) as response,
        ):
            _check_head(response.headers, own_id, max_bytes)
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                _check_size(len(body), max_bytes)
            return Answer(response.status_code, response.headers, bytes(body), key)
    except (TimeoutError, httpx2.TimeoutException):
        raise DeadlineError(f"no answer within {seconds:g} s", unreachable=True) from None
    except httpx2.TransportError as error:
        down = isinstance(error, httpx2.NetworkError | httpx2.ProxyError)
        prefix = "no connection: " if down else "a broken answer: "
        raise TransientError(prefix + _cause(error), unreachable=down) from None
    except (httpx2.InvalidURL, OSError, ValueError) as error:
        raise TransientError(f"no connection: {_cause(error)}", unreachable=True) from None


def _check_head(headers: Mapping[str, str], own_id: str, max_bytes: int) -> None:
    _check_size(int(headers.get("content-length", "0")), max_bytes)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise TransientError(f"an answer compressed as {encoding[:20]!r}, which was not asked for")
    # A gateway may drop the id or set its own; only another id of ours means a mix-up.
    returned = headers.get(REQUEST_ID, "")
    if returned.startswith(ID_PREFIX) and returned != own_id:
        raise TransientError("the answer to another request")


def _check_size(count: int, max_bytes: int) -> None:
    if count > max_bytes:
        raise TransientError(f"the answer is larger than {max_bytes:,} bytes")


@cache
def _tls() -> ssl.SSLContext:
    import httpx2

    return httpx2.create_ssl_context()  # 80 ms, for the certificates of the machine


def _cause(error: BaseException) -> str:
    """Return the innermost reason of a fault, on one line."""
    # The outer exceptions are the client's own, and name no cause.
    inner: BaseException | None = error
    while inner:
        error = inner
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, ConnectionError) and error.errno:
        reason = os.strerror(error.errno)  # asyncio's text names the address without the reason
    return " ".join(str(reason).split())[:SHOWN]


class Circuit:
    """State of a service's silence. While it is broken, one question every COOLDOWN_SECONDS probes it."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.cooldown_until = 0.0
        self._answered_at = -math.inf
        self._silent_since: float | None = None
        """Start of the first unanswered request; None if the last request was answered."""
        self._last_fault = ""

    @property
    def cooling_down(self) -> bool:
        return time.monotonic() < self.cooldown_until

    @property
    def broken(self) -> bool:
        return self.silent_seconds >= PATIENCE * self._timeout

    @property
    def silent_seconds(self) -> float:
        """Seconds since the first unanswered request; 0 if the last request was answered."""
        if self._silent_since is None:
            return 0.0
        return time.monotonic() - self._silent_since

    def check(self) -> None:
        """Raise SilentError if the service is broken, unless this question probes it."""
        if not self.broken:
            return
        if self.cooling_down:
            raise SilentError(f"nobody has answered for {self.silent_seconds:.0f} s ({self._last_fault})")
        self.cooldown_until = time.monotonic() + self._timeout  # other questions fail while this question probes

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record whether the block's request was answered."""
        sent_at = time.monotonic()
        try:
            yield
        except TransientError as fault:
            if fault.unreachable:
                self.cooldown_until = time.monotonic() + COOLDOWN_SECONDS
                self._last_fault = str(fault)
                # A single hanging question, among answered questions, is no silence of the service.
                if self._silent_since is None and sent_at >= self._answered_at:
                    self._silent_since = sent_at
            else:
                self._note_answer()
            raise
        self._note_answer()

    def _note_answer(self) -> None:
        self._silent_since = None
        self.cooldown_until = 0.0
        self._answered_at = time.monotonic()


# --- for code that blocks --------------------------------------------------------------------------------------


class LoopThread:
    """Event loop on a separate thread, so that blocking code can wait for coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pacorl-net", daemon=True)
        self._thread.start()
        self._running: set[Future[Any]] = set()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. Raises RuntimeError if the loop is closed."""
        if self._loop.is_closed():
            work.close()  # Python would warn of an unawaited coroutine
            raise RuntimeError("this loop is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; Ctrl-C cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel all running coroutines, and end the thread."""
        if self._loop.is_closed():
            return
        for future in list(self._running):  # a copy: finished futures remove themselves from the set
            future.cancel()
        # Within the loop: tasks belong to its thread.
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # Not asyncio.run's shutdown, which waits for a hanging resolver.
        self._loop.close()


async def _cancel_tasks() -> None:
    for _ in range(10):  # a cancelled task may begin further tasks, to clean up
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    for _ in range(3):  # a transport closes one turn after the call, a TLS transport two
        await asyncio.sleep(0)


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from blocking code, notebooks included."""
    loop = LoopThread()
    try:
        return loop.run(work)
    finally:
        loop.close()


# --- URLs ------------------------------------------------------------------------------------------------------


def is_url(source: object) -> bool:
    """Whether a source is an http(s) URL, rather than a file."""
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def service_url(url: str, *, name: str) -> str:
    """Return the URL of a service without surrounding space, after a check for credentials: messages and logs show it.

    Raises:
        ValueError: if it is no http(s) URL, or has a user, a password or a query; `name` begins the message.
    """
    split = urlsplit(url.strip())
    if split.scheme not in ("http", "https") or not split.hostname:
        raise ValueError(f"{name} {shown_url(url)!r} is not a URL such as http://127.0.0.1:8000/v1")
    if split.username is not None or split.password is not None or split.query:
        fix = "leave the user, the password and the query out, and put the key into an environment variable"
        raise ValueError(f"{name} at {split.hostname} may hold a password or a key; {fix}")
    return url.strip()


def key_from(variable: str) -> str:
    """Read the key of a service from an environment variable; empty without a variable.

    Raises:
        ValueError: if the variable is not set.
    """
    if not variable:
        return ""
    if not os.environ.get(variable):
        raise ValueError(f"set the environment variable {variable} to the key of the service; it is not set, or empty")
    return os.environ[variable]


def shown_url(url: str) -> str:
    """Format a URL for a message of one line: no user, no query, no control characters, not too long."""
    clean = re.sub(r"//[^/@\s]*@", "//***@", re.sub(r"[\x00-\x20\x7f]+", " ", url))
    clean = re.sub(r"\?.*", "?…", clean)
    if len(clean) <= SHOWN:
        return clean
    return clean[:SHOWN] + "…"
