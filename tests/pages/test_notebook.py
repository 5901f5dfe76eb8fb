"""The notebook is true: its cells run in order on the tiny world, and hold no outputs of another machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from page_blocks import ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


@pytest.mark.nightly
def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(), 1):
        exec(compile(cell, f"cell {number}", "exec"), names)
    assert (tmp_path / "before-after.png").is_file()
    assert (tmp_path / "runs/notebook/adapter/adapter_model.safetensors").is_file()
