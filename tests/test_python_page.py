"""docs/python.md and the examples of what it imports are true: they run as they stand, on the tiny world."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks, run_page

import pacorl

PAGE = ROOT / "docs" / "python.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(PAGE, tmp_path, monkeypatch)
    for run in ("python-judge", "python-policy"):
        assert (tmp_path / "runs" / run / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "hero.png").is_file()


def test_the_first_example_trains_in_ten_lines() -> None:
    first = blocks(PAGE, "python")[0]
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 10
    assert "PolicyTrainer(" in first.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Generator", "PacoReward", "PolicyConfig"])
def test_the_example_of_a_class_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(_example(name), {"__name__": "example"})


@pytest.mark.parametrize("name", ["JudgeTrainer", "PolicyTrainer"])
def test_the_example_of_a_trainer_is_code(name: str) -> None:
    """`tests/grpo/test_trainer.py` runs the policy's; the page above trains a judge."""
    assert f"{name}(" in _example(name)
    compile(_example(name), name, "exec")


def _example(name: str) -> str:
    return textwrap.dedent((inspect.getdoc(getattr(pacorl, name)) or "").partition("Example:\n")[2])


@pytest.mark.parametrize(
    "name", ["pacorl.types", "pacorl.gate.scores", "pacorl.gate.check", "pacorl.generate.generated_images"]
)
def test_the_help_of_a_dataclass_describes_every_field(name: str) -> None:
    for found in vars(import_module(name)).values():
        if is_dataclass(found) and found.__module__ == name:
            assert [field.name for field in fields(found) if f"  {field.name}: " not in (found.__doc__ or "")] == []
