"""The command line. Entry points only: each command imports its heavy modules itself."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from typer import Abort, Exit, Option

from pacorl import __version__
from pacorl.cli import benchmark, dataset, files, gate, generate, serve, train
from pacorl.cli.shared import Commands, echo, echo_errors, fault_line, print_json
from pacorl.io.terminal import PrintableFormatter, printable
from pacorl.runtime.workers import end_process

INTERRUPTED = 130
"""Exit code of a Ctrl-C, as a shell has it."""

app = Commands(
    name="pacorl",
    help="Make image generators consistent: judge sets of images, and train generators on the judgement.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
# In the order of the help: a newcomer's commands first.
app.command("quickstart")(train.quickstart)
app.command("recipes")(files.recipes)
app.command("init")(files.init)
app.command("train-policy")(train.train_policy)
app.command("train-character")(train.train_character)
app.command("report")(train.report)
app.command("train-reward")(train.train_reward)
app.command("score")(gate.score)
app.command("check")(gate.check)
app.command("calibrate")(gate.calibrate)
app.command("publish")(train.publish)
app.command("generate")(generate.generate)
app.command("studio")(serve.studio)
app.command("serve", context_settings={"allow_extra_args": True})(serve.serve)
app.command("data")(files.data)
app.command("config")(files.config)
app.add_typer(dataset.app)
app.command("benchmark")(benchmark.benchmark)


def _show_version(version: bool) -> None:
    if version:
        echo(f"pacorl {__version__}")
        raise Exit


@app.callback()
def options(
    # For the help: `main` reads it before typer does, since it decides how faults are shown.
    debug: bool = Option(False, "--debug", help="Show tracebacks."),
    version: bool = Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Options of every command."""


def main() -> None:
    """Run the command line; a fault becomes one line and exit code 1, a wrong option one line and exit code 2."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it warns that torchvision is missing
    # The handler of unconfigured loggers, such as pacorl's own.
    if logging.lastResort:
        logging.lastResort.setFormatter(PrintableFormatter())
    # Read here and not by typer, whose own faults it shows too.
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        app()
        return
    # Without the warning's line of code.
    warnings.formatwarning = lambda message, *_, **__: f"pacorl: {printable(str(message))}\n"
    end_process(exit_code(lambda: app(standalone_mode=False, prog_name="pacorl")))


def exit_code(command: Callable[[], object]) -> int:
    """Run a command and return its exit code; faults of the input or the machine become one line on stderr."""
    try:
        code = command()
    # Typer's own exception of a Ctrl-C is an Abort. A training has handlers of its own, which save.
    except (KeyboardInterrupt, Abort):
        _print_fault("interrupted")
        return INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own: a wrong option, argument or command
            return _refuse(error)
        # All other classes are faults of this program. safetensors' error is of none of these classes, and its module
        # is not loaded for every command.
        users = (ValueError, OSError, RuntimeError, ImportError, MemoryError)
        if not isinstance(error, users) and type(error).__name__ != "SafetensorError":
            raise
        _print_fault(fault_line(error))
        return int(getattr(error, "exit_code", 1))
    return code if isinstance(code, int) else 0


def _print_fault(message: str) -> None:
    """Print a fault for people, and with `--json` as a document."""
    # The command line itself is read, since a wrong option ends the command before its options have values.
    if "--json" in sys.argv:
        print_json({"error": message})
    echo_errors(f"pacorl: {message}")


def _refuse(error: Any) -> int:
    """Print a wrong use of the command line; returns the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        # An option without its value has no context, and stands behind its command.
        context = getattr(error, "ctx", None)
        command = context.command_path if context else f"pacorl {sys.argv[1]}"
        option, hint = getattr(error, "option_name", ""), ""
        if option and context and any(parameter.name == "overrides" for parameter in context.command.params):
            hint = f"; a key of the config is written {option.lstrip('-')}=VALUE"
        message = " ".join(error.format_message().split()).removesuffix(".").replace("Value error, ", "")
        _print_fault(f"{message}{hint}; see {command} --help")
    return int(error.exit_code)
