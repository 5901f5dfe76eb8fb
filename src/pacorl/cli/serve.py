"""`pacorl serve`, a judge over an OpenAI-compatible API, and `pacorl studio`, a local page to make and judge sets."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Exit, Option

from pacorl.cli.shared import echo, echo_errors, fault_line, needing
from pacorl.config.options import LARGEST, WORKERS, StudioModels, UsageError, option
from pacorl.types import TINY

if TYPE_CHECKING:
    from pacorl.judge.http.endpoints import Endpoints, Server

KEY_VARIABLE = "PACORL_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The servers and their limits."""

    backend: str = option("builtin", "vllm, or builtin (small judges, tests).")
    name: str = option("", "The name that requests ask for; by default the checkpoint's last part.")
    adapter: list[str] = option([], "NAME=ADAPTER, served beside its base; may be repeated.")
    host: str = option("127.0.0.1", "Where to listen; other machines cannot reach the default.")
    port: int = option(8000, "The first server's port.", least=0, most=65_535)
    replicas: int = option(1, "vllm: so many servers, on ports one after another.", least=1, most=WORKERS)
    gpus: str = option("", "vllm: devices to share out among the servers, e.g. 0,1,2,3.")
    dtype: str = option("auto", "auto, float32 or bfloat16.")
    calibration: Path | None = option(None, "builtin: a file of `pacorl calibrate` for /v1/consistency and /v1/check.")
    write: Path | None = option(None, "Write the endpoints YAML that a judge over HTTP reads.")
    api_key: str | None = option(None, "Ask callers for this key.", variable=KEY_VARIABLE)
    api_key_file: Path | None = option(
        None, "builtin: ask callers for one of this file's keys, one a line; SIGHUP reads it again."
    )
    access_log: bool = option(False, "builtin: write a line of JSON per request to standard error.")
    max_body_mib: int = option(64, "builtin: largest request with images.", least=1, most=LARGEST)
    max_images: int = option(16, "Most images of one request.", least=1, most=256)
    max_pixels: int = option(64_000_000, "builtin: most pixels of one request's images.", least=1, most=10**9)


def serve(
    context: typer.Context,
    source: str = Argument("tiny", help="A checkpoint folder, a hub name, or an endpoints YAML."),
    *,
    options: ServeOptions,
) -> None:
    """Serve a judge over an OpenAI-compatible API. Arguments after `--` are passed to `vllm serve`."""
    from pacorl.config.base import dump
    from pacorl.io.files import write_atomic
    from pacorl.io.net import key_from
    from pacorl.judge.http.endpoints import is_loopback, load_endpoints, servers_of

    # The servers.
    if options.write and options.write.exists():
        load_endpoints(options.write)  # raises unless it is such a file, which alone is replaced
    description = _description(source, options)
    # An empty variable, as of a missing secret in CI, must not open the server.
    given = os.environ.get(KEY_VARIABLE) if options.api_key is None else options.api_key
    if options.api_key_file and options.api_key is None:
        given = (given or "").strip() or None  # the unit of docs/serve.md empties the variable
    if given is not None and not given.strip():
        raise ValueError(
            f"the key is empty; give --api-key or {KEY_VARIABLE} a value, or unset it to serve without a key"
        )
    if options.api_key_file and (given is not None or options.backend != "builtin"):
        raise ValueError(f"--api-key-file is for --backend builtin, without --api-key and {KEY_VARIABLE}")
    keys = read_keys(options.api_key_file) if options.api_key_file else []
    key = options.api_key or (not keys and key_from(description.api_key_env)) or ""
    servers = servers_of(description)
    if options.calibration and (options.backend != "builtin" or any(server.adapters for server in servers)):
        raise ValueError("--calibration is of one judge: it needs --backend builtin and no --adapter")
    if not (key or keys) and not all(is_loopback(server.host) for server in servers):
        echo_errors("Other machines can reach this server, and it asks for no key; give one with --api-key.")
    if options.write:
        write_atomic(options.write, dump(description))
        echo_errors(f"endpoints: {options.write}")

    # Serve until the end.
    if options.backend == "builtin":
        _reload_on_hangup(options.api_key_file, keys)
        _run_builtin(servers, options, keys=keys or [key], extra=context.args)
    elif options.backend == "vllm":
        from pacorl.serve.vllm import VllmOptions, run_vllm

        gpus = tuple(device.strip() for device in options.gpus.split(",") if device.strip())
        vllm = VllmOptions(dtype=options.dtype, images=options.max_images, gpus=gpus, extra=tuple(context.args))
        # 128 + the signal that ended the servers, as a shell reports it: a supervisor sees that they were stopped.
        raise Exit(run_vllm(servers, vllm, api_key=key, on_ready=lambda: _announce(servers)))
    else:
        raise ValueError(f"--backend {options.backend!r} is neither vllm nor builtin")


def _description(source: str, options: ServeOptions) -> Endpoints:
    from pacorl.judge.http.endpoints import describe, load_endpoints

    if source.endswith((".yaml", ".yml")):
        if options.name or options.adapter:
            raise ValueError(f"{source} contains the names of models and adapters; leave --name and --adapter out")
        return load_endpoints(Path(source))
    return describe(
        source,
        name=options.name,
        adapters=options.adapter,
        host=options.host,
        port=options.port,
        replicas=options.replicas,
        # The description contains the variable and never the key, because its file may be shared.
        api_key_env=KEY_VARIABLE if options.api_key or options.api_key_file else "",
    )


def read_keys(path: Path) -> list[str]:
    """Read the keys of a file, one a line; empty lines and those that begin with # are left out.

    Raises:
        ValueError: there is no key, which would open the server, or a line has several words: a comment would be a key.
    """
    from pacorl.io.documents import read_text

    keys = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        key = line.strip()
        if len(key.split()) > 1 and not key.startswith("#"):
            raise ValueError(f"{path}, line {number}: a key has no spaces; write one a line, and comments after #")
        if key and not key.startswith("#"):
            keys.append(key)

    if not keys:
        raise ValueError(f"{path} has no key; write one a line")
    return keys


def _reload_on_hangup(path: Path | None, keys: list[str]) -> None:
    """Let SIGHUP read the keys again. Without a file it does nothing, unless a terminal sends it as it closes.

    It comes before the imports and the weights, which take minutes: without a handler a SIGHUP ends the process.
    """
    if not hasattr(signal, "SIGHUP"):
        return
    if path:
        signal.signal(signal.SIGHUP, lambda *_: _reread_keys(path, keys))
    elif not sys.stdin.isatty():
        signal.signal(signal.SIGHUP, lambda *_: echo_errors("SIGHUP: there is no --api-key-file to read again"))


def _reread_keys(path: Path, keys: list[str]) -> None:
    """Replace the keys of a running server by the file's; a faulty file changes nothing."""
    try:
        keys[:] = read_keys(path)
        echo_errors(f"{path}: {len(keys)} keys")
    except (ValueError, OSError) as error:
        echo_errors(f"the earlier keys stay: {fault_line(error)}")


def _run_builtin(servers: list[Server], options: ServeOptions, *, keys: list[str], extra: list[str]) -> None:
    from pacorl.io.quiet import quiet_loading
    from pacorl.judge import check_judge
    from pacorl.judge.calibration import read_calibration
    from pacorl.runtime.cores import use_cores

    # Arguments that only vLLM has.
    if extra:
        raise ValueError(f"{' '.join(extra)} would be for vLLM; the built-in server takes no further arguments")
    if len(servers) != 1:
        raise ValueError(f"the built-in server is one process at one address, {len(servers)} are described; use vllm")

    # Check calibration, judges and port before weights are loaded.
    calibration = read_calibration(options.calibration or "")
    (server,) = servers
    for adapter in server.adapters.values() or [""]:
        check_judge(server.checkpoint, adapter=adapter)
    with needing("serve", what="the built-in server"):
        from pacorl.web.site import listening

        # Bind and close: a taken port fails now and not after minutes of loading.
        with listening(server.host, server.port):
            pass
        from pacorl.serve.builtin import load_judges, run_builtin
        from pacorl.serve.schema import Limits

    # Load.
    use_cores()
    quiet_loading()
    judges = load_judges(server, dtype=options.dtype, calibration=calibration)
    _announce(servers)
    limits = Limits(body_bytes=options.max_body_mib * 2**20, images=options.max_images, pixels=options.max_pixels)
    run_builtin(
        judges,
        host=server.host,
        port=server.port,
        limits=limits,
        api_key=keys,
        access_log=echo_errors if options.access_log else None,
    )


def _announce(servers: list[Server]) -> None:
    echo_errors(*(f"serving {', '.join([*server.names, *server.adapters])} at {server.url}" for server in servers))


# --- the studio ------------------------------------------------------------------------------------------------


def studio(
    *,
    models: StudioModels,
    host: str = Option("127.0.0.1", help="Where to listen; by default this machine only."),
    port: int = Option(8767, min=0, max=65535, help="0 for any free one."),
    history: str = Option("runs/studio", help="The folder that keeps the sets; none for none after the end."),
    open_page: bool = Option(False, "--open", help="Open the page in your browser."),
) -> None:
    """Open a page to make sets, see them ranked, compare an adapter with its base, and judge your own images."""
    from pacorl.io.files import check_writable
    from pacorl.judge import NO_JUDGE, check_judge
    from pacorl.models.policies import POLICIES, kind_of

    folder = None if history == "none" else Path(history)

    # Otherwise the page would open at once, and report missing models half a minute later.
    if folder:
        check_writable(folder, folder=True)
    POLICIES.named(models.kind or kind_of(models.model)).check_source(models.model, adapter=models.adapter)
    if models.model != TINY and models.judge == TINY:
        raise UsageError(NO_JUDGE)
    check_judge(models.judge, adapter=models.judge_adapter)
    with needing("serve", what="the studio"):
        from pacorl.judge.http.endpoints import is_loopback
        from pacorl.studio.server import serve as serve_page
    # The page's link is its only lock.
    if not is_loopback(host):
        echo_errors(f"anyone who can reach {host} and has the link can use this studio")

    def announce(line: str) -> None:
        echo(line)
        echo("Open this link in a browser. It is good until the studio ends: each start prints a new one.")
        echo(
            "Ctrl+C ends the studio; what you made stays." if folder else "Ctrl+C ends the studio and deletes its sets."
        )
        if open_page:
            import webbrowser

            # The line is `studio: URL`.
            webbrowser.open(line.partition(" ")[2])

    # Serve until SIGINT or SIGTERM.
    serve_page(models, history=folder, host=host, port=port, announce=announce)
