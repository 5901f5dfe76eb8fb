"""Benchmarks can be run: what they import is there, and the one that needs a GPU runs where there is none."""

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark's file as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    """Most are run by hand alone, so that a name that moves would be missed for long."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "pacorl":
            names = {alias.name for alias in node.names}
            absent = names - {*dir(importlib.import_module(node.module))}
            assert [name for name in absent if not importlib.util.find_spec(f"{node.module}.{name}")] == []


def test_the_gpu_day_runs_at_full_width_on_a_pretended_card() -> None:
    # A process of its own: after it, transformers left the position ids of a CLIP that it loaded without values.
    file = ROOT / "qa" / "fullsize" / "full_width_day.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign
def test_the_gpu_day_measures_everything_on_a_cpu(tmp_path: Path) -> None:
    sections = ["policy", "epoch", "judge", "ratio", "launchers"]  # compiling takes a minute
    line = [sys.executable, str(BENCHMARKS / "gpu_day.py"), "--tiny", "--repeats", "1", "--steps", "2"]
    line += ["--out", str(tmp_path / "day"), "--sections", *sections]
    subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
    day = json.loads((tmp_path / "day.json").read_text())
    assert [(row["side"], row["phase"]) for row in day["phases"]] == [
        (side, phase) for side in (32, 64) for phase in ("sample", "decode", "train")
    ]
    assert all(row["flops"] > 0 and 0 < row["share_of_peak"] <= 1 for row in day["phases"])
    figures = day["figures"]
    assert {name: value for name, value in figures.items() if name.startswith("ratio")} == {
        f"ratio's deviation, {form}": 0.0
        for form in ("as it is", "without checkpointing", "int8", "int8, streamed", "fp8")
    }
    assert {f"trained step at 32, {form}, s" for form in ("alone", "DDP", "FSDP2")} < figures.keys()
    assert all(value > 0 for name, value in figures.items() if name.endswith((" s", "/s")))
    assert "| epoch at 32, images/s | " in (tmp_path / "day.md").read_text()


def test_an_epoch_is_judged_by_its_count_and_not_by_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = benchmark("epoch", monkeypatch)
    left, right = torch.ones(2, 3), torch.ones(3, 4)
    assert epoch.counted(lambda: left @ right) == 2 * 2 * 3 * 4

    flops = {"bare": 1000, "own": 905, "shared": 800, "node": 520, "node_ab2": 340}
    slow = {name: [9.0, 8.0] for name in flops} | {"bare": [1.0, 1.0]}
    result = epoch.summary(flops, slow)
    assert epoch.exceeded(result) == []
    assert (result["flops_ratios"]["own"], result["seconds_ratios"]["own"]) == (0.905, 8.5)
    assert "own        0.9050 of the FLOPs  (limit 0.910)  8.5 of the CPU time" in epoch.table(result)
    assert epoch.exceeded(epoch.summary(flops | {"node": 540}, slow)) == ["node"]
    assert epoch.summary(flops, {name: [] for name in flops})["cpu_seconds"]["bare"] is None
