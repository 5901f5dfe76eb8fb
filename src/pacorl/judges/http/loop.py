"""One event loop on one thread for all judges of this process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Begins with the first judge and ends with the last."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _judges = 0

    @classmethod
    def join(cls) -> asyncio.AbstractEventLoop:
        """The loop; every call needs a `leave`."""
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                cls._thread = threading.Thread(target=cls._loop.run_forever, name="pacorl-judges", daemon=True)
                cls._thread.start()
            cls._judges += 1
            return cls._loop

    @classmethod
    def leave(cls) -> None:
        """Counts a judge out; after the last one the loop is stopped and its tasks are cancelled."""
        with cls._lock:
            cls._judges -= 1
            if cls._judges or cls._loop is None or cls._thread is None:
                return
            cls._loop.call_soon_threadsafe(cls._loop.stop)
            cls._thread.join()
            cls._loop.run_until_complete(_cancel_tasks())
            cls._loop.run_until_complete(cls._loop.shutdown_default_executor())
            cls._loop.close()
            cls._loop = cls._thread = None


async def _cancel_tasks() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def wait(future: Future[T]) -> T:
    """The future's result, for a thread that is not the loop's."""
    try:
        return future.result()
    except BaseException:
        future.cancel()  # a Ctrl-C here must not leave requests running there
        raise


def first_of(faults: BaseExceptionGroup[Any]) -> BaseException:
    """The first exception of a group of groups."""
    inner = faults.exceptions[0]
    return first_of(inner) if isinstance(inner, BaseExceptionGroup) else inner
