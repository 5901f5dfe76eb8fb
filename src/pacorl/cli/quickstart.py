"""`pacorl quickstart`."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Adds this file's command."""
    app.command("quickstart")(quickstart)


def quickstart(
    overrides: list[str] = typer.Argument(None, help="Changes to the tiny recipe, as section.key=value."),
    out: Path = typer.Option(Path("runs/quickstart"), help="The run's folder."),
) -> None:
    """The whole story on this machine: judge, generator, RL and a page, in minutes and without downloads."""
    from pacorl.engine.threads import use_cores
    from pacorl.quickstart import run_quickstart

    use_cores()
    page, verdict = run_quickstart(out, overrides=overrides or [])
    for line in verdict:
        typer.echo(line)
    typer.echo(f"page: {page}")
