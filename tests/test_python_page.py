"""docs/python.md is true: its code runs as it stands, in order, on the tiny world."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    for run in ("python-judge", "python-policy"):
        assert (tmp_path / "runs" / run / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "hero.png").is_file()
