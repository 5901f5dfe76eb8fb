"""Requests of a dataset step to a language model, and the journal of the answers."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from pacorl.io.documents import Journal, JsonObject
from pacorl.io.terminal import Progress

Item = TypeVar("Item")


def fill_journal(
    journal: Journal,
    items: Sequence[Item],
    answer: Callable[[Item], JsonObject | None],
    *,
    workers: int,
    progress: Progress,
) -> None:
    """Add the answer for each item to the journal as it arrives, `workers` at a time; None is left out.

    An exception of `answer` ends it at once.
    """
    with ThreadPoolExecutor(workers) as pool:
        # All at once: the pool limits how many of them run.
        running = [pool.submit(answer, item) for item in items]
        try:
            for done, future in enumerate(as_completed(running), 1):
                # Only this thread writes: the lines of a journal must not be interleaved.
                row = future.result()
                if row is not None:
                    journal.add(row)
                progress(done, len(items))
        except BaseException:
            # A refused key or Ctrl-C: each waiting request would cost time and money in vain.
            pool.shutdown(cancel_futures=True)
            raise
