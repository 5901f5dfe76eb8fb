"""`pacorl publish`: a model card for a run, and, where it is asked for, the hub."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Adds this file's command."""
    app.command("publish")(publish)


def publish(
    run: Path = typer.Argument(help="A finished run's folder."),
    *,
    licence: str = typer.Option("", help="The hub's identifier; the base's where it is known."),
    benchmark: list[Path] = typer.Option([], help="A folder of `pacorl benchmark` for the card; may be repeated."),
    push_to_hub: str = typer.Option("", help="OWNER/NAME to upload to; nothing is uploaded without it."),
    public: bool = typer.Option(False, "--public", help="Let everybody see the repository; else it is private."),
) -> None:
    """Write a run's model card; upload adapter and card only with --push-to-hub."""
    from pacorl.report.publish import push, write_card

    folder = write_card(run, licence=licence, benchmarks=benchmark)
    typer.echo(f"card: {folder / 'README.md'}")
    if push_to_hub:
        typer.echo(f"uploaded: {push(folder, push_to_hub, private=not public)}")
