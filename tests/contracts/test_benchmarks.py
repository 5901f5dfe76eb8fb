"""Every entry of the table of benchmarks keeps what `BenchmarkSpec` promises, and its command works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_examples import EXAMPLES, check_benchmark
from typer.testing import CliRunner, Result

from pacorl.bench.benchmarks import BENCHMARKS, BenchmarkOptions, BenchmarkSpec, GeneratorBenchmarkOptions
from pacorl.cli import app
from pacorl.config.options import KEY

each = pytest.mark.parametrize("name", BENCHMARKS)


def command(*words: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["benchmark", *map(str, words)])


@each
def test_the_help_has_every_option_with_a_text(name: str) -> None:
    shown = command(name, "--help")
    assert shown.exit_code == 0, shown.output
    assert BENCHMARKS[name].summary in shown.stdout
    for field in fields(BENCHMARKS[name].options):
        setting = field.metadata[KEY]
        assert setting.help.endswith("."), field.name
        for flag in setting.flags or (f"--{field.name.replace('_', '-')}",):
            assert flag in shown.stdout


@pytest.mark.slow
def test_no_help_needs_a_model_or_a_page() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from pacorl.cli import app\n"
        f"for words in ['--help'], *([name, '--help'] for name in {list(BENCHMARKS)}):\n"
        "    assert CliRunner().invoke(app, ['benchmark', *words]).exit_code == 0\n"
        "print(sorted({'torch', 'transformers', 'diffusers', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@each
def test_every_option_has_a_default(name: str) -> None:
    for field in fields(BENCHMARKS[name].options):
        assert field.default is not MISSING or field.default_factory is not MISSING, field.name


@each
def test_generators_are_measured_with_generators_options(name: str) -> None:
    spec = BENCHMARKS[name]
    assert issubclass(spec.options, BenchmarkOptions)
    assert issubclass(spec.options, GeneratorBenchmarkOptions) == (spec.generate is not None)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_its_example_is_measured(name: str, tmp_path: Path) -> None:
    benchmark, example = EXAMPLES[name]
    check_benchmark(BENCHMARKS[benchmark], example, tmp_path)


def test_every_benchmark_has_an_example() -> None:
    assert {benchmark for benchmark, _ in EXAMPLES.values()} == set(BENCHMARKS)


def broken(spec: BenchmarkSpec[Any, Any], method: str, change: Callable[[Any, Any], Any]) -> BenchmarkSpec[Any, Any]:
    """The benchmark with one method that is wrong."""
    build = spec.build

    def build_wrong(*arguments: Any) -> Any:
        benchmark = build(*arguments)
        right = getattr(benchmark, method)
        # In the class's place: an instance may have slots.
        wrong = type("Broken", (type(benchmark),), {method: lambda self, rows: change(right, rows)})
        copied = copy(benchmark)
        copied.__class__ = wrong
        return copied

    return replace(spec, build=build_wrong)


def inverted(figures: Any, rows: Any) -> Any:
    return [replace(figure, mean=-figure.mean) for figure in figures(rows)]


def raising(measure: Any, rows: Any) -> Any:
    raise RuntimeError("not measured")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("gedit", "t2is") else []) for name in BENCHMARKS]
)
@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("figures", inverted, "a wrong judge has the better"),
        ("figures", lambda figures, rows: figures(rows)[:-1], r"\d+ figures for \d+ columns"),
        ("measure", raising, "not measured"),
        ("measure", lambda measure, keys: measure(keys)[::-1], "not the requested items"),
    ],
)
def test_a_wrong_benchmark_is_refused(name: str, method: str, change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=said):
        check_benchmark(broken(BENCHMARKS[name], method, change), EXAMPLES[name][1], tmp_path)


@each
def test_data_that_are_absent_are_named(name: str, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    refused = command(name, absent, "--judge", "tiny", "--model" if BENCHMARKS[name].generate else "--judge", "tiny")
    assert isinstance(refused.exception, ValueError | OSError), refused.output
    assert str(absent) in str(refused.exception)
    assert "\n" not in str(refused.exception)


@each
def test_an_option_that_is_none_is_refused(name: str) -> None:
    refused = command(name, "data", "--colour", "red")
    assert refused.exit_code == 2
    assert "--colour" in refused.output


def test_a_benchmark_that_is_none_is_refused() -> None:
    refused = command("t2iss", "data")
    assert refused.exit_code == 2
    assert "t2iss" in refused.output
