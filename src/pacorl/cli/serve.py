"""`pacorl serve`, a judge over an OpenAI-compatible API, and `pacorl studio`, a local page to draw pages."""

import os
from pathlib import Path
from typing import Any, Literal

import typer
from typer import Argument, Option

from pacorl.cli.shared import echo, echo_errors, needing
from pacorl.config.options import JUDGE_KEY, Memory, StudioModels, UsageError
from pacorl.types import TINY


def serve(
    context: typer.Context,
    source: str = Argument("tiny", help="A judge: a model's or LoRA's folder or hub name."),
    *,
    backend: Literal["builtin", "vllm"] = Option("builtin", help="builtin is for small judges and tests."),
    name: str = Option("", help="The name that requests ask for; by default the last part of the judge's."),
    host: str = Option("127.0.0.1", help="Where to listen; other machines cannot reach the default."),
    port: int = Option(8000, min=0, max=65_535, help="Its port."),
    memory: Memory = Option("normal", help="Of the built-in server, as for `pacorl check`: low or lowest."),
    api_key: str | None = Option(None, help="The callers' key; `ps` shows it, but no variable.", envvar=JUDGE_KEY),
) -> None:
    """Serve a judge over an OpenAI-compatible API. Arguments after `--` are passed to `vllm serve`."""
    from pacorl.io.net import is_loopback
    from pacorl.serve.vllm import run_vllm, vllm_command

    # An empty variable, as of a missing secret in CI, must not open the server.
    key = os.environ.get(JUDGE_KEY) if api_key is None else api_key
    # Without the newline at the end of a file of secrets.
    key = key and key.strip()
    if key == "":
        raise ValueError(f"the key is empty; give --api-key or {JUDGE_KEY} a value, or unset it to serve without a key")
    if not key and not is_loopback(host):
        echo_errors("Other machines can reach this server, and it asks for no key; give one with --api-key.")
    name = name or Path(source).name
    if backend == "vllm":
        if source == TINY:
            raise UsageError(f"vLLM does not know the judge {TINY}; name a model or LoRA, or take --backend builtin")
        if memory != "normal":
            raise UsageError("--memory is the built-in server's; give vLLM options of its own after --")
        run_vllm(vllm_command(source, name, host=host, port=port, extra=context.args), api_key=key or "")
    if context.args:
        raise ValueError(f"{' '.join(context.args)} would be for vLLM; the built-in server takes no further arguments")

    from pacorl.io.quiet import quiet_loading
    from pacorl.judge import identity_at, judge_from
    from pacorl.judge.local import check_local
    from pacorl.runtime.cores import use_cores

    check_local(source)
    with needing("serve", what="the built-in server"):
        from pacorl.web import listening, run

    # A taken port fails before libraries and weights are loaded.
    with listening(host, port) as (listener, url):
        with needing("serve", what="the built-in server"):
            from pacorl.serve.server import create_app

        use_cores()
        quiet_loading()
        judge: Any = judge_from(source, memory=memory)[0]
        app = create_app(name, judge, api_key=key or "", identity=identity_at(source))
        echo_errors(f"serving {name} at {url}/v1")
        run(app, listener)


def studio(
    *,
    models: StudioModels,
    port: int = Option(8767, min=0, max=65535, help="0 for any free one."),
    folder: Path = Option(Path("runs/studio"), help="The folder of pages and characters."),
    open_page: bool = Option(False, "--open", help="Open the page in your browser."),
) -> None:
    """Open a page to draw pages that belong together, check and repair them, and teach a character."""
    from pacorl.io.files import check_writable
    from pacorl.judge import NO_JUDGE, check_judge
    from pacorl.models.adapters import read_adapters
    from pacorl.models.policies import POLICIES, kind_of

    # Otherwise the page would open at once, and report missing models half a minute later.
    check_writable(folder, folder=True)
    spec = POLICIES.named(kind_of(models.model))
    spec.check_source(models.model, adapters=spec.adapters_of(models.model, read_adapters(models.adapter)))
    if models.model != TINY and models.judge == TINY:
        raise UsageError(NO_JUDGE)
    check_judge(models.judge)
    with needing("studio", what="the studio"):
        from pacorl.studio.server import serve as serve_page

    def announce(link: str) -> None:
        echo(f"studio: {link}")
        echo("Open this link once in a browser, which keeps it; Ctrl+C ends the studio, and what you made stays.")
        if open_page:
            import webbrowser

            webbrowser.open(link)

    serve_page(models, folder=folder, port=port, announce=announce)
