"""The command itself: its version, both ways to start it, and faults in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from safetensors import SafetensorError

import pacorl
from pacorl import cli
from pacorl.judge import NO_JUDGE
from pacorl.runtime.stopping import Interrupted


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pacorl", *words], capture_output=True, text=True, check=False)


def test_the_version() -> None:
    assert run("--version").stdout == f"pacorl {pacorl.__version__}\n"


def test_the_commands_open_no_heavy_door() -> None:
    """Which is why `pacorl --help` takes a fraction of a second."""
    heavy = {"torch", "numpy", "PIL", "pydantic", "yaml", "transformers", "diffusers", "openai"}
    code = f"import sys; from pacorl import cli; print(*sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"


@pytest.mark.slow
def test_a_fault_is_one_line_and_debug_shows_where() -> None:
    words = ("train-policy", "absent.yaml", "--dry-run")
    plain, debug = run(*words), run("--debug", *words)
    assert (plain.returncode, plain.stdout) == (1, "")
    assert plain.stderr.count("\n") == 1
    assert "absent.yaml" in plain.stderr
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("score", "--colour"), "pacorl: No such option: --colour; see pacorl score --help"),
        (("train-policy",), "pacorl: Missing argument 'config'; see pacorl train-policy --help"),
        (("skore",), "pacorl: No such command 'skore'"),
        (
            ("train",),
            "pacorl: No such command 'train'. Did you mean 'train-policy', 'train-character', 'train-reward'?",
        ),
        (("help",), "pacorl: No such command 'help'. Did you mean '--help'?; see pacorl --help"),
        (("dataset", "help"), "pacorl: No such command 'help'. Did you mean '--help'?; see pacorl dataset --help"),
        (("benchmark", "t2is"), "pacorl: Missing argument 'data'; see pacorl benchmark t2is --help"),
    ],
)
def test_a_wrong_word_is_one_line(
    words: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pacorl", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(line)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("check", "{image}", "{image}", "--min", "0.5", "--judge", ""), 2, NO_JUDGE),
        (("score", "a.png", "b.png", "--criteria", ""), 2, "--criteria is empty; is the variable set?"),
        (("score", "a.png", "b.png", "--memory", ""), 2, "--memory is empty; is the variable set?"),
        (("check", "a.png", "--no-such-option"), 2, "No such option: --no-such-option; see pacorl check --help"),
        (("check", "{image}", "{image}"), 2, "no threshold: give --min, or a calibration that has thresholds"),
        (("score", "{image}", "none.png"), 1, "none.png: No such file or directory"),
        (
            ("check", "{image}", "{image}", "--min", "0.5", "--judge", "http://127.0.0.1:9/v1", "--model", "m"),
            75,
            "no judge at http://127.0.0.1:9/v1: no connection: Connection refused",
        ),
    ],
)
def test_a_program_reads_the_fault_and_its_kind(words: tuple[str, ...], code: int, line: str, tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "1.png")
    ended = run(*(word.format(image=tmp_path / "1.png") for word in words), "--json")
    assert (ended.returncode, json.loads(ended.stdout)) == (code, {"error": line})
    assert ended.stderr == f"pacorl: {line}\n"


@pytest.mark.parametrize("words", [(), ("dataset",)])
def test_no_words_are_a_question_for_help(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pacorl", *words])
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr()
    assert "Usage:" in shown.out + shown.err


@pytest.mark.parametrize(
    "fault", [SafetensorError("no space"), OSError("no space"), ValueError("no space"), MemoryError("no space")]
)
def test_what_a_user_can_cause_is_one_line(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise fault

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["pacorl"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (1, "pacorl: no space\n")


def test_a_megabyte_in_a_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("a.yaml: seed: " + "9" * 10**6 + "\nb.yaml: too")

    assert cli.exit_code(fail) == 1
    first, second, _ = capsys.readouterr().err.split("\n")
    assert first.startswith("pacorl: a.yaml: seed: 999")
    assert len(first) < 2100
    assert second == "b.yaml: too"


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (Interrupted("stopped after epoch 3, and saved"), 75, "stopped after epoch 3, and saved"),
        (
            OSError(28, "No space left on device", "runs/a/metrics.jsonl"),
            1,
            "runs/a/metrics.jsonl: No space left on device",
        ),
    ],
)
def test_a_job_script_can_tell_a_stop_from_a_fault(
    fault: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise fault

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["pacorl"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (code, f"pacorl: {line}\n")


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["pacorl"])
    with pytest.raises(KeyError):
        cli.main()


def test_a_stream_that_was_closed_can_be_asked_about_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As uvicorn does, whose server would not start."""
    terminals = []
    monkeypatch.setattr(cli, "app", lambda **_: terminals.append(sys.stdout.isatty()))
    monkeypatch.setattr(sys, "argv", ["pacorl"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit):
        cli.main()
    sys.stdout.close()
    assert terminals == [False]
