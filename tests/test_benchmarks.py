"""The benchmark that needs a GPU runs where there is none: on its tiny shape, and at full width without its data."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pacorl.policies.flux import FLUX

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark's file as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class OnesFromMeta(TorchDispatchMode):
    """What leaves the meta device for the CPU, where a GPU would hand over its data, is ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].is_meta else None
        if source is not None and func is torch.ops.aten._local_scalar_dense.default:
            return torch.ones((), dtype=source.dtype).item()
        device = kwargs.get("device") or torch.device("meta")
        if source is not None and func is torch.ops.aten._to_copy.default and device.type == "cpu":
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return func(*args, **kwargs)


def test_the_gpu_benchmark_runs_at_full_width_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published parts of FLUX.1-dev at 512 px, with one block of each kind for speed: the others are alike."""
    policy_gpu = benchmark("policy_gpu", monkeypatch)
    monkeypatch.setattr(policy_gpu, "SIDES", (512,))
    for depth in ("num_layers", "num_single_layers"):
        monkeypatch.setitem(FLUX.parts["transformer"], depth, 1)  # type: ignore[arg-type]
    options = policy_gpu.arguments(["--steps", "2", "--repeats", "1"])
    with OnesFromMeta():
        phases, text = policy_gpu.measured(options, torch.device("meta"))
    assert [(phase.side, phase.phase) for phase in phases] == [(512, "sample"), (512, "decode"), (512, "train")]
    assert all(phase.flops > 1e12 and phase.planned_bytes > 2**30 for phase in phases)
    assert " 512  decode " in text


def test_both_orders_of_questions_end_with_the_same_rankings(monkeypatch: pytest.MonkeyPatch) -> None:
    next_question = benchmark("next_question", monkeypatch)
    row = next_question.measure(next_question.Pool.of_pairs(0, references=1, candidates=4), 0)
    assert row["curves"]["scores"][-1] == row["curves"]["informative"][-1] == row["targets"]["scores"] > 0.5
    assert 0 < row["needed"]["scores"]["informative"] <= 1
    pool = next_question.Pool.of_rankings(0, prompts=1, grids=2)
    assert len(pool.questions) == 2 * 4 * 3
    assert all(pool.truth[one.reference, name] >= 0 for one in pool.questions for name in one.candidates)
    # Half-way between a point that is below and one that is above; a lucky point alone does not decide.
    assert next_question.labels_for(0.5, [0.5, 1.0], [0.4, 0.6]) == pytest.approx(0.75)
    assert next_question.labels_for(0.8, [0.2, 0.5, 1.0], [0.9, 0.5, 0.8]) == pytest.approx(5 / 6)
    assert next_question.labels_for(0.9, [0.5, 1.0], [0.5, 0.6]) is None


@pytest.mark.slow
def test_the_gpu_benchmark_measures_every_phase_at_every_size() -> None:
    line = [sys.executable, str(BENCHMARKS / "policy_gpu.py"), "--tiny", "--repeats", "1", "--steps", "2", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
    rows = json.loads(done.stdout)["phases"]
    assert [(row["side"], row["phase"]) for row in rows] == [
        (side, phase) for side in (32, 64) for phase in ("sample", "decode", "train")
    ]
    assert all(row["flops"] > 0 and 0 < row["share_of_peak"] <= 1 for row in rows)
