"""Outages of a service: who tries, how often, and when waiting ends."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable

import pytest

from pacorl.io import outage as outages
from pacorl.io.net import Circuit, DeadlineError, TransientError
from pacorl.io.outage import Outage, UnreachableError, retried


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(outages, "MAX_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(outages, "POLL_SECONDS", 0.01)


class Service:
    """Endpoints that refuse connections as long as they are `down`, and note when they are tried."""

    def __init__(self, count: int = 1, *, seconds: float = 30.0) -> None:
        self.circuits = [Circuit(timeout=60.0) for _ in range(count)]
        self.down = [True] * count
        self.tried: list[list[float]] = [[] for _ in range(count)]
        self.outage = Outage("service", self.circuits, seconds=seconds)

    async def ask(self, *, tries: int = 1, endpoint: Callable[[], int] = lambda: 0) -> int:
        """The endpoint that answers a question."""

        async def attempt(_: int) -> int:
            self.outage.check()
            chosen = endpoint()
            with self.circuits[chosen].noting():
                self.tried[chosen].append(time.monotonic())
                await asyncio.sleep(0)
                if self.down[chosen]:
                    raise TransientError("refused", unreachable=True)
            return chosen

        return await retried(attempt, tries=tries, outage=self.outage)


@pytest.mark.slow
def test_one_question_at_a_time_probes_and_all_are_answered_when_it_is_over() -> None:
    service = Service()

    async def back(after: float) -> float:
        await asyncio.sleep(after)
        service.down[0] = False
        return time.monotonic()

    async def run() -> list[float]:
        return await asyncio.gather(back(1.0), *(service.ask() for _ in range(200)))

    came_back, *answers = asyncio.run(run())
    assert answers == [0] * 200
    probes = sum(moment < came_back for moment in service.tried[0])
    # 200 go before the first has failed; then ten a second at most, and more of them at the beginning.
    assert 1 <= probes - 200 <= 25
    later = [moment - came_back for moment in service.tried[0] if moment >= came_back]
    assert min(later) < 5, "a service that comes back is used within seconds"


def test_waiting_ends_for_every_question_with_the_service_the_time_and_the_reason() -> None:
    service = Service(seconds=0.3)

    async def run() -> list[int | BaseException]:
        return await asyncio.gather(*(service.ask() for _ in range(5)), return_exceptions=True)

    faults = asyncio.run(run())
    assert {type(fault) for fault in faults} == {UnreachableError}
    assert str(faults[0]).startswith("service has not answered for 0 s (refused); start it again")
    assert pickle.loads(pickle.dumps(faults[0])).exit_code == 75


def test_an_endpoint_that_answers_is_no_outage() -> None:
    """A question that fails at the other one loses a try."""
    service = Service(2)
    service.down[1] = False

    async def run() -> None:
        turn = iter([1, 0, 1])
        assert await service.ask(endpoint=lambda: next(turn)) == 1
        with pytest.raises(TransientError, match=r"refused \(attempt 1, the last\)"):
            await service.ask(endpoint=lambda: next(turn))
        assert await service.ask(endpoint=lambda: next(turn)) == 1

    asyncio.run(run())


def test_a_question_that_hangs_while_others_are_answered_is_no_outage() -> None:
    """Else it would be asked until the run gives up, over and over again."""
    circuit = Circuit(timeout=60.0)
    outage = Outage("service", [circuit], seconds=30.0)
    tries = 0

    async def hangs(_: int) -> None:
        nonlocal tries
        tries += 1
        with circuit.noting():
            await asyncio.sleep(0.01)
            with circuit.noting():  # of another question
                pass
            raise DeadlineError("no answer within 60 s", unreachable=True)

    with pytest.raises(TransientError, match=r"attempt 1, the last"):
        asyncio.run(retried(hangs, tries=1, outage=outage))
    assert tries == 1


@pytest.mark.slow
def test_a_short_silence_is_not_announced_and_a_long_one_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "ANNOUNCED_SECONDS", 0.3)

    async def away(seconds: float) -> None:
        service = Service()
        asyncio.get_running_loop().call_later(seconds, service.down.__setitem__, 0, False)
        await asyncio.gather(*(service.ask() for _ in range(20)))

    asyncio.run(away(0.05))
    assert caplog.messages == []
    asyncio.run(away(0.8))
    begin, end = caplog.messages
    assert begin == "service does not answer (refused); it is retried for up to 30 s"
    assert end.startswith("service answers again after ")
