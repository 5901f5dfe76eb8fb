"""Faults of a command: one line and an exit code for a user's, a traceback for the program's."""

from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError
from typer import Abort

from pacorl import cli
from pacorl.runtime.stopping import Interrupted


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (SafetensorError("no space"), 1, "no space"),
        (ValueError("no space"), 1, "no space"),
        (MemoryError("no space"), 1, "no space"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Abort(), 130, "interrupted"),
        (Interrupted("stopped after epoch 3, and saved"), 75, "stopped after epoch 3, and saved"),
        (
            OSError(28, "No space left on device", "runs/a/metrics.jsonl"),
            1,
            "runs/a/metrics.jsonl: No space left on device",
        ),
    ],
)
def test_a_job_script_can_tell_a_stop_from_a_fault(
    fault: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=fault))
    monkeypatch.setattr(sys, "argv", ["pacorl"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (code, f"pacorl: {line}\n")


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=KeyError("gone")))
    monkeypatch.setattr(sys, "argv", ["pacorl"])
    with pytest.raises(KeyError):
        cli.main()
