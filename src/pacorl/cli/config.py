"""`pacorl config`: a run's config in today's keys."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(name="config", no_args_is_help=True, help="Configs of runs.")


@app.callback()
def configs() -> None:
    """Configs of runs."""


@app.command("upgrade")
def upgrade(
    file: Path = typer.Argument(help="A YAML of `train-policy` or `train-reward`."),
    *,
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would change, and change nothing."),
) -> None:
    """Rewrite a config of an earlier version with today's keys; comments stay."""
    from pacorl.config.rewrite import rewrite
    from pacorl.io.documents import read_text
    from pacorl.io.files import write_atomic

    before = read_text(file)
    after, notices = rewrite(before, name=str(file))
    for notice in notices:
        typer.echo(f"{file}: {notice}")
    if after != before and not dry_run:
        write_atomic(file, after)
    if not notices:
        typer.echo(f"{file}: its keys are today's")
