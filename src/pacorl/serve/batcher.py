"""Dynamic batching: whatever waits when the model is free goes into one forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class QueueFullError(Exception):
    """More is waiting than the server was told to hold."""


class Batcher(Generic[Item, Result]):
    """Collects single items into calls of `run`, at most `largest` at a time, in the order in which they came."""

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Sequence[Result]],
        executor: Executor,
        *,
        largest: int,
        most_waiting: int = 1024,
        window: float = 0.003,
    ) -> None:
        """`window`: seconds to wait for company before the first forward; `executor`: the model's one thread."""
        self._run, self._executor = run, executor
        self._largest, self._window = largest, window
        self._waiting: asyncio.Queue[tuple[Item, asyncio.Future[Result]]] = asyncio.Queue(most_waiting)
        self.batches = self.items = 0

    @property
    def waiting(self) -> int:
        return self._waiting.qsize()

    async def ask(self, item: Item) -> Result:
        """The item's result. Raises QueueFullError, or what `run` raised for it alone."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        try:
            self._waiting.put_nowait((item, future))
        except asyncio.QueueFull:
            raise QueueFullError from None
        return await future

    async def work(self) -> None:
        """Runs until it is cancelled."""
        while True:
            first = await self._waiting.get()
            await asyncio.sleep(self._window)
            batch = [first]
            while len(batch) < self._largest and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            # Whoever has hung up meanwhile needs no answer.
            await self._answer([(item, future) for item, future in batch if not future.done()])

    async def _answer(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        if not batch:
            return
        self.batches += 1
        self.items += len(batch)
        try:
            results = await self._call([item for item, _ in batch])
        except Exception as error:  # of any kind, for whoever asked; a batch is tried again one by one
            if len(batch) == 1:
                _settle(batch[0][1], error=error)
                return
            for item in batch:
                await self._answer([item])
            return
        for (_, future), result in zip(batch, results, strict=True):
            _settle(future, result=result)

    async def _call(self, items: list[Item]) -> Sequence[Result]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, items)


def _settle(future: asyncio.Future[Any], *, result: Any = None, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
