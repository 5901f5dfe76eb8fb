"""`pacorl studio`: a local page to make, judge and compare sets."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Adds this file's command."""
    app.command("studio")(studio)


def studio(
    *,
    model: str = typer.Option("tiny", help="A diffusers folder, a hub name, or the embedded tiny generator."),
    kind: str = typer.Option("", help="The policy that runs the model; found out from it if left out."),
    adapter: str = typer.Option("", help="A LoRA to compare with its base: folder, file or hub name."),
    judge: str = typer.Option("tiny", help="A checkpoint folder, hub name, server's URL or endpoints YAML."),
    judge_model: str = typer.Option("", help="The judge's name at a server."),
    judge_adapter: str = typer.Option("", help="A PEFT adapter on the judge's checkpoint."),
    api_key_env: str = typer.Option("", help="The environment variable that holds the judge server's key."),
    host: str = typer.Option("127.0.0.1", help="Where to listen; this machine only unless you say otherwise."),
    port: int = typer.Option(8767, min=0, max=65535, help="0 for any free one."),
    open_page: bool = typer.Option(False, "--open", help="Open the page in your browser."),
) -> None:
    """Open a page to make sets, see them ranked, compare an adapter with its base, and judge your own images."""
    try:
        from pacorl.serve.servers import is_loopback
        from pacorl.studio.models import ModelNames
        from pacorl.studio.server import serve
    except ModuleNotFoundError as error:
        raise ImportError(f"the studio needs {error.name}; pip install 'pacorl[serve]'") from None
    if not is_loopback(host):
        typer.echo(f"anyone who can reach {host} and has the link can use this studio", err=True)
    names = ModelNames(model, kind, adapter, judge, judge_model, judge_adapter, api_key_env)
    serve(names, host=host, port=port, announce=lambda line: _announce(line, open_page=open_page))


def _announce(line: str, *, open_page: bool) -> None:
    typer.echo(line)
    if open_page:
        import webbrowser

        webbrowser.open(line.partition(" ")[2])
