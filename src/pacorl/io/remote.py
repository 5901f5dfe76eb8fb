"""Images by URL, for the entry points that take images from people: `pacorl score`, `PacoReward`, `serve --allow-urls`.

A URL is untrusted, so a fetch can do little: http and https only, no credentials, cookies or proxies, three redirects,
20 MB, one deadline over everything, and public addresses only. A host is resolved once per hop, its addresses are
checked, and the connection goes to the checked address itself, so that a later change of the name (DNS rebinding) has
no effect. Tests and private networks set `PACORL_ALLOW_PRIVATE_URLS=1`, or `allow_private=True`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from pacorl.io.decoder import open_upload
from pacorl.io.images import MAX_PIXELS, ImageError, open_image
from pacorl.io.net import Answer, DeadlineError, TransientError, blocking, exchange, is_url, shown_url

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 20_000_000
MAX_REDIRECTS = 3
DEADLINE_SECONDS = 30.0
"""For resolving, connecting, all redirects and the whole body together."""
PRIVATE_VARIABLE = "PACORL_ALLOW_PRIVATE_URLS"
REDIRECTS = (301, 302, 303, 307, 308)
PRINTABLE = bytes(range(0x21, 0x7F)).decode()
FILE_INSTEAD = "or download the image and give its file"

Allowed = Callable[[str], bool]
"""Whether an IP address may be connected to."""

NOT_PUBLIC = [
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # within a large cloud, a service of the host
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
]
"""IPv4 networks outside of the public internet (IANA's special-purpose registry). Not the interpreter's own list,
which differs from version to version."""
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All public IPv6 addresses."""
NOT_PUBLIC_6 = [ipaddress.IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
"""Networks of GLOBAL_UNICAST that are not public: protocols and tunnels (Teredo, 6to4), documentation."""
EMBEDDING = [
    ipaddress.IPv6Network(network) for network in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")
]
"""IPv6 networks whose last 32 bits are an IPv4 address: compatible, mapped, translated, NAT64 (RFC 6052)."""


def open_source(source: Path | str, *, allow_private: bool | None = None) -> Image:
    """Read a file, or fetch an http(s) URL, as an upright RGB image."""
    if isinstance(source, str) and is_url(source):
        return fetch_image(source, allow_private=allow_private)
    return open_image(source)


def fetch_image(
    url: str,
    *,
    name: str = "",
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
    seconds: float = DEADLINE_SECONDS,
    allow_private: bool | None = None,
    caller: str = "",
) -> Image:
    """Fetch an image by URL and decode it.

    Args:
        name: replaces the URL in messages about the pixels.
        max_bytes: see `fetch_bytes`, also for `seconds` and `allow_private`.
        caller: see `io.decoder.open_upload`.
    """
    data = fetch_bytes(url, max_bytes=max_bytes, seconds=seconds, allow_private=allow_private)
    return open_upload(data, name=name or shown_url(url), max_pixels=max_pixels, caller=caller)


def fetch_bytes(
    url: str, *, max_bytes: int = MAX_BYTES, seconds: float = DEADLINE_SECONDS, allow_private: bool | None = None
) -> bytes:
    """Fetch the file of an image by URL.

    Args:
        max_bytes: Limit of the answer, MAX_BYTES at most.
        seconds: Deadline of everything together.
        allow_private: Whether to connect to addresses that are not public; by default PRIVATE_VARIABLE decides.
    """
    if allow_private is None:
        allow_private = os.environ.get(PRIVATE_VARIABLE, "") not in ("", "0")
    allowed = (lambda _: True) if allow_private else is_public
    return fetch(url, max_bytes=min(max_bytes, MAX_BYTES), seconds=seconds, allowed=allowed)


def fetch(url: str, *, max_bytes: int, seconds: float, allowed: Allowed) -> bytes:
    """Fetch the bytes at a URL; every hop connects only to an `allowed` address. Raises ImageError."""
    deadline = time.monotonic() + seconds
    shown = shown_url(url)
    current = url
    try:
        # Every hop is checked as the first: a public server may redirect to a private address.
        for _ in range(MAX_REDIRECTS + 1):
            answer = _get(_checked(current), deadline, max_bytes=max_bytes, allowed=allowed)
            if answer.status not in REDIRECTS or not answer.headers.get("location"):
                break
            current = urljoin(current, answer.headers["location"])
        else:
            raise _FetchError(f"more than {MAX_REDIRECTS} redirects; give the image's own URL, {FILE_INSTEAD}")

        # The last answer is the image.
        if answer.status != 200:
            raise _FetchError(f"the server answers {answer.status}; check the URL, {FILE_INSTEAD}")
        return answer.body
    except _FetchError as error:
        raise ImageError(f"{shown}: {error}") from None
    except (DeadlineError, TimeoutError):
        raise ImageError(f"{shown}: not fetched within {seconds:g} s; try again, {FILE_INSTEAD}") from None
    except (TransientError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ImageError(f"{shown}: cannot be fetched ({reason}); check the URL, {FILE_INSTEAD}") from None


class _FetchError(Exception):
    """Reason why a URL is not fetched, and the fix."""


def _checked(url: str) -> SplitResult:
    """Split a URL and check its scheme, host and characters."""
    if re.search(r"[\x00-\x20\x7f]", url):
        raise _FetchError("the URL holds spaces or control characters; write them as %20 and the like")
    target = urlsplit(url)
    if target.scheme.lower() not in ("http", "https") or not target.hostname:
        raise _FetchError(f"leads to {shown_url(url)!r}, and only http(s) URLs are fetched; {FILE_INSTEAD[3:]}")
    if target.username is not None or target.password is not None:
        raise _FetchError(f"the URL holds a user name or password, and none are sent; leave them out, {FILE_INSTEAD}")
    return target


def _get(target: SplitResult, deadline: float, *, max_bytes: int, allowed: Allowed) -> Answer:
    """Send one request to a checked address."""
    # The host in ASCII, as resolvers and certificates have it.
    scheme = target.scheme.lower()
    host = (target.hostname or "").encode("idna").decode()
    port = target.port or (443 if scheme == "https" else 80)

    # All addresses of the host must be allowed: an attacker controls a client's choice among them.
    addresses = _resolved(host, port, deadline)
    for address in addresses:
        if not allowed(address):
            raise _FetchError(
                f"{host} is {address}, which is not a public address; give a public URL, {FILE_INSTEAD} "
                f"({PRIVATE_VARIABLE}=1 allows private ones)"
            )

    # Connect to the checked address itself: a name would be resolved again, and perhaps to another address.
    address = addresses[0]
    if ":" in address:
        address = f"[{address}]"
    path = target.path or "/"
    if target.query:
        path += f"?{target.query}"
    # The request line is ASCII; a copied URL may contain letters of any script.
    url = f"{scheme}://{address}:{port}{quote(path, safe=PRINTABLE)}"
    headers = {"Host": target.netloc.rpartition("@")[2].encode("idna").decode(), "Accept": "image/*"}
    options: dict[str, Any] = {"headers": headers, "max_bytes": max_bytes, "server_name": host}
    return blocking(exchange(url, seconds=_remaining(deadline), **options))


def _remaining(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _resolved(host: str, port: int, deadline: float) -> list[str]:
    """Resolve the host's addresses before the deadline, even if the resolver hangs."""
    answers: list[list[Any] | Exception] = []

    def resolve() -> None:
        try:
            answers.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.append(error)

    # In a thread, which is abandoned at the deadline: getaddrinfo takes no timeout.
    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(_remaining(deadline))
    if not answers:
        raise TimeoutError
    rows = answers[0]
    if isinstance(rows, Exception):
        reason = getattr(rows, "strerror", "") or rows
        raise _FetchError(f"there is no host {host!r} ({reason}); check the URL and the network, {FILE_INSTEAD}")
    return [str(row[4][0]) for row in rows]


def is_public(address: str) -> bool:
    """Whether an address, or the IPv4 address that it embeds, belongs to the public internet."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and any(ip in network for network in EMBEDDING):
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in NOT_PUBLIC)
    return ip in GLOBAL_UNICAST and not any(ip in network for network in NOT_PUBLIC_6)
