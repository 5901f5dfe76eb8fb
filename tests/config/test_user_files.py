"""Entries from outside the package, of a file that a config names."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

import pytest
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.base import ConfigError, load
from pacorl.config.recipes import recipe
from pacorl.config.user_files import NO_USER_FILES, code_digest, file_digests, users_value
from pacorl.core.objectives import OBJECTIVES, ObjectiveSpec
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.rewards import reward_spec
from pacorl.rewards.reward import RewardError

MINE = 'from pathlib import Path\n\nPath("FOLDER/executed").touch()\n'


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("FOLDER", str(tmp_path)))
    return path


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("x = 1", "x", r"objective '.*mine\.py:x' is of type int; give an object of type ObjectiveSpec"),
        ("from json import dumps", "Absent", r"objective: .*mine\.py has no 'Absent'; it defines nothing$"),
        ("from json import dumps\ndef f(): 0", "Absent", r"it defines f$"),
        ("x = 1\n1 / 0", "x", r"mine\.py, line 2: ZeroDivisionError"),
        ("def f(:", "f", r"mine\.py, line 1: SyntaxError"),
        ("raise SystemExit", "f", r"mine\.py, line 1: SystemExit"),
    ],
)
def test_a_file_that_does_not_serve_is_one_line(tmp_path: Path, source: str, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as caught:
        load(PolicyConfig, None, [f"objective.name={tmp_path / 'mine.py'}:{name}"])
    assert "\n" not in str(caught.value)


def test_a_mended_file_is_executed_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("X = 1")
    with pytest.raises(ValueError, match="is of type int"):
        OBJECTIVES.named(f"{path}:X")
    path.write_text("from pacorl.core.objectives.grpo_clip import GRPO_CLIP as X")
    assert isinstance(OBJECTIVES.named(f"{path}:X"), ObjectiveSpec)


def test_a_dry_run_tries_an_objective_and_knows_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OBJECTIVES, "users", {})
    text = (Path(__file__).parents[2] / "examples" / "reinforce.py").read_text().replace("return -(", "return (")
    (tmp_path / "mine.py").write_text(text)
    words = ["train-policy", "tiny", "--dry-run", f"objective.name={tmp_path / 'mine.py'}:REINFORCE"]
    for more, named in (([], "less likely"), (["objective.basline=1"], "did you mean 'objective.baseline'")):
        assert named in str(CliRunner().invoke(app, [*words, *more]).exception)
    (tmp_path / "mine.py").write_text(text.replace("step.log_prob_B", "step.logprob"))
    monkeypatch.setattr(OBJECTIVES, "users", {})
    fault = CliRunner().invoke(app, words).exception
    assert isinstance(fault, ValueError)
    assert re.search(r"mine\.py:REINFORCE', line \d+: AttributeError: .*'logprob'$", str(fault))


def test_a_run_tries_an_objective_before_it_loads_weights(tmp_path: Path) -> None:
    example = (Path(__file__).parents[2] / "examples" / "reinforce.py").read_text()
    for number, (old, new, named) in enumerate(
        [("return -(", "return (", "less likely"), (".mean(), {}", ".mean()", r"line \d+: the loss returned Tensor")]
    ):
        path = tmp_path / f"mine{number}.py"
        path.write_text(example.replace(old, new))
        config = load(PolicyConfig, recipe("tiny"), [f"objective.name={path}:REINFORCE", f"out={tmp_path}/run"])
        with pytest.raises(ValueError, match=named):
            PolicyTrainer(config)


def test_modules_beside_a_file_are_imported_and_hashed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder in (tmp_path / "a", tmp_path / "b"):
        (folder / "beside").mkdir(parents=True)
        (folder / "mine.py").write_text("from beside.near import K")
        (folder / "beside" / "near.py").write_text("K = 1\ndef late():\n    from .far import L")
        (folder / "beside" / "far.py").write_text("L = 1")
    name = f"{tmp_path}/a/mine.py:K"
    digests = file_digests({"name": name})
    assert users_value(name) == 1
    (tmp_path / "a" / "beside" / "far.py").write_text("L = 2")
    assert file_digests({"name": name}) != digests
    with pytest.raises(ValueError, match="rename one"):
        users_value(f"{tmp_path}/b/mine.py:K")


def test_a_process_without_user_files_executes_none_in_any_thread(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NO_USER_FILES, "1")
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="is code"):
        pool.submit(OBJECTIVES.named, f"{mine}:REINFORCE").result()
    with pytest.raises(RewardError, match="is code"):
        reward_spec(f"{mine}:reinforce")
    assert not (tmp_path / "executed").exists()


def test_code_is_compared_by_its_source() -> None:
    def plus(value: float) -> float:
        return value + 1

    assert code_digest(PurePath()) == code_digest(PurePath("a")) != code_digest(plus)
    # The statement around a lambda, and what is built in, say nothing of the code.
    assert code_digest(max) == code_digest(lambda value: value) == ""


def test_every_file_that_a_config_names_is_hashed(tmp_path: Path) -> None:
    mine = tmp_path / "é 猫 '.py"
    mine.write_text("x = 1\n")
    document = {"objective": {"name": f"{mine}:a"}, "rewards": [{"name": f"{mine}:b"}, {"name": "gone.py:c"}], "n": 1}
    assert file_digests(document).keys() == {f"{mine}:a", f"{mine}:b"}
