"""The notebook is true: its cells run in order on the tiny world, and hold no outputs of another machine."""

from __future__ import annotations

import ast
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


@pytest.mark.slow
def test_the_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(), 1):
        # As a kernel does: statements run, and a last expression is what the cell shows.
        tree = ast.parse(cell)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            assert eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names) is not None
    assert (tmp_path / "before-after.png").is_file()
    assert (tmp_path / "runs/notebook/adapter/adapter_model.safetensors").is_file()
