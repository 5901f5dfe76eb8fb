"""Where judges are served: one YAML that `pacorl serve` starts servers from and `HttpJudge` reads, and its servers.

    judges:
      - name: PaCo-Reward-7B
        checkpoint: Qwen/Qwen2.5-VL-7B-Instruct
        adapter: X-GenGroup/PaCo-Reward-7B-Lora
        endpoints: [http://127.0.0.1:8000/v1, http://127.0.0.1:8001/v1]

Judges that share an endpoint are served by one process: one base, and its adapters under their own names.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, field_validator, model_validator

from pacorl.config.base import ConfigError, Section, load
from pacorl.io.net import service_url


class ServedJudge(Section):
    """One name under which a judge answers."""

    name: str = Field(min_length=1)
    """The `model` of a request."""
    endpoints: tuple[str, ...] = Field(min_length=1)
    """Base URLs of the API, one per server that serves it."""
    checkpoint: str = ""
    """A transformers folder, a hub name, or `tiny`; needed only to start a server."""
    adapter: str = ""
    """A PEFT folder or hub name on top of the checkpoint."""

    @field_validator("endpoints")
    @classmethod
    def _urls(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(api_url(endpoint) for endpoint in endpoints)


class Endpoints(Section):
    """All judges of one installation."""

    judges: tuple[ServedJudge, ...] = Field(min_length=1)
    api_key_env: str = ""
    """The environment variable with the servers' key, which is never written to a file."""

    @model_validator(mode="after")
    def _one_base_per_endpoint(self) -> Endpoints:
        names = [judge.name for judge in self.judges]
        if len(set(names)) < len(names):
            raise ValueError(f"judges {names} use one name twice; give each its own")
        # A server loads one base; its adapters answer under their own names.
        for endpoint in self.urls:
            bases = sorted({judge.checkpoint for judge in self.at(endpoint)})
            if len(bases) > 1:
                raise ValueError(
                    f"{endpoint} is to serve {', '.join(bases)}, and a server has one base; give each its own endpoint"
                )
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Every endpoint once, in order."""
        urls: list[str] = []
        for judge in self.judges:
            urls += judge.endpoints
        return tuple(dict.fromkeys(urls))

    def at(self, endpoint: str) -> tuple[ServedJudge, ...]:
        """Return the judges of one endpoint."""
        return tuple(judge for judge in self.judges if endpoint in judge.endpoints)

    def named(self, name: str = "") -> ServedJudge:
        """Return the judge of a name; without a name, the only judge. Raises ConfigError listing the names."""
        matches = [judge for judge in self.judges if name in ("", judge.name)]
        if len(matches) != 1:
            fault = f"no judge is named {name!r}" if name else "several judges are described and none is named"
            raise ConfigError(f"{fault}; choose one of {', '.join(judge.name for judge in self.judges)}")
        return matches[0]


@dataclass(frozen=True, slots=True)
class Server:
    """One process: a base checkpoint and the names under which it, and its adapters, answer."""

    url: str
    checkpoint: str
    names: tuple[str, ...]
    """Names of the base; empty if only adapters are served."""
    adapters: Mapping[str, str]
    """Name → adapter."""

    @property
    def host(self) -> str:
        return address_of(self.url)[0]

    @property
    def port(self) -> int:
        return address_of(self.url)[1]


def servers_of(description: Endpoints) -> list[Server]:
    """Group judges into one server per endpoint. Raises ConfigError for a judge without a checkpoint."""
    servers = []
    for url in description.urls:
        judges = description.at(url)
        if not judges[0].checkpoint:
            raise ConfigError(f"judge {judges[0].name!r} names no checkpoint, so no server can be started for it")
        names = tuple(judge.name for judge in judges if not judge.adapter)
        adapters = {judge.name: judge.adapter for judge in judges if judge.adapter}
        servers.append(Server(url, judges[0].checkpoint, names, adapters))
    return servers


def describe(
    checkpoint: str,
    *,
    name: str = "",
    adapters: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    replicas: int = 1,
    api_key_env: str = "",
) -> Endpoints:
    """Describe one checkpoint and its adapters (each `NAME=ADAPTER`) on `replicas` ports from `port` on."""
    # An IPv6 address needs brackets to separate it from the port.
    if ":" in host:
        host = f"[{host}]"
    urls = tuple(f"http://{host}:{port + i}/v1" for i in range(replicas))
    judges = [ServedJudge(name=name or Path(checkpoint).name, endpoints=urls, checkpoint=checkpoint)]
    for text in adapters:
        adapter_name, _, adapter = text.partition("=")
        if not adapter_name or not adapter:
            raise ValueError(f"adapter {text!r} is not of the form NAME=FOLDER, e.g. PaCo-Reward-7B=runs/judge/adapter")
        judges.append(ServedJudge(name=adapter_name, endpoints=urls, checkpoint=checkpoint, adapter=adapter))
    return Endpoints(judges=tuple(judges), api_key_env=api_key_env)


def load_endpoints(path: Path) -> Endpoints:
    """Read the YAML. Raises ConfigError with the first faults on one line."""
    try:
        return load(Endpoints, path)
    except ConfigError as error:
        # pydantic's message quotes the refused text, which may contain a password.
        raise ConfigError(re.sub(r"//[^/@\s]+@|\?[^\s'\"]+", "//***@", str(error))) from None


# --- addresses -------------------------------------------------------------------------------------------------


def api_url(url: str) -> str:
    """Normalize the base URL of an OpenAI-compatible API: with a host and a path (`/v1` by default).

    Raises ValueError for an invalid URL, or one with a password or key, which would be logged.
    """
    split = urlsplit(service_url(url, name="endpoint").rstrip("/"))
    return urlunsplit((split.scheme, split.netloc, split.path or "/v1", "", ""))


def address_of(url: str) -> tuple[str, int]:
    """Split a URL into host and port; the host may be empty."""
    split = urlsplit(url)
    return split.hostname or "", split.port or (443 if split.scheme == "https" else 80)


def listens(host: str, port: int) -> bool:
    """Return whether a server accepts connections at an address."""
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def root_url(endpoint: str) -> str:
    """Return the server's root, with `/health` and `/tokenize`."""
    return endpoint.removesuffix("/v1")
