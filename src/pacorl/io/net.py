"""Addresses of services, the HTTP client of each, and their faults and outages: judges and language models.

A client has a new connection for each request, so that left-over bytes of one answer never begin the next, and follows
no redirect, which could send a key to another host. A service of this machine is asked around the proxy.
"""

import ipaddress
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from pacorl import __version__

UNAVAILABLE = frozenset({502, 503, 504})
"""HTTP statuses of a gateway, or of a loading server, in place of a silent service."""
SMALLER_FIX = "its images are too large for the server; give smaller ones, or raise the server's limit of a request"
SHOWN = 300  # characters of an address or of an error in a message
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""Errors of reading a malformed document: any of Python's complaints about values."""
OUTAGE_SECONDS = 900.0
"""Default length of a service's outage before a run ends: a 7B server restarts in minutes."""


class UnreachableError(ConnectionError):
    """A service is silent, or was for longer than the permitted outage."""

    exit_code = 75
    """Exit code of the command: EX_TEMPFAIL of sysexits.h, at which a scheduler starts it again."""


class ServiceRefusedError(ValueError):
    """No repetition helps: unknown model, refused key, wrong address, a request larger than the server takes."""


class ServiceFault(Exception):
    """A request was not answered. `unreachable`: there was no answer at all."""

    def __init__(self, reason: str, *, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.unreachable = unreachable


def client_options(url: str, *, seconds: float, key: str = "") -> dict[str, Any]:
    """Return the options of an httpx2 client for one service.

    Args:
        seconds: Longest silence of the service while it is connected to, or reads or writes.
        key: Sent as a bearer token.
    """
    import httpx2

    headers = {"User-Agent": f"pacorl/{__version__}"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return {
        "headers": headers,
        "timeout": seconds,
        "trust_env": not is_loopback(urlsplit(url).hostname or ""),
        "follow_redirects": False,
        "limits": httpx2.Limits(max_keepalive_connections=0),
    }


def own_headers() -> dict[str, Any]:
    """Return the headers of openai's client that its requests leave out: the transport has the service's own key."""
    import openai

    return dict.fromkeys(("Authorization", "OpenAI-Organization", "OpenAI-Project"), openai.Omit())


@contextmanager
def service_faults(url: str, *, model: str, seconds: float, key: str, key_variable: str) -> Iterator[None]:
    """Convert the faults of openai's client, and of reading an answer, to one line in the server's words.

    Raises:
        ServiceRefusedError: for a refused key, a wrong address or model, and a request too large for the server.
        ServiceFault: for any other fault.
    """
    import openai

    try:
        yield
    except ServiceRefusedError:
        raise
    except (TimeoutError, openai.APITimeoutError):
        raise ServiceFault(f"no answer within {seconds:g} s", unreachable=True) from None
    except openai.APIConnectionError as error:
        raise ServiceFault(f"no connection: {_innermost(error)}", unreachable=True) from None
    except openai.APIStatusError as error:
        # The server's own message: of an error's JSON document, else the beginning of the body.
        status, body = error.status_code, error.body
        words = body.get("message", body.get("detail")) if isinstance(body, dict) else body
        if "html" in error.response.headers.get("content-type", ""):
            words = "with a web page"
        said = f"HTTP {status} {_on_one_line(words or error.response.text)}".strip()
        # No message may show a key.
        if key:
            said = said.replace(key, "***")
        key_fix = f"put the server's key into {key_variable}"
        address_fix = f"check the address and the model's name {model!r}" if model else "check the address"
        fixes = {401: key_fix, 403: key_fix, 404: address_fix, 413: SMALLER_FIX}
        fix = address_fix if 300 <= status < 400 else fixes.get(status)
        if fix:
            raise ServiceRefusedError(f"{error.request.url}: {said}; {fix}") from None
        raise ServiceFault(said, unreachable=status in UNAVAILABLE) from None
    except MALFORMED as error:
        raise ServiceFault(f"an answer of another form ({type(error).__name__})") from None


def _innermost(error: BaseException) -> str:
    """Describe a fault on the way to a service by its innermost reason."""
    inner: BaseException | None = error
    while inner:
        error = inner
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, ConnectionError) and error.errno:
        reason = os.strerror(error.errno)  # asyncio's text names the address without the reason
    return _on_one_line(reason)


def _on_one_line(text: object) -> str:
    return " ".join(str(text)[: 2 * SHOWN].split())[:SHOWN]


def is_url(source: object) -> bool:
    """Whether a source is an http(s) URL, rather than a file."""
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


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


def shown_url(url: str) -> str:
    """Format a URL for a message of one line: no user, no query, no control characters, not too long."""
    clean = re.sub(r"//[^/@\s]*@", "//***@", re.sub(r"[\x00-\x20\x7f]+", " ", url))
    return re.sub(r"\?.*", "?…", clean)[:SHOWN]
