"""`pacorl dataset …`: from prompts to the training pairs of a judge, one step at a time.

Every step works on one folder, says with --dry-run what it would do, and may be run again at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

app = typer.Typer(name="dataset", help="Make a dataset of consistency judgements.", no_args_is_help=True)

FOLDER = typer.Argument(help="The dataset's folder.")
DRY_RUN = typer.Option(False, "--dry-run", help="Say what it would do and cost, and change nothing.")
AS_JSON = typer.Option(False, "--json", help="Print the result as JSON.")
SEED = typer.Option(0, help="Of everything that is drawn.")


@app.command()
def pair(
    folder: Path = FOLDER,
    *,
    prompts: str = typer.Option("diverse.jsonl", help="The prompts file inside the folder."),
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Cut the grids and combine their sub-figures into questions for people."""
    from pacorl.curate.pair import pair as run

    with progress("cutting") as advance:
        counts = run(folder, prompts=prompts, dry_run=dry_run, progress=advance)
    tell(counts, as_json=as_json)


@app.command()
def annotate(
    folder: Path = FOLDER,
    *,
    annotators: str = typer.Option("", help="Names, separated by commas; those known already keep their links."),
    overlap: float = typer.Option(None, help="Share of the instances that several people rank.  [default: 0.1]"),
    judges: int = typer.Option(None, help="How many people each of those gets.  [default: 3]"),
    controls: int = typer.Option(None, help="Hidden control questions, made from the data.  [default: 40]"),
    control_every: int = typer.Option(None, help="One control question among so many.  [default: 20]"),
    host: str = typer.Option("127.0.0.1", help="Where to listen; another address opens the page to the network."),
    port: int = typer.Option(8765),
    days: float = typer.Option(30, help="How long a link is good for."),
    renew: str = typer.Option("", help="Make new links for these names ('admin' for the administrator)."),
    seed: int = typer.Option(None, help="Of the shares and the control questions.  [default: 0]"),
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Serve the page on which people rank candidates.

    How the work is shared is remembered with the database: without these options a later start changes nothing.
    """
    from pacorl.curate.annotate import desk
    from pacorl.curate.annotate.assign import Sharing

    wishes = {"overlap": overlap, "judges": judges, "controls": controls, "control_every": control_every, "seed": seed}
    given = {name: value for name, value in wishes.items() if value is not None}
    sharing, people = Sharing(**given) if given else None, names(annotators)
    if dry_run:
        tell(desk.plan(folder, people, sharing=sharing), as_json=as_json)
        return
    desk.serve(folder, people, sharing=sharing, host=host, port=port, days=days, renew=names(renew), announce=say)


def say(line: str) -> None:
    """Prints at once, whoever reads."""
    print(line, flush=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the error stream, so that --json stays clean."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def tell(counts: dict[str, Any], *, as_json: bool) -> None:
    """Prints a result: JSON for programs, a line for each value for people."""
    import json

    if as_json:
        print(json.dumps(counts, ensure_ascii=False))
        return
    for name, value in _lines(counts):
        print(f"{name:<28} {value:.4f}" if isinstance(value, float) else f"{name:<28} {value}")


def _lines(counts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in counts.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _lines(value, prefix=f"{label}: ")
        else:
            yield label, value


def names(text: str) -> list[str]:
    """A list from text that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
