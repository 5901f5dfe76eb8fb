"""`pacorl studio`: a local page to make, judge and compare sets."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import typer

from pacorl.cli.options import with_options
from pacorl.config.options import JudgeOptions, ModelOptions, inherited


def register(app: typer.Typer) -> None:
    """Adds this file's command."""
    app.command("studio")(studio)


@dataclass(frozen=True, kw_only=True)
class StudioModels(ModelOptions, JudgeOptions):
    """The generator and the judge of the page."""

    adapter: str = inherited(ModelOptions, "adapter", help="A LoRA to compare with its base: folder, file or hub name.")


@with_options
def studio(
    *,
    models: StudioModels,
    host: str = typer.Option("127.0.0.1", help="Where to listen; this machine only unless you say otherwise."),
    port: int = typer.Option(8767, min=0, max=65535, help="0 for any free one."),
    open_page: bool = typer.Option(False, "--open", help="Open the page in your browser."),
) -> None:
    """Open a page to make sets, see them ranked, compare an adapter with its base, and judge your own images."""
    try:
        from pacorl.judges.http.endpoints import is_loopback
        from pacorl.studio.models import ModelNames
        from pacorl.studio.server import serve
    except ModuleNotFoundError as error:
        raise ImportError(f"the studio needs {error.name}; pip install 'pacorl[serve]'") from None
    if not is_loopback(host):
        typer.echo(f"anyone who can reach {host} and has the link can use this studio", err=True)
    names = ModelNames(**asdict(models))
    serve(names, host=host, port=port, announce=lambda line: _announce(line, open_page=open_page))


def _announce(line: str, *, open_page: bool) -> None:
    typer.echo(line)
    if open_page:
        import webbrowser

        webbrowser.open(line.partition(" ")[2])
