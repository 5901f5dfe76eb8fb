"""Which servers an endpoints description asks for, and the description of a single command line."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pacorl.config.base import ConfigError, dump
from pacorl.io.files import write_atomic
from pacorl.judges.http.endpoints import Endpoints, ServedJudge, address_of


@dataclass(frozen=True, slots=True)
class Server:
    """One process: a base checkpoint and the names under which it, and its adapters, answer."""

    url: str
    checkpoint: str
    names: tuple[str, ...]
    """Of the base itself; may be empty if only adapters are asked for."""
    adapters: Mapping[str, str]
    """Name → adapter."""

    @property
    def host(self) -> str:
        return address_of(self.url)[0]

    @property
    def port(self) -> int:
        return address_of(self.url)[1]


def servers_of(description: Endpoints) -> list[Server]:
    """One server per endpoint. Raises ConfigError if a judge names no checkpoint."""
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
    """The description of one checkpoint and its adapters (each `NAME=ADAPTER`) on `replicas` ports from `port` on."""
    urls = tuple(f"http://{f'[{host}]' if ':' in host else host}:{port + i}/v1" for i in range(replicas))
    pairs = [_named_adapter(adapter) for adapter in adapters]
    base = ServedJudge(name=name or Path(checkpoint).name, endpoints=urls, checkpoint=checkpoint)
    adapted = [ServedJudge(name=n, endpoints=urls, checkpoint=checkpoint, adapter=a) for n, a in pairs]
    return Endpoints(judges=(base, *adapted), api_key_env=api_key_env)


def write_endpoints(description: Endpoints, path: Path) -> None:
    """Writes what `HttpJudge.connect(path)` reads."""
    write_atomic(path, dump(description))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _named_adapter(text: str) -> tuple[str, str]:
    name, equals, adapter = text.partition("=")
    if not equals or not name or not adapter:
        raise ValueError(f"adapter {text!r} is not of the form NAME=FOLDER, e.g. PaCo-Reward-7B=runs/judge/adapter")
    return name, adapter
