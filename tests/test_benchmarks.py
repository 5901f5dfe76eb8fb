"""The benchmark that needs a GPU runs, on its tiny shape, where there is none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
def test_the_gpu_benchmark_measures_every_phase_at_every_size() -> None:
    line = [sys.executable, str(BENCHMARKS / "policy_gpu.py"), "--tiny", "--repeats", "1", "--steps", "2", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
    rows = json.loads(done.stdout)["phases"]
    assert [(row["side"], row["phase"]) for row in rows] == [
        (side, phase) for side in (32, 64) for phase in ("sample", "decode", "train")
    ]
    assert all(row["flops"] > 0 and 0 < row["share_of_peak"] <= 1 for row in rows)
