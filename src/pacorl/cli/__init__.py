"""The command line. Entry points only: whatever is heavy is imported inside the command that needs it."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import typer

from pacorl import __version__
from pacorl.cli import (
    adapter,
    benchmark,
    config,
    dataset,
    doctor,
    generate,
    policy,
    prompts,
    publish,
    quickstart,
    reward,
    score,
    serve,
    studio,
)

app = typer.Typer(
    name="pacorl",
    help="Make image generators consistent: judge sets of pictures, and train generators on the judgement.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
quickstart.register(app)
policy.register(app)
reward.register(app)
score.register(app)
publish.register(app)
generate.register(app)
adapter.register(app)
studio.register(app)
serve.register(app)
doctor.register(app)
app.add_typer(dataset.app, name="dataset")
app.add_typer(prompts.app, name="prompts")
app.add_typer(benchmark.app, name="benchmark")
app.add_typer(config.app, name="config")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pacorl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Options of every command."""


def main() -> None:
    """Runs the command line; a fault becomes one line and exit code 1, a wrong option one line and exit code 2."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # torchvision is not missed
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        app()
        return
    warnings.formatwarning = _one_line
    try:
        code = app(standalone_mode=False, prog_name="pacorl")
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: a wrong option, argument or command
            sys.exit(_refuse(error))
        if not _is_users(error):
            raise
        message = str(error).strip() or type(error).__name__
        print(f"pacorl: {message}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(error: Any) -> int:
    """Prints a wrong use of the command line; returns the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        command = f"{error.ctx.command_path} --help" if getattr(error, "ctx", None) else "pacorl --help"
        print(f"pacorl: {' '.join(error.format_message().split()).removesuffix('.')}; see {command}", file=sys.stderr)
    return int(error.exit_code)


def _is_users(error: Exception) -> bool:
    """Whether a fault is one of what was given, or of the machine, rather than of this program."""
    # safetensors' error is of none of these kinds, and its module is not loaded for every command.
    return isinstance(error, ValueError | OSError | RuntimeError | ImportError) or (
        type(error).__name__ == "SafetensorError"
    )


def _one_line(message: Warning | str, *where: object, **also: object) -> str:
    """A warning without the line of code that gave it."""
    return f"pacorl: {message}\n"
