"""`pacorl serve`: a judge over an OpenAI-compatible API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pacorl.judges.http.endpoints import Endpoints, Server

KEY_VARIABLE = "PACORL_API_KEY"


def register(app: typer.Typer) -> None:
    """Adds this file's commands."""
    app.command("serve", context_settings={"allow_extra_args": True})(serve)


def serve(
    context: typer.Context,
    source: str = typer.Argument("tiny", help="A checkpoint folder, a hub name, or an endpoints YAML."),
    *,
    backend: str = typer.Option("builtin", help="vllm, or builtin (small judges, tests)."),
    name: str = typer.Option("", help="The name that requests ask for; by default the checkpoint's last part."),
    adapter: list[str] = typer.Option([], help="NAME=ADAPTER, served beside its base; may be repeated."),
    host: str = typer.Option("127.0.0.1", help="Where to listen; other machines cannot reach the default."),
    port: int = typer.Option(8000, help="The first server's port."),
    replicas: int = typer.Option(1, help="vllm: so many servers, on ports one after another."),
    gpus: str = typer.Option("", help="vllm: devices to share out among the servers, e.g. 0,1,2,3."),
    dtype: str = typer.Option("auto", help="auto, float32 or bfloat16."),
    write: Path | None = typer.Option(None, help="Write the endpoints YAML that a judge over HTTP reads."),
    api_key: str = typer.Option("", envvar=KEY_VARIABLE, show_envvar=True, help="Ask callers for this key."),
    allow_urls: bool = typer.Option(False, "--allow-urls", help="builtin: fetch http images, not data URLs only."),
    max_body_mib: int = typer.Option(64, min=1, help="builtin: largest request."),
    max_images: int = typer.Option(8, min=1, help="Most images of one request."),
    max_pixels: int = typer.Option(64_000_000, min=1, help="builtin: largest image."),
) -> None:
    """Serve a judge over an OpenAI-compatible API. What follows `--` is handed to `vllm serve`."""
    from pacorl.judges.http.endpoints import is_loopback, servers_of, write_endpoints

    description = _description(
        source, name=name, adapters=adapter, host=host, port=port, replicas=replicas, has_key=bool(api_key)
    )
    key = api_key or _key_of(description)
    servers = servers_of(description)
    if not key and not all(is_loopback(server.host) for server in servers):
        typer.echo("Other machines can reach this server, and it asks for no key; give one with --api-key.", err=True)
    if write:
        write_endpoints(description, write)
        typer.echo(f"endpoints: {write}", err=True)
    if backend == "builtin":
        try:
            from pacorl.serve.builtin import Limits
        except ModuleNotFoundError as error:
            raise ValueError(f"the built-in server needs {error.name}: pip install 'pacorl[serve]'") from None
        limits = Limits(body_bytes=max_body_mib * 2**20, images=max_images, pixels=max_pixels)
        _refuse_extra(context.args)
        _run_builtin(servers, limits, dtype=dtype, api_key=key, allow_urls=allow_urls)
    elif backend == "vllm":
        from pacorl.serve.vllm import VllmOptions, run_vllm

        devices = tuple(device.strip() for device in gpus.split(",") if device.strip())
        options = VllmOptions(dtype=dtype, images=max_images, gpus=devices, extra=tuple(context.args))
        raise typer.Exit(run_vllm(servers, options, api_key=key, on_ready=lambda: _announce(servers)))
    else:
        raise ValueError(f"--backend {backend!r} is neither vllm nor builtin")


def _description(
    source: str, *, name: str, adapters: list[str], host: str, port: int, replicas: int, has_key: bool
) -> Endpoints:
    from pacorl.judges.http.endpoints import describe, load_endpoints

    if source.endswith((".yaml", ".yml")):
        if name or adapters:
            raise ValueError(f"{source} says itself what is served under which name; leave --name and --adapter out")
        return load_endpoints(Path(source))
    return describe(
        source,
        name=name,
        adapters=adapters,
        host=host,
        port=port,
        replicas=replicas,
        api_key_env=KEY_VARIABLE if has_key else "",
    )


def _key_of(description: Endpoints) -> str:
    import os

    variable = description.api_key_env
    if variable and not os.environ.get(variable):
        raise ValueError(f"set the environment variable {variable} to the key that callers are to send; it is not set")
    return os.environ.get(variable, "") if variable else ""


def _run_builtin(servers: list[Server], limits: object, *, dtype: str, api_key: str, allow_urls: bool) -> None:
    from pacorl.engine.threads import use_cores
    from pacorl.serve.builtin import Limits, load_judges, run_builtin

    if len(servers) != 1:
        raise ValueError(f"the built-in server is one process at one address, {len(servers)} are described; use vllm")
    assert isinstance(limits, Limits)
    use_cores()
    (server,) = servers
    judges = load_judges(server, dtype=dtype)
    _announce(servers)
    for name, judge in judges.items():
        if judge.domain:
            typer.echo(_declines(name, judge.domain.name), err=True)
    run_builtin(judges, host=server.host, port=server.port, limits=limits, api_key=api_key, allow_urls=allow_urls)


def _declines(name: str, domain: str) -> str:
    from pacorl.judges.http.client import DECLINE_HEADER

    return f"{name} declines images of anything but {domain}; the header `{DECLINE_HEADER}: no` turns that off"


def _refuse_extra(arguments: list[str]) -> None:
    if arguments:
        raise ValueError(f"{' '.join(arguments)} would be for vLLM; the built-in server takes no further arguments")


def _announce(servers: list[Server]) -> None:
    for server in servers:
        typer.echo(f"serving {', '.join([*server.names, *server.adapters])} at {server.url}", err=True)
