"""`pacorl benchmark NAME DATA`: the field's measures of judges and of generators, compared with the paper's rows."""

from pathlib import Path

from typer import Argument, Exit

from pacorl.bench.benchmarks import BENCHMARKS
from pacorl.bench.options import BenchmarkOptions
from pacorl.cli.shared import echo, echo_errors, print_json, progress
from pacorl.config.options import INCOMPLETE


def benchmark(
    name: str = Argument(help=f"{', '.join(BENCHMARKS)}.", autocompletion=lambda: list(BENCHMARKS)),
    data: Path = Argument(help="The published data, as `pacorl data` or the hub leaves it."),
    *,
    options: BenchmarkOptions,
) -> None:
    """Measure a judge or a generator as the field does; exit code 3 if items have no judgement."""
    from pacorl.bench.running import run_benchmark
    from pacorl.runtime.cores import use_cores

    use_cores()
    outcome = run_benchmark(name, data, options, progress=progress)
    if options.as_json:
        print_json(outcome.summary)
    else:
        echo(outcome.text)
    echo_errors(f"table: {outcome.folder / 'table.md'}")
    # A script must not mistake a table with gaps for a finished table.
    # Under torchrun the exit of one process stops the others: the last one has a row of every item.
    if outcome.missing and outcome.measured + len(outcome.missing) == outcome.total:
        raise Exit(INCOMPLETE)
