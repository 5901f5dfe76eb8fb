"""The watching thread: hung ranks are reported, and a signal that nobody meets ends the process, saved."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from pacorl.runtime import watch
from pacorl.runtime.clock import PhaseClock, Position
from pacorl.runtime.heartbeat import Beat, ProcessId, own_process
from pacorl.runtime.processes import Runtime
from pacorl.runtime.stopping import LostRankError
from pacorl.runtime.watch import Watch, savers


class FakeNetwork:
    """Heartbeats that a test hands in."""

    def __init__(self) -> None:
        self.inbox: list[Beat] = []
        self.sent: list[Beat] = []

    def send(self, beat: Beat) -> None:
        self.sent.append(beat)

    def received(self) -> list[Beat]:
        beats, self.inbox = self.inbox, []
        return beats


def rank_of(world: int, *, rank: int = 0, meetings: int = 5, saved: Callable[[], str] = lambda: "saved") -> Watch:
    """A rank's watch whose thread does not run: tests take its steps."""
    made = Watch(
        rank=rank,
        processes=[own_process()] * world,
        position=Position(phase="reward", meetings=meetings),
        heartbeats=FakeNetwork(),  # type: ignore[arg-type]
        save=saved,
        release=lambda: None,
    )
    made._beat()
    return made


def pass_seconds(rank: Watch, seconds: float, *beats: Beat) -> None:
    """Let time pass in which these beats come again and again."""
    for _ in range(int(seconds)):
        rank.heartbeats.inbox = list(beats)  # type: ignore[union-attr]
        rank._read_beats()
        rank._beat()
        rank._age(1.0)
        rank._report()


def beat(rank: int, *, meetings: int = 5, batches: int = 0, **flags: bool) -> Beat:
    return Beat(rank, Position(epoch=2, phase="rollout", batches=batches, meetings=meetings), **flags)


def test_a_rank_without_heartbeats_is_reported_once_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    rank = rank_of(2, meetings=6)  # which waits for the other, too
    pass_seconds(rank, 3, beat(1))
    pass_seconds(rank, watch.HUNG_SECONDS - 4)
    assert caplog.messages == []
    pass_seconds(rank, 30)
    (line,) = caplog.messages
    assert re.fullmatch(
        r"rank 1 of 2 \(process \d+ on \S+\) has sent no heartbeat for \d+ s: its process or machine stands still; "
        r"it was in phase rollout, batch 1, epoch 2",
        line,
    )
    pass_seconds(rank, 1, beat(1, meetings=6))
    assert caplog.messages[1:] == [f"rank 1 of 2 ({own_process()}) goes on"]


def test_a_rank_that_others_wait_for_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rank = rank_of(2, meetings=6)
    pass_seconds(rank, watch.HUNG_SECONDS + 5, beat(1, meetings=5, batches=2))
    (line,) = caplog.messages
    assert "has not moved for 50 s, and other ranks wait for it; it is in phase rollout, batch 3, epoch 2" in line
    pass_seconds(rank, 1, beat(1, meetings=6))
    assert caplog.messages[-1].endswith("goes on")


def test_this_rank_may_be_the_one_that_others_wait_for(caplog: pytest.LogCaptureFixture) -> None:
    pass_seconds(rank_of(2, meetings=5), watch.HUNG_SECONDS + 5, beat(1, meetings=6))
    (line,) = caplog.messages
    assert line.startswith("rank 0 of 2")
    assert "it is in phase reward, batch 1, epoch 0" in line


def test_a_long_batch_is_no_hang(caplog: pytest.LogCaptureFixture) -> None:
    everywhere = rank_of(2)
    pass_seconds(everywhere, 10 * watch.HUNG_SECONDS, beat(1))
    behind = rank_of(2, meetings=9)
    for batch in range(10):  # slower than this rank, and it moves
        pass_seconds(behind, watch.HUNG_SECONDS - 5, beat(1, meetings=5, batches=batch))
    over = rank_of(2)
    pass_seconds(over, 10 * watch.HUNG_SECONDS, beat(1, left=True))
    unheard = rank_of(3)
    pass_seconds(unheard, 10 * watch.HUNG_SECONDS, beat(1))
    assert caplog.messages == []


def test_the_lowest_rank_that_lives_reports(caplog: pytest.LogCaptureFixture) -> None:
    rank = rank_of(3, rank=1)
    pass_seconds(rank, 3, beat(0), beat(2))
    pass_seconds(rank, watch.HUNG_SECONDS, beat(0))
    assert caplog.messages == [], "rank 0 does"
    pass_seconds(rank, watch.HUNG_SECONDS)
    assert [line[:11] for line in caplog.messages] == ["rank 0 of 3", "rank 2 of 3"]


def test_a_process_that_was_stopped_itself_blames_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A laptop's lid, or SIGSTOP: its clock jumps."""
    rank = rank_of(2)
    pass_seconds(rank, 3, beat(1))
    rank._step(time.monotonic() + 3600)
    assert rank._members[1].silent <= 3 + watch.BEAT_SECONDS
    assert caplog.messages == []


def test_a_rank_that_was_told_tells_the_others() -> None:
    rank = rank_of(2, rank=1)
    pass_seconds(rank, 1, beat(0, told=True))
    assert rank.told
    assert rank.heartbeats.sent[-1].told  # type: ignore[union-attr]


# --- who saves ---------------------------------------------------------------------------------------------------

HERE, THERE = ProcessId(1, "here"), ProcessId(1, "there")


@pytest.mark.parametrize(
    ("processes", "expected"),
    [([HERE], [0]), ([HERE] * 4, [0, 1]), ([HERE, THERE, HERE, HERE], [0, 2]), ([HERE, THERE], [0])],
)
def test_rank_0_and_one_more_of_its_machine_keep_the_state(processes: Sequence[ProcessId], expected: list[int]) -> None:
    assert savers(processes) == expected


def test_a_deputy_saves_for_a_rank_0_that_stands_still() -> None:
    deputy, other = rank_of(3, rank=1), rank_of(3, rank=2)
    for rank in (deputy, other):
        pass_seconds(rank, 3, beat(0), beat(1), beat(2))
        assert rank._saver() == 0
        pass_seconds(rank, 10, beat(1), beat(2))
        assert rank._saver() == 1
        rank.told_at = 100.0
    assert deputy._is_overdue(100.0 + watch.GRACE_SECONDS)
    assert not other._is_overdue(100.0 + watch.GRACE_SECONDS), "its end would cut the deputy off"
    assert other._is_overdue(100.0 + watch.GRACE_SECONDS + watch.HANDOVER_SECONDS)
    assert watch.GRACE_SECONDS + watch.HANDOVER_SECONDS < 30, "when launchers kill"


# --- the end -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process did at its end, which it survives here."""
    did: list[Any] = []
    run = Watch._run

    def leave(code: int) -> None:
        did.append(code)
        raise SystemExit

    def run_until_it_leaves(rank: Watch) -> None:
        with suppress(SystemExit):
            run(rank)

    monkeypatch.setattr(Watch, "_run", run_until_it_leaves)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.3)
    return did


def hang(until: Callable[[], object]) -> None:
    """Wait as a main thread in a collective does, whatever it is told."""
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_signal_that_is_not_met_saves_and_ends(ended: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    machine = Runtime()
    clock = PhaseClock(machine.position)
    with (
        machine.signals(save=lambda: ended.append("save") or "saved", release=lambda: ended.append("release")),
        clock.timed("rollout"),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        hang(lambda: 75 in ended)
    assert ended == ["save", "release", 75]
    at_once, line = caplog.messages
    assert at_once == "told to stop: the run ends after this batch, and saves"
    assert re.fullmatch(
        r"told to stop \d s ago, and rank 0 of 1 \(process \d+ on \S+\) is still in phase rollout, batch 1, epoch 0; "
        "saved",
        line,
    )


@pytest.mark.slow
def test_a_signal_that_is_met_does_not(ended: list[Any]) -> None:
    machine = Runtime()
    with machine.signals(save=lambda: ended.append("save") or "saved"):
        os.kill(os.getpid(), signal.SIGTERM)
        hang(lambda: machine.told_to_stop)
    time.sleep(1.0)
    assert ended == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("fault", ["error", "hang"])
def test_a_state_that_cannot_be_saved_still_ends(
    ended: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A full disk, and one that does not answer."""
    monkeypatch.setattr(watch, "SAVE_SECONDS", 0.3)
    over, machine = threading.Event(), Runtime()

    def save() -> str:
        if fault == "hang":
            over.wait()
        raise OSError("no room")

    with machine.signals(save=save):
        os.kill(os.getpid(), signal.SIGINT)
        hang(lambda: 75 in ended)
    over.set()
    _, line = caplog.messages
    said = {"error": "the state could not be saved (no room)", "hang": "the disk has not taken the state within 0.3 s"}
    assert line.endswith(f"; {said[fault]}; {watch.UNSAVED}")


def test_the_main_thread_does_not_leave_while_the_state_is_saved(ended: list[Any]) -> None:
    began, over, machine = threading.Event(), threading.Event(), Runtime()

    def save() -> str:
        began.set()
        over.wait(60)
        ended.append("save")
        return "saved"

    def leave() -> None:
        time.sleep(0.5)
        over.set()

    with machine.signals(save=save):
        os.kill(os.getpid(), signal.SIGTERM)
        assert began.wait(60)
        threading.Thread(target=leave).start()
    assert ended == ["save", 75]


def test_a_rank_that_is_lost_after_a_signal_ends_the_run_saved(
    ended: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others end within their grace too, and cut this one off."""
    monkeypatch.setattr(watch, "GRACE_SECONDS", 1000.0)
    machine = Runtime()

    def lose(*, told: bool) -> None:
        with machine.signals(save=lambda: ended.append("save") or "saved"):
            if told:
                os.kill(os.getpid(), signal.SIGTERM)
                hang(lambda: machine.told_to_stop)
            raise LostRankError("rank 0 of 2 has lost rank 1, which has ended")

    with pytest.raises(LostRankError):
        lose(told=False)
    assert ended == []
    with pytest.raises(LostRankError):  # which no process that really ends comes to
        lose(told=True)
    assert ended == ["save", 75]
    assert re.search("and rank 0 of 2 has lost rank 1, which has ended; saved", caplog.text)
