"""Progress bars of a run: the epochs, and within each the phase that is going on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Bars:
    """Two bars on the main process, none on the others. Use as a context manager."""

    def __init__(self, *, total: int, done: int, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            disable=not shown,
        )
        self._epochs = self._progress.add_task("epochs", total=total, completed=done, note="")

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._progress.stop()

    def epoch(self, done: int, *, note: str) -> None:
        """So many epochs are finished."""
        self._progress.update(self._epochs, completed=done, note=note)

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Callable[[int], None]]:
        """Within the block a bar shows a phase of `total` parts; call the given function with each part's size."""
        task = self._progress.add_task(name, total=total, note="")
        try:
            yield lambda count: self._progress.advance(task, count)
        finally:
            self._progress.remove_task(task)
