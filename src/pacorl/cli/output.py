"""What every command prints with: one progress bar, one form of JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer


@contextmanager
def progress(activity: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on the error stream, so that `--json` stays clean.

    Yields:
        What is told how many are done, of how many.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(activity), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(activity, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(document: Mapping[str, Any]) -> None:
    """Prints a document for programs."""
    import json

    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def echo_errors(*lines: str) -> None:
    """Prints the lines that are not empty on the error stream."""
    for line in filter(None, lines):
        typer.echo(line, err=True)
