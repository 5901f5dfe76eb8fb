"""Heartbeats come to the other ranks, and nothing else does."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from pacorl.runtime.clock import Position
from pacorl.runtime.heartbeat import LONGEST, Beat, Heartbeats

BEAT = Beat(1, Position(epoch=3, phase="rollout", batches=2, meetings=40), told=True)


@contextmanager
def ranks(count: int, *, one_machine: bool) -> Iterator[list[Heartbeats]]:
    """Heartbeats of so many ranks, which meet as if each were a process."""
    values: list[Any] = [None] * count
    meeting, opened = threading.Barrier(count), dict[int, Heartbeats]()

    def open_rank(rank: int) -> None:
        def gather(value: Any) -> Sequence[Any]:
            values[rank] = value
            meeting.wait(30)
            return values

        opened[rank] = Heartbeats(rank, one_machine=one_machine, gather=gather)

    threads = [threading.Thread(target=open_rank, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ExitStack() as stack:
        yield [stack.enter_context(closing(opened[rank])) for rank in range(count)]


def beats_of(heartbeats: Heartbeats) -> list[Beat]:
    assert select.select([heartbeats.socket], [], [], 30)[0], "nothing came"
    return list(heartbeats.received())


@pytest.mark.parametrize("one_machine", [True, False])
def test_every_other_rank_hears_a_beat(one_machine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with ranks(3, one_machine=one_machine) as (zero, one, two):
        one.send(BEAT)
        assert beats_of(zero) == beats_of(two) == [BEAT]
        assert list(one.received()) == list(zero.received()) == []
        two.send(Beat(2, Position(), left=True))
        assert beats_of(zero) == [Beat(2, Position(), left=True)]


def test_on_one_machine_no_other_can_reach_them() -> None:
    with ranks(2, one_machine=True) as both:
        assert {each.socket.getsockname()[0] for each in both} == {"127.0.0.1"}


def test_a_datagram_of_a_stranger_is_dropped() -> None:
    payload = json.dumps([1, [9, "update", 9, 9], True, False]).encode()
    with ranks(2, one_machine=True) as (zero, one), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in (payload, bytes(32) + payload, b"", bytes(2 * LONGEST)):
            stranger.sendto(datagram, zero.socket.getsockname())
        one.send(BEAT)
        assert beats_of(zero) == [BEAT]


def test_a_rank_is_answered_where_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have told the others an address of its own that they cannot reach."""
    with ranks(2, one_machine=True) as (zero, one):
        monkeypatch.setitem(zero._addresses, 1, ("127.0.0.1", 9))
        one.send(BEAT)
        assert beats_of(zero) == [BEAT]
        zero.send(Beat(0, Position()))
        assert beats_of(one) == [Beat(0, Position())]
