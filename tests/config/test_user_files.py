"""Entries from outside the package: a file that a config names, and another package's entry point."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from toy_world import toy_config, toy_world
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import ConfigError, dump, load
from pacorl.config.table import Table
from pacorl.config.user_files import NO_USER_FILES, code_digest, file_digests, user_files
from pacorl.core.advantages import AGGREGATES
from pacorl.core.objectives import OBJECTIVES, ObjectiveSpec
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.testing import check_objective
from pacorl.types import TINY

MINE = '''
from __future__ import annotations

from pathlib import Path
from typing import Literal

from pacorl.core.advantages import AggregateOptions, AggregateSpec
from pacorl.core.objectives import ObjectiveOptions, ObjectiveSpec, Step

Path("FOLDER/executed").touch()


class Reinforce(ObjectiveOptions):
    """REINFORCE with a baseline."""

    name: Literal["reinforce"] = "reinforce"
    baseline: float = 0.0


def reinforce(step: Step, options: Reinforce):
    """Negative log-likelihood, weighted by advantages.

    Williams 1992.
    """
    return -(step.log_prob_B * (step.advantage_B - options.baseline)).mean(), {}


REINFORCE = ObjectiveSpec(Reinforce, reinforce, needs="path", unclipped=True)


class Best(AggregateOptions):
    """The best reward of a sample."""

    aggregate: Literal["best"] = "best"


BEST = AggregateSpec(Best, lambda scores, options: scores.score_RB.amax(0), lambda scores, options: None)
'''

BENCHMARK = """
from dataclasses import replace

from pacorl.bench.consistency_rank import SPEC

COPY = replace(SPEC, summary="A benchmark of one's own.")
"""

POLICY = '''
from dataclasses import replace
from typing import Literal

from pacorl.models.policies.flux import FLUX, FluxOptions


class Options(FluxOptions):
    """A generator of one's own."""

    kind: Literal["mine"] = "mine"
    sharpness: float = 1.0


MINE = replace(FLUX, options=Options, hub_name="mine")
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("FOLDER", str(tmp_path)))
    return path


# --- files -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_objective_and_an_aggregate_of_a_file_train(mine: Path, tmp_path: Path) -> None:
    names = [f"objective={{name: {mine}:REINFORCE, baseline: 0.1}}", f"advantages.aggregate={mine}:BEST"]
    with toy_world():
        config = toy_config(tmp_path / "run", *names, "epochs=1")
        folder = PolicyTrainer(config).train().folder
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any(epoch["kind"] == "epoch" for epoch in epochs)

    # The run's own config names the file, so that the run goes on from it.
    assert load(PolicyConfig, folder / "config.yaml") == config
    assert config.objective.name == f"{mine}:REINFORCE"
    assert config.objective.baseline == 0.1  # type: ignore[attr-defined]


def test_the_contract_takes_an_objective_of_a_file(mine: Path) -> None:
    check_objective(OBJECTIVES.named(f"{mine}:REINFORCE"))


def test_an_aggregate_of_a_file_keeps_its_own_keys(mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"advantages\.std: unknown key"):
        load(PolicyConfig, None, [f"advantages={{aggregate: {mine}:BEST, std: group}}"])
    assert f"{mine}:BEST" not in list(AGGREGATES)


def test_a_generator_of_a_file_is_configured_and_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICY)
    kind = f"{tmp_path / 'mine.py'}:MINE"
    config = load(PolicyConfig, None, [f"model={{kind: {kind}, checkpoint: {TINY}, sharpness: 2, dtype: float32}}"])
    assert config.generator.kind == config.model.kind == kind
    assert load(PolicyConfig, _written(tmp_path, dump(config))) == config
    policy = config.generator.from_pretrained(TINY, sharpness=3.0)
    assert (policy.options.kind, policy.options.sharpness) == (kind, 3.0)


def test_a_benchmark_of_a_file_is_a_command(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(BENCHMARK)
    shown = CliRunner().invoke(app, ["benchmark", f"{path}:COPY", "--help"])
    assert shown.exit_code == 0
    assert "A benchmark of one's own." in shown.stdout


def _written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("x = 1", "x", r"objective '.*mine\.py:x' is of type int; give an object of type ObjectiveSpec"),
        ("x = 1", "Absent", r"objective: .*mine\.py has no 'Absent'"),
        (
            "x = 1\n1 / 0",
            "x",
            r"objective: .*mine\.py, line 2: ZeroDivisionError when the file was run: division by zero",
        ),
        ("def f(:", "f", r"mine\.py, line 1: SyntaxError"),
        ("raise SystemExit", "f", r"mine\.py, line 1: SystemExit"),
    ],
)
def test_a_file_that_does_not_serve_is_one_line(tmp_path: Path, source: str, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as caught:
        load(PolicyConfig, None, [f"objective.name={tmp_path / 'mine.py'}:{name}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py:X", r"^absent\.py is no file; name your own code as path/to/file\.py:NAME"),
        ("absent.py:not a name", r"'absent\.py:not a name' is not of the form path/to/file\.py:NAME"),
        ("absent.py", r"unknown objective 'absent\.py'; there are grpo_clip, .*, or your own as path/to/file\.py:NAME"),
    ],
)
def test_a_name_of_no_file_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OBJECTIVES.named(name)


def test_a_mended_file_is_executed_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("X = 1")
    with pytest.raises(ValueError, match="is of type int"):
        OBJECTIVES.named(f"{path}:X")
    path.write_text("from pacorl.core.objectives.grpo_clip import GRPO_CLIP as X")
    assert isinstance(OBJECTIVES.named(f"{path}:X"), ObjectiveSpec)


# --- where no file is executed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["objective.name", "advantages.aggregate", "model.kind", "judge.backend"])
def test_a_dry_run_executes_no_file(choice: str, mine: Path, tmp_path: Path) -> None:
    config = _written(tmp_path, "out: run\n")
    result = CliRunner().invoke(app, ["train-policy", str(config), f"{choice}={mine}:REINFORCE", "--dry-run"])
    assert isinstance(result.exception, ValueError) or result.exit_code
    assert "`pacorl doctor CONFIG` executes it" in str(result.exception) + result.output
    assert not (tmp_path / "executed").exists()


def test_a_process_without_user_files_executes_none_in_any_thread(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NO_USER_FILES, "1")
    with ThreadPoolExecutor(1) as pool:
        looked_up = pool.submit(OBJECTIVES.named, f"{mine}:REINFORCE")
    with pytest.raises(ValueError, match="is code, which the studio does not execute"):
        looked_up.result()
    config = _written(tmp_path, "out: run\n")
    result = CliRunner().invoke(app, ["train-policy", str(config), f"objective.name={mine}:REINFORCE"])
    assert "is code, which the studio does not execute" in str(result.exception)
    assert not (tmp_path / "executed").exists()


def test_looking_a_name_up_executes_no_file(mine: Path) -> None:
    """Names that reports and checkpoints contain are looked up by `in` and by []."""
    name = f"{mine}:REINFORCE"
    assert name not in OBJECTIVES
    with pytest.raises(KeyError):
        OBJECTIVES[name]
    with user_files(run=False), pytest.raises(ValueError, match="is code, which a dry run does not execute"):
        OBJECTIVES.named(name)
    assert not (mine.parent / "executed").exists()


# --- entry points ----------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution on sys.path, as pip would leave it."""
    info = tmp_path / "consistent-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: consistent\nVersion: 1.0\n")
    points = {"mean": "statistics:mean", "pi": "math:tau", "lost": "consistent_module:X", "whole": "math:floor"}
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[pacorl.constants]", *lines]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_entry_point_is_an_entry(package: Path) -> None:
    table: Table[object] = Table("constant", {"pi": "math:floor"}, group="pacorl.constants")
    assert list(table) == ["pi", "mean", "lost", "whole"]
    assert table["pi"] is math.floor, "a package must not replace a built-in entry"
    assert table["whole"] is math.floor
    with pytest.raises(ValueError, match=r"constant 'lost' of the package consistent: ModuleNotFoundError"):
        table.named("lost")
    with pytest.raises(
        ValueError, match=r"'mean' is of type function; give an object of type builtin_function_or_method"
    ):
        table.named("mean")


@pytest.mark.slow
def test_a_config_names_an_entry_point(mine: Path, tmp_path: Path) -> None:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pacorl.objectives]\nplain = mine:REINFORCE\n")
    code = (
        "from pacorl.config.base import load, dump; from pacorl.grpo.policy_config import PolicyConfig; "
        "run = load(PolicyConfig, None, ['objective={name: plain, baseline: 0.5}']); "
        "print(run.objective.name, run.objective.baseline); import sys; sys.stdout.write(dump(run))"
    )
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("plain 0.5\n"), result.stderr
    assert "name: plain" in result.stdout


class Named:
    def __call__(self, prompts: object, images: object) -> object:
        return {"red", "green", "blue"}.intersection(("red",))


TYPED = """
def red(prompts, images, *, gain={gain}):
    return [{gain} * len({{"a", "b", "c", "d"}} - {{name}}) for name in images]

digest = code_digest(red)
"""


def test_code_is_compared_by_its_source_and_without_one_by_its_bytecode() -> None:
    def plus(value: float) -> float:
        return value + 1

    assert code_digest(Named()) == code_digest(Named()) != code_digest(plus)
    assert code_digest(partial(plus, 2)) == code_digest(plus)
    # One statement, whose other arguments are no part of the function.
    one, two = {"f": lambda value: value + 1, "epochs": 1}, {"f": lambda value: value + 2, "epochs": 1}
    again = {"f": lambda value: value + 1, "epochs": 2}
    assert code_digest(one["f"]) == code_digest(again["f"]) != code_digest(two["f"])
    assert code_digest(max) != code_digest(min)


def test_the_bytecode_of_a_function_has_one_digest_in_every_process() -> None:
    digests = []
    for seed, gain in (("1", 2), ("2", 2), ("1", 3)):
        script = f"from pacorl.config.user_files import code_digest\n{TYPED.format(gain=gain)}print(digest)"
        done = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        digests.append(done.stdout)
    assert digests[0] == digests[1] != digests[2]


def test_every_file_that_a_config_names_is_hashed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("x = 1\n")
    document = {"objective": {"name": f"{mine}:a"}, "rewards": [{"name": f"{mine}:b"}, {"name": "gone.py:c"}], "n": 1}
    assert file_digests(document).keys() == {f"{mine}:a", f"{mine}:b"}
