"""docs/python.md and the examples of what it imports are true: they run as they stand, on the tiny world."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pytest
from page_blocks import ROOT, run_page

import pacorl

PAGE = ROOT / "docs" / "python.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(PAGE, tmp_path, monkeypatch)
    for run in ("python-judge", "python-policy"):
        assert (tmp_path / "runs" / run / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "hero.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Generator", "PacoReward", "PolicyConfig", "PolicyTrainer"])
def test_the_example_of_a_class_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(_example(name), {"__name__": "example"})


def _example(name: str) -> str:
    return textwrap.dedent((inspect.getdoc(getattr(pacorl, name)) or "").partition("Example:\n")[2])
