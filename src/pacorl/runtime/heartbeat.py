"""Heartbeats: each rank sends the others its position in the run, so that a hung rank is seen from outside.

They are datagrams between the processes themselves, so that neither a frozen rank 0 nor a backend's collective can hold
them up. On one machine they stay on its loopback address. A shared key signs them: a datagram of somebody else is
dropped.
"""

from __future__ import annotations

import hmac
import json
import os
import platform
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from pacorl.io.documents import parse_json
from pacorl.runtime.clock import Position

DIGEST, KEY_BYTES, LONGEST = "sha256", 32, 1024
SIGNATURE_BYTES = 32
Address = tuple[Any, ...]
"""As `socket` has it: host and port, and two numbers more for IPv6."""


class ProcessId(NamedTuple):
    """Which process a rank is."""

    number: int
    machine: str
    """Its name; on Linux also the processes that it can see, which a container has of its own."""

    def __str__(self) -> str:
        return f"process {self.number} on {self.machine.partition('pid:')[0]}"


def own_process() -> ProcessId:
    """This process, as others can look for it."""
    machine = platform.node()
    with suppress(OSError):
        machine += os.readlink("/proc/self/ns/pid")
    return ProcessId(os.getpid(), machine)


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's heartbeat."""

    rank: int
    position: Position
    told: bool = False
    """Whether the rank knows of a signal to stop."""
    left: bool = False
    """Whether its run is over; no other beat follows."""


class Heartbeats:
    """The sender and receiver of a rank's heartbeats. All ranks open it together."""

    def __init__(self, rank: int, *, one_machine: bool, gather: Callable[[Any], Sequence[Any]]) -> None:
        """
        Args:
            rank: this process's.
            one_machine: whether all ranks run on it.
            gather: a value → that of each rank.
        """
        self.rank = rank
        family, host = (socket.AF_INET, "127.0.0.1") if one_machine else _address_of_this_machine()
        self.socket = socket.socket(family, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind((host if one_machine else "", 0))
        port = self.socket.getsockname()[1]
        # Every rank offers a key, and rank 0's is taken.
        members = gather(((host, port), secrets.token_bytes(KEY_BYTES)))
        self._key: bytes = members[0][1]
        self._addresses: dict[int, Address] = {
            number: address for number, (address, _) in enumerate(members) if number != rank
        }

    def send(self, beat: Beat) -> None:
        """Send a beat to every other rank; a machine out of reach gets none."""
        payload = json.dumps([beat.rank, astuple(beat.position), beat.told, beat.left]).encode()
        signed = hmac.digest(self._key, payload, DIGEST) + payload
        for address in self._addresses.values():
            with suppress(OSError):
                self.socket.sendto(signed, address)

    def received(self) -> Iterator[Beat]:
        """Yield the beats that have come."""
        while datagram := self._next():
            content, source = datagram
            signature, payload = content[:SIGNATURE_BYTES], content[SIGNATURE_BYTES:]
            if hmac.compare_digest(signature, hmac.digest(self._key, payload, DIGEST)):
                rank, position, told, left = parse_json(payload)
                # A machine may know itself by another address than others do.
                self._addresses[rank] = source
                yield Beat(rank, Position(*position), told=told, left=left)

    def _next(self) -> tuple[bytes, Address] | None:
        try:
            return self.socket.recvfrom(LONGEST)
        except OSError:  # there is none
            return None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def _address_of_this_machine() -> tuple[int, str]:
    """Address family and host by which the main process's machine is reached from here."""
    main, port = os.environ.get("MASTER_ADDR", "localhost"), os.environ.get("MASTER_PORT", "1")
    family, kind, _, _, address = socket.getaddrinfo(main, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it chooses the interface
        return family, probe.getsockname()[0]
