"""The benchmark of the probe: predictions from its document, and their rank correlation with what was learned."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # it takes its runs from the benchmark beside it
    spec = importlib.util.spec_from_file_location("benchmark_probe", BENCHMARKS / "probe.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(name: str, *, share: float = 1.0, gain: float = 0.0, alike: float = 0.0) -> dict[str, object]:
    return {"name": name, "signal": {"share": {"value": share}, "gain": {"value": gain}}, "groups_alike": alike}


def test_each_setting_has_a_prediction(benchmark: ModuleType) -> None:
    names = ("as configured", "step 0", "step 3", "noise 0.35", "noise 1")
    predicted = benchmark.predictions(
        {
            "candidates": [entry(name, gain=0.1 * (1 + number)) for number, name in enumerate(names)],
            "forms": [{"seeds": seeds, **entry("", gain=seeds / 100)} for seeds in (2, 12)],
            "temperatures": [entry("", share=0.64), entry("", share=0.16, alike=0.5)],
        }
    )
    assert list(predicted) == list(benchmark.SETTINGS)
    assert predicted["noise_1"] == pytest.approx(0.5)
    assert predicted["own_starts"] == pytest.approx(0.12)
    assert predicted["temperature_1"] == pytest.approx(0.1 * (0.4 * 0.5) / 0.8)


def test_the_rank_correlation_is_spearmans_with_an_interval(benchmark: ModuleType) -> None:
    names = list(benchmark.SETTINGS)
    predicted = {name: number**3.0 for number, name in enumerate(names)}
    same = benchmark.compared(predicted, {name: [number, number + 2] for number, name in enumerate(names)})
    assert same["rank_correlation"] == {
        "value": pytest.approx(1.0),
        "low": pytest.approx(1.0),
        "high": pytest.approx(1.0),
    }
    turned = benchmark.compared(predicted, {name: [-number] for number, name in enumerate(names)})
    assert turned["rank_correlation"]["value"] == pytest.approx(-1.0)
    # Two neighbours changed places: 1 − 6·2/(8·63).
    order = [1, 0, *range(2, 8)]
    swapped = benchmark.compared(predicted, {name: [order[number]] for number, name in enumerate(names)})
    assert swapped["rank_correlation"]["value"] == pytest.approx(1 - 12 / 504)
    assert swapped["rank_correlation"]["low"] < 0.95
    assert "rank correlation 0.98" in benchmark.table(swapped)
