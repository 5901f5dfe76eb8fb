"""What a run writes down, and how it forgets."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from accelerate import PartialState

from pacorl.grpo.policy_config import PolicyConfig
from pacorl.runtime.logbook import Logbook, Progress


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_are_dropped_after_an_epoch(tmp_path: Path) -> None:
    config = PolicyConfig(out=tmp_path, trackers=())
    book = Logbook(config)
    book.write("evaluation", epoch=0, step=0, values={"a": 1.0})
    for epoch in (1, 2, 3):
        book.write("epoch", epoch=epoch, step=epoch, values={"a": float(epoch)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epo')  # a crash in the middle of a line
    Logbook(config, step=2)
    assert [line["epoch"] for line in lines(tmp_path)] == [0, 1, 2]
    Logbook(config)
    assert lines(tmp_path) == []


def test_of_epochs_without_a_step_those_of_the_checkpoint_stay(tmp_path: Path) -> None:
    config = PolicyConfig(out=tmp_path, trackers=())
    book = Logbook(config)
    for epoch in range(4):
        book.write("epoch", epoch=epoch, step=1, values={})
    Logbook(config, step=1, epoch=2)
    assert [line["epoch"] for line in lines(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_service_is_given_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    PartialState()  # accelerate's trackers log by it
    given: list[dict[str, Any]] = []
    service = SimpleNamespace(init=lambda **options: given.append(options), config={})
    monkeypatch.setitem(sys.modules, name, service)
    reward = {"name": "http", "args": {"api_key": "mine", "url": "http://me:pass@host/x"}}
    Logbook(PolicyConfig.model_validate({"out": tmp_path, "seed": 7, "trackers": [name], "rewards": [reward]}))
    (options,) = given
    assert options["config"]["seed"] == 7
    assert options["config"]["rewards"][0]["args"] == {"api_key": "***", "url": "***"}


def train(progress: Progress, *, epochs: int) -> None:
    for epoch in range(epochs + 1):
        if epoch % epochs == 0:
            with progress.phase("evaluating", total=8) as advance:
                advance(8)
        with progress.phase("sampling", total=72):
            progress.epoch(epoch, note=f"consistency 0.{epoch:03d}")


def test_other_processes_and_a_closed_pipe_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Progress(epochs=3, shown=False), epochs=3)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))
    train(Progress(epochs=3, shown=True), epochs=3)
