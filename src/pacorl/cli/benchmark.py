"""`pacorl benchmark NAME DATA`: the field's measures of judges and of generators, compared with the paper's rows.

The commands come from the table of benchmarks: an entry's options are its flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer import Argument, Exit
from typer.core import TyperGroup

from pacorl.bench.benchmarks import BENCHMARKS, BenchmarkOptions
from pacorl.cli.shared import INCOMPLETE, Commands, echo, echo_errors, print_json, progress


class BenchmarkGroup(TyperGroup):
    """A command per entry of the table; the entry's file is imported when its command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        try:
            return command_of(cmd_name)
        except ValueError as error:
            ctx.fail(str(error))


app = typer.Typer(
    name="benchmark",
    cls=BenchmarkGroup,
    help="Measure judges and generators as the field does.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def benchmarks() -> None:
    """Measure judges and generators on published benchmarks."""


def command_of(name: str) -> Any:
    """Build the command of a benchmark.

    Raises:
        ValueError: the name is unknown, or its entry from outside cannot be used.
    """
    spec = BENCHMARKS.named(name)

    def command(data: Path = Argument(help=spec.data), *, options: BenchmarkOptions) -> None:
        run(name, data, options)

    # The flags are read from the annotation.
    command.__annotations__["options"] = spec.options
    # A group of one command: typer builds its parser from the spec's options.
    alone = Commands(add_completion=False)
    alone.command(name, help=spec.summary)(command)
    return typer.main.get_command(alone)


def run(name: str, data: Path, options: BenchmarkOptions) -> None:
    """Run a benchmark and print its tables; exits with INCOMPLETE if items are lacking."""
    from pacorl.bench.running import run_benchmark
    from pacorl.runtime.cores import use_cores

    use_cores()
    outcome = run_benchmark(name, data, options, progress=progress, notice=echo_errors)
    if outcome is None:
        return  # --generate-only
    if options.as_json:
        print_json(outcome.summary | {"note": outcome.note})
    else:
        echo("\n\n".join([*(table.markdown for table in outcome.tables), *outcome.remarks]))
    echo_errors(outcome.note, f"tables: {outcome.folder / 'table.html'}")
    # A script must not mistake a table with gaps for a finished table.
    if outcome.missing:
        raise Exit(INCOMPLETE)
