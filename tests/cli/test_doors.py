"""The doors of commands: help, flags, numbers; and a mistake is one line that names the thing, with its exit code.

`REFUSED` has the mistakes of every command. Each is told before the libraries that load models are imported, which
takes seconds, and leaves every file as it was.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from bench_examples import rank_example
from PIL import Image
from run_folder import finished_run
from stories import CONFIGS, SET
from typer.testing import CliRunner

import pacorl
from pacorl.cli import app
from pacorl.models.lora import save_lora

MAKE = ["generate", "a red hero with a crown in town", *SET]
EDIT = ["generate", "Give the hero a cap.", "--image", "a.png"]
SCORE, CHECK = ["score", "a.png", "b.png", "--judge", "tiny"], ["check", "a.png", "b.png", "--judge", "tiny"]
TRAIN = ["train-policy", f"{CONFIGS}/tiny.yaml", "out=new"]
TEACH = ["train-reward", f"{CONFIGS}/reward/tiny.yaml", "out=new"]
AGAIN = ["generate", "--from", "a.png", "--layout", "1x2", "--judge", "tiny", "--min", "0.5"]
TEXTS = ["--panel", "in town, waving, flag"] * 2
MISUSED: list[tuple[list[str], str]] = [
    (["score", "--colour"], "--colour"),
    (["train-policy"], "config"),
    (["skore"], "skore"),
    (["benchmark", "t2is"], "data"),
    (["benchmark", "consistency-rank", "rank", "--judge", "tiny", "--model", "tiny"], "--model"),
    ([*CHECK, "--min", "0.5", "--judge", ""], "--judge"),
    (["train-policy", "tiny", "--card", "12"], "--dry-run"),
    (["generate", "--from", "a.png", "--layout", "1x2", *TEXTS], "--judge"),
    (["generate", "--from", "a.png", "--judge", "tiny", "--min", "0.5"], "--layout"),
    (["generate", "a fox", "--panel", "x", "--panel", "y", "--model", "some/model", "--min", "1"], "--judge"),
    (["check", "--min", "0.5"], "--sets"),
    ([*CHECK, "--sets", "empty", "--min", "0.5"], "--sets"),
    (["check", "a.png", "b.png", "--min", "0.5"], "--judge"),
    (["generate", "a fox", "--model", "some/model", "--best-of", "2"], "--judge"),
    ([*CHECK, "--character", ""], "--character"),
    ([*SCORE, "--calibration", "other.json"], "calibrate tiny"),
    ([*MAKE, "--calibration", "other.json"], "calibrate tiny"),
    (["dataset", "explain", "empty", "--model", "tiny"], "--model 'tiny'"),
    (["check", "a.png", "--theme"], "pacorl check --help"),
    (["serve", "tiny", "--backend", "vllm"], "--backend builtin"),
    ([*AGAIN[:2], "empty", *AGAIN[3:]], "empty is a folder"),
]
"""Wrong words: exit code 2."""
REFUSED: list[tuple[list[str], str]] = [
    (["score", "empty"], "empty"),
    (["score", "a.png", "none.png", "--judge", "tiny"], "none.png"),
    ([*SCORE, "--judge", "nothere"], "nothere"),
    (["score", "a.png", "--judge", "nothere"], "--grid"),
    (["check", "--sets", "none", "--judge", "tiny"], "none holds no sets"),
    ([*SCORE, "--calibration", "none.json"], "pacorl calibrate"),
    (["calibrate", "tiny", "bad.jsonl", "--out", "c.json"], "bad.jsonl:1"),
    (["calibrate", "tiny", "tiny:dev:60", "--out", "mine/summary.json"], "mine/summary.json"),
    (["calibrate", "taught/adapter", "tiny:dev:4"], "2 of 4 pairs are among the judge's training data"),
    ([*CHECK, "--min", "0.5", "--report", "a.png/page.html"], "a.png: no folder"),
    ([*CHECK, "--min", "0.5", "--report", "mine/page.html"], "mine/page.html"),
    ([*AGAIN, "--panel", "one"], "2 panels have 1 texts"),
    ([*AGAIN, *TEXTS, "--kind", "kontext"], "tiny edits images"),
    ([*AGAIN, *TEXTS, "--out", "mine"], "mine/a-repaired.png"),
    ([*MAKE, "--option", "cfg=2"], "cfg"),
    ([*MAKE, "--model", "nothere"], "nothere"),
    ([*MAKE, "--size", "33x35"], "32x32"),
    ([*MAKE, "--image", "a.png"], "--panel"),
    ([*MAKE, "--out", "a.png"], "a.png: no folder"),
    ([*MAKE, "--model", "tiny", "--out", "mine"], "mine/set-2.png"),
    ([*EDIT, "--image", "b.png"], "tiny takes 1"),
    (["generate", "x", "--image", "letter.png"], "letter.png"),
    (["generate"], "--from"),
    (["generate", "a fox", "--from", "a.png"], "--from"),
    (["generate", "none.yaml", "--panel", "a fox"], "--panel"),
    (["generate", "a red dragon"], "'dragon'"),
    (["generate", "none.yaml"], "none.yaml"),
    ([*TRAIN, "out=a.png/run"], "a.png: no folder"),
    ([*TRAIN, "out=mine"], "mine/config.yaml"),
    ([*TRAIN, "out=ran"], "ran"),
    ([*TRAIN, "model.checkpoint=nothere"], "nothere"),
    ([*TRAIN, "judge.checkpoint=nothere"], "nothere"),
    ([*TRAIN, "rewards=[{name: nothere}]"], "rewards: unknown reward 'nothere'"),
    (["train-policy", "flux_t2is", "out=new", "model.checkpoint=b/FLUX.1-schnell"], "b/FLUX.1-schnell is distilled"),
    (["train-policy", "flux_t2is_24g"], "flux_t2is_24gb"),
    (["train-policy", "mine.yaml"], "rewards: unknown reward 'beauty'"),
    ([*TEACH, "data.train=[absent.jsonl]"], "absent.jsonl"),
    ([*TEACH, "data.train=[absent.csv]"], "absent.csv does not exist"),
    (["train-character", "zorp", "out=new", "stepz=3"], "'steps'"),
    (["train-character", "zorp", "out=new", "--config", "character/tinny"], "character/tiny"),
    (["quickstart", "model.checkpoint=nothere"], "nothere"),
    (["init", "mine.yaml", "--prompts", "tiny:train:4"], "mine.yaml"),
    (["data", "letter.png"], "a .txt of one sentence a line"),
    (["data", "t2iss"], "t2iss does not exist"),
    (["report", "run"], "run/report.html"),
    (["report", "other", "run"], "compare-other-run.html"),
    (["data", "mine/train.jsonl", "--test", "1", "--out", "mine"], "mine/train.jsonl"),
    (["benchmark", "consistency-rank", "empty", "--judge", "tiny"], "empty/prompt_data.jsonl"),
    (["benchmark", "consistency-rank", "rank", "--judge", "nothere"], "nothere"),
    (["benchmark", "consistency-rank", "rank", "--judge", "tiny", "--out", "mine"], "mine"),
    (["benchmark", "t2is", "empty", "--images", "nothere"], "nothere"),
    (["dataset", "annotate", "nowhere", "--annotators", "ann"], "`pacorl dataset pair`"),
    (["serve", "nothere"], "nothere"),
    (["serve", "tiny", "--port", "{port}"], "{port}"),
    (["studio", "--judge", "nothere"], "nothere"),
]
"""Exit code 1."""
ELSEWHERE = [(["check", "a.png", "b.png", "--min", "0.5", "--judge", "http://127.0.0.1:9/v1#m"], "127.0.0.1:9")]
"""What is not there now, and may be later: exit code 75."""
LATE = [
    ([*MAKE, "--adapter", "lora"], "no layer foo"),
    ([*TRAIN, "prompts.train=bad.jsonl"], "bad.jsonl:1"),
    ([*TRAIN, "prompts.train=tiny:none"], "'tiny:none'"),
    ([*TEACH, "data.train=[pairs.jsonl]"], "gone.png"),
    (["train-character", "zorp", "out=new"], "2 images"),
]
"""Exit code 1, but after the imports, and the run's new folder may be there."""
MISTAKES = [
    *((words, 2, named) for words, named in MISUSED),
    *((words, 1, named) for words, named in REFUSED),
    *((words, 75, named) for words, named in ELSEWHERE),
    *((words, 1, named) for words, named in LATE),
]
RUNS = """
import contextlib, io, json, sys
from pathlib import Path
from pacorl import cli
state = lambda: {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}
before = state()
for words in json.load(sys.stdin):
    sys.argv, said, printed = ["pacorl", *words], io.StringIO(), io.StringIO()
    code = None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
    loaded = sorted({"diffusers", "transformers", "peft", "accelerate"} & set(sys.modules))
    after = state()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    before = after
    print(json.dumps([code, said.getvalue(), printed.getvalue(), loaded, changed]))
"""


def write_folder(folder: Path) -> None:
    """Write what the mistakes name, and files of a user under the names that commands write."""
    for name in ("empty", "ran", "mine", "zorp"):
        (folder / name).mkdir()
    for name in ("a.png", "b.png", "mine/set-2.png", "mine/a-repaired.png", "zorp/1.png", "zorp/2.png"):
        Image.new("RGB", (32, 32)).save(folder / name)
    for name in ("page.html", "thesis.pdf", "config.yaml", "summary.json"):
        (folder / "mine" / name).write_text("mine")
    (folder / "mine" / "train.jsonl").write_text('{"prompt": "a fox"}\n{"prompt": "a boat"}\n{"prompt": "a hat"}\n')
    (folder / "ran" / "metrics.jsonl").write_text("{}\n")
    (folder / "letter.png").write_text("Dear Sir")
    (folder / "bad.jsonl").write_text("{")
    small = "model: {checkpoint: tiny}, judge: {checkpoint: tiny}"
    (folder / "pairs.jsonl").write_text('{"images": ["gone.png", "a.png"], "question": "Red?", "consistent": true}\n')
    (folder / "mine.yaml").write_text(f"{{rewards: [{{name: beauty}}], {small}}}")
    (folder / "other.json").write_text('{"judge": "another", "curve": {}}')
    (folder / "taught" / "adapter").mkdir(parents=True)
    (folder / "taught" / "adapter" / "config.json").write_text("{}")
    (folder / "taught" / "config.yaml").write_text("data: {train: ['tiny:train:3', 'tiny:dev:2']}")
    (folder / "zorp" / "card.yaml").write_text("description: zorp\n")
    for name in ("run", "other"):
        finished_run(folder / name)
    for name in ("run/report.html", "compare-other-run.html"):
        (folder / name).write_text("<p>mine</p>")
    rank_example(folder / "rank")
    sides = {"foo.lora_A.weight": torch.zeros(4, 8), "foo.lora_B.weight": torch.zeros(8, 4)}
    save_lora(folder / "lora", sides, rank=4, alpha=8, targets=["foo"], base="X")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Any]]:
    """What the commands of MISTAKES say, one after another in one process that begins without heavy libraries."""
    folder = tmp_path_factory.mktemp("doors")
    write_folder(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        lines = [[word.replace("{port}", port) for word in words] for words, *_ in MISTAKES]
        done = subprocess.run(
            [sys.executable, "-c", RUNS],
            cwd=folder,
            input=json.dumps(lines),
            capture_output=True,
            text=True,
            check=True,
        )
    return [(port, json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[" ".join(words)[-60:] for words, *_ in MISTAKES])
def test_a_mistake_is_one_line_before_any_work(told: list[tuple[str, Any]], number: int) -> None:
    _, expected, named = MISTAKES[number]
    port, (code, said, printed, loaded, changed) = told[number]
    lines = [line for line in said.splitlines() if not line.startswith("  ")]
    assert (code, len(lines), lines[0][:8]) == (expected, 1, "pacorl: "), said
    if number < len(MISTAKES) - len(LATE):
        assert (loaded, changed) == ([], [])
    assert [name for name in changed if not name.startswith("new/")] == []
    assert named.replace("{port}", port) in said
    assert not printed or "error" in json.loads(printed)


@pytest.mark.parametrize(
    "words", [["score", "a.png", "none.png"], ["check", "a.png", "--no-such-option"], ["score", "--memory", ""]]
)
def test_a_program_reads_the_fault(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pacorl", *words, "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.stderr == f"pacorl: {json.loads(ended.stdout)['error']}\n"
    assert ended.returncode in (1, 2)


# --- every command ----------------------------------------------------------------------------------------------

ROOT = typer.main.get_command(app)


def commands(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words of every command, and its parser."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands())


def test_commands_and_flags_are_few() -> None:
    flags = [entry for command in COMMANDS.values() for entry in command.params if entry.opts[0].startswith("--")]
    assert (len(COMMANDS), len(flags) <= 200) == (24, True)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_command_has_a_help_and_knows_its_flags(path: tuple[str, ...]) -> None:
    runner, parameters = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}), COMMANDS[path].params
    shown = runner.invoke(app, [*path, "--help"])
    assert shown.exit_code == 0, shown.output
    assert "Usage:" in shown.stdout
    assert COMMANDS[path].help
    assert [
        entry.name for entry in parameters if not (getattr(entry, "help", "") or getattr(entry, "hidden", False))
    ] == []
    flags = [flag for entry in parameters for flag in entry.opts if flag.startswith("--")]
    assert len(flags) == len(set(flags))
    if path != ("serve",):  # what it does not know is vLLM's
        refused = runner.invoke(app, [*path, "--no-such-flag"])
        assert (refused.exit_code, "--no-such-flag" in refused.output) == (2, True)


NUMBERS = [
    (path, parameter.opts[0])
    for path, command in COMMANDS.items()
    for parameter in command.params
    if parameter.type_descriptor.annotation in (int, float) and parameter.opts[0].startswith("--")
]


@pytest.mark.parametrize("value", ["two", "nan", "1e300"])
def test_every_number_has_limits(value: str) -> None:
    assert len(NUMBERS) > 25
    for path, flag in NUMBERS:
        refused = CliRunner().invoke(app, [*path, f"{flag}={value}"])
        assert (refused.exit_code, flag in refused.output) == (2, True), (path, flag)


def test_the_version_and_the_help_load_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "PIL", "pydantic", "yaml", "transformers", "diffusers", "openai"}
    code = f"import sys; from pacorl import cli; print(*sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"
    assert CliRunner().invoke(app, ["--version"]).stdout == f"pacorl {pacorl.__version__}\n"
    for words in ([], ["dataset"]):
        assert "Usage:" in CliRunner().invoke(app, words).output


# --- flags that arrive -----------------------------------------------------------------------------------------


class ArrivedError(Exception):
    """Raised in place of a step's work."""


PEOPLE = ["--annotators", "ann, ben", "--people", "3", "--no-controls", "--host", "h", "--port", "7"]
SHARES = ["--rankings", "a.csv", "--rankings", "b.csv", "--out", "o", "--test-share", "0.3", "--seed", "7"]
RANKINGS = [Path("a.csv"), Path("b.csv")]
STEPS: list[tuple[str, list[str], dict[str, Any]]] = [
    (
        "pacorl.annotate.server.serve",
        ["annotate", "set", *PEOPLE, "--public-url", "u"],
        {"people": 3, "controls": False, "host": "h", "port": 7, "public_url": "u"},
    ),
    (
        "pacorl.dataset.export.export",
        ["export", "set", *SHARES],
        {"rankings": RANKINGS, "out": Path("o"), "test_share": 0.3, "seed": 7},
    ),
    (
        "pacorl.dataset.explain.explain",
        ["explain", "set", *SHARES[:4], "--limit", "5", "--model", "http://127.0.0.1:1/v1#m"],
        {"rankings": RANKINGS, "limit": 5},
    ),
    (
        "pacorl.dataset.diversify.diversify",
        ["diversify", "set", "--number", "5", "--seed", "7"],
        {"number": 5, "seed": 7},
    ),
    ("pacorl.dataset.grids.pair", ["pair", "set", "--limit", "5"], {"limit": 5}),
    ("pacorl.dataset.prompts.write_all", ["prompts", "set", "--model", "tiny", "--seed", "7"], {"seed": 7}),
]
"""Function of a step, command, and arguments that follow from its flags."""


@pytest.mark.parametrize(("function", "words", "arguments"), STEPS, ids=[words[0] for _, words, _ in STEPS])
def test_every_flag_of_a_dataset_s_step_arrives(
    function: str, words: list[str], arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = Mock(side_effect=ArrivedError)
    monkeypatch.setattr(function, work)
    assert isinstance(CliRunner().invoke(app, ["dataset", *words]).exception, ArrivedError)
    assert {name: work.call_args.kwargs[name] for name in arguments} == arguments
