"""Heartbeats: each rank sends its position in the run to all ranks, to detect a hung rank.

They are datagrams between the processes themselves, so that neither a frozen rank 0 nor a backend's collective can hold
them up. On one machine they stay on its loopback address. A shared key signs them: foreign datagrams are
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

DIGEST = "sha256"
KEY_BYTES = 32
LONGEST = 1024
SIGNATURE_BYTES = 32
Address = tuple[Any, ...]
"""Address as in `socket`: host and port, and two more numbers for IPv6."""


class ProcessId(NamedTuple):
    """Process number and machine of a rank."""

    number: int
    machine: str
    """Host name; on Linux with the PID namespace, which differs between containers."""

    def __str__(self) -> str:
        return f"process {self.number} on {self.machine.partition('pid:')[0]}"


def own_process() -> ProcessId:
    """Identify this process for other ranks."""
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
    """Whether the rank has received a signal to stop."""
    left: bool = False
    """Whether its run has ended; this beat is its last."""


class Heartbeats:
    """The sender and receiver of a rank's heartbeats. All ranks open it together."""

    def __init__(self, rank: int, *, one_machine: bool, gather: Callable[[Any], Sequence[Any]]) -> None:
        """
        Args:
            rank: rank of this process.
            one_machine: whether all ranks are on this machine.
            gather: collective from a value to all ranks' values.
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
        self._addresses: dict[int, Address] = {}
        for number, (address, _) in enumerate(members):
            if number != rank:
                self._addresses[number] = address

    def send(self, beat: Beat) -> None:
        """Send a beat to every other rank; unreachable machines are skipped."""
        payload = json.dumps([beat.rank, astuple(beat.position), beat.told, beat.left]).encode()
        signed = hmac.digest(self._key, payload, DIGEST) + payload
        for address in self._addresses.values():
            with suppress(OSError):
                self.socket.sendto(signed, address)

    def received(self) -> Iterator[Beat]:
        """Yield the received beats."""
        while True:
            try:
                content, source = self.socket.recvfrom(LONGEST)
            except OSError:  # there is none
                return
            signature = content[:SIGNATURE_BYTES]
            payload = content[SIGNATURE_BYTES:]
            if hmac.compare_digest(signature, hmac.digest(self._key, payload, DIGEST)):
                rank, position, told, left = parse_json(payload)
                # By source: a machine's address may differ when seen from outside.
                self._addresses[rank] = source
                yield Beat(rank, Position(*position), told=told, left=left)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def _address_of_this_machine() -> tuple[int, str]:
    """Find the address family and local host of the route to the main process's machine."""
    main = os.environ.get("MASTER_ADDR", "localhost")
    port = os.environ.get("MASTER_PORT", "1")
    family, kind, _, _, address = socket.getaddrinfo(main, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # selects the interface, without a packet
        return family, probe.getsockname()[0]
