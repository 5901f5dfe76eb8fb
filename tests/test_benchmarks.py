"""Benchmarks can be run: what they import is there, and the one that needs a GPU runs where there is none."""

import ast
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from tools.claims.claim import read_claims

import pacorl
from pacorl.io.processor import load_processor
from pacorl.records.comparisons import load_comparisons
from pacorl.types import Comparison

TINY_JUDGE = Path(pacorl.__file__).parent / "tiny" / "checkpoints" / "judge"
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


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    """Most are run by hand alone, so that a name that moves would be missed for long."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).partition(".")[0] == "pacorl":
            names = {alias.name for alias in node.names}
            absent = names - {*dir(importlib.import_module(node.module))}
            assert [name for name in absent if not importlib.util.find_spec(f"{node.module}.{name}")] == []


def test_reasons_carry_the_evidence_and_test_pairs_have_a_new_palette(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evidence = benchmark("evidence", monkeypatch)
    tokenizer = load_processor(str(TINY_JUDGE)).tokenizer
    answers: dict[tuple[str, int], list[Comparison]] = {}
    for split, length in product(("train", "test"), evidence.LENGTHS):
        folder = tmp_path / f"{split}-{length}"
        file = evidence.write_pairs(folder, split=split, count=6, length=length)
        answers[split, length] = load_comparisons(file)

    for (split, length), pairs in answers.items():
        assert [pair.consistent for pair in pairs] == [True, False] * 3
        for pair, short in zip(pairs, answers[split, 10], strict=True):
            sentences = pair.reasons.split(". ")
            assert len(sentences) == len(set(sentences))
            tokens = len(tokenizer(f"{'Yes' if pair.consistent else 'No'}. {pair.reasons}").input_ids) + 1
            assert 0.85 * length <= tokens <= 1.35 * length
            assert (evidence.NEW in pair.group) == (split == "test")
            assert [image.read_bytes() for image in pair.images] == [image.read_bytes() for image in short.images]
            if not pair.consistent:
                assert short.reasons.rstrip(".") in pair.reasons


def test_a_generator_s_run_has_the_metrics_of_its_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    atom = benchmark("generator_atom", monkeypatch)
    run = {name: [0.5, 0.6, 0.7, 0.6] for name in atom.GRADES} | {"cpu_seconds": [0, 10, 20, 30]}
    log = tmp_path / "metrics.jsonl"
    lines = [{"kind": "evaluation"}, *({"kind": "epoch", "reward/ratio": 1.0 + epoch} for epoch in range(12))]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    metrics = atom.flat(run) | atom.ratio(log)
    assert metrics["rise_2"] == pytest.approx(0.2)
    assert metrics["prompt_match_rise"] == pytest.approx(0.1)
    assert (metrics["cpu_seconds"], metrics["ratio_first"], metrics["ratio_last"]) == (30, 3.0, 10.0)
    for claim in read_claims(only=["resolution", "log_taming"]):
        assert set(claim.metrics.values()) <= set(metrics)


def test_the_gate_s_sets_are_scored_by_the_rule_of_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gate = benchmark("gate", monkeypatch)
    images = [Image.new("L", (4, 4), shade) for shade in range(5)]
    drawn = gate.Drawn(images[:1], images[1:], "")

    def p_of(first: Image.Image, second: Image.Image) -> float | None:
        return None if images[3] in (first, second) else 0.9

    for mode in ("references", "panels"):
        assert drawn.lowest(mode, p_of) == 0.0
        assert drawn.lowest(mode, lambda first, second: 0.9) == 0.9

    out = tmp_path / "mine.json"
    out.write_text("mine")
    monkeypatch.setattr("sys.argv", ["gate.py", "--out", str(out)])
    with pytest.raises(ValueError, match=r"mine\.json is there already, and is not replaced"):
        gate.main()


@pytest.mark.campaign
def test_the_gpu_day_runs_at_full_width_on_a_pretended_card() -> None:
    # A process of its own: after it, transformers left the position ids of a CLIP that it loaded without values.
    file = ROOT / "qa" / "fullsize" / "full_width_day.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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


def test_a_set_judge_is_compared_by_the_panel_advantages_within_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("set_judge", monkeypatch)
    random = torch.Generator().manual_seed(0)
    pair_S6, other_S6, text_S4 = (torch.rand(36, count, generator=random).double() for count in (6, 6, 4))
    value_SP = module.credit(pair_S6, text_S4, both=True)
    assert value_SP.shape == (36, 4)
    assert module.pearson(value_SP, value_SP) == pytest.approx(1)
    low, high = module.interval(value_SP, module.credit(other_S6, text_S4, both=True))
    assert -0.3 < low < high < 0.9  # the texts are the same

    # A panel's value comes from its own pairs: the last panel's alone change those of the last.
    changed_S6 = pair_S6.clone()
    changed_S6[:, [pair for pair, panels in enumerate(module.PAIRS) if 3 in panels]] *= 0.5
    alone = module.credit(pair_S6, text_S4, both=False) - module.credit(changed_S6, text_S4, both=False)
    assert alone[:, 3].abs().mean() > alone[:, :3].abs().mean()


# --- when a run has learned ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grades", "rise", "expected"),
    [
        ([0.5, 0.6, 0.7], 0.15, 15),
        ([0.5, 0.6, 0.7], 0.3, None),
        ([0.5, 0.5, 0.7], 0.1, 15),
        # A high evaluation before a low one counts with it, as their mean.
        ([0.5, 0.8, 0.6, 0.9], 0.25, 20 + 10 * 0.05 / 0.2),
        # The start is what was measured, although the fit lies below it.
        ([0.5, 0.3, 0.7], 0.1, 10 + 10 * 0.2 / 0.3),
    ],
)
def test_a_run_has_learned_where_a_monotone_fit_has_risen(
    grades: list[float], rise: float, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = [10.0 * number for number in range(len(grades))]
    assert benchmark("learned", monkeypatch).crossing(spent, grades, rise) == pytest.approx(expected)


def test_forms_are_compared_over_the_seeds_that_both_have(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = benchmark("learned", monkeypatch)
    ratio = learned.pooled_ratio({0: 1, 1: 2, 2: 30}, {0: 2, 1: 4, 3: 1})
    assert ratio == {"ratio": 0.5, "low": 0.5, "high": 0.5}

    uneven = learned.pooled_ratio({0: 1, 1: 4}, {0: 2, 1: 4})
    assert uneven == {"ratio": pytest.approx(5 / 6), "low": 0.5, "high": 1.0}


def test_the_more_seeds_differ_the_larger_is_what_can_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    detectable = benchmark("learned", monkeypatch).detectable
    base = dict.fromkeys(range(3), 10.0)
    assert detectable({0: 5.0}, base, 6) is None
    assert detectable(base, base, 6) == 1
    assert detectable({0: 5.0, 1: 9.0, 2: 7.0}, base, 6) < detectable({0: 6.0, 1: 8.0, 2: 7.0}, base, 6) < 1


def test_a_run_that_has_not_learned_counts_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    learning = benchmark("learning", monkeypatch)
    runs = []
    for form, last in (("quickstart", 0.9), ("panel", 0.62)):
        grades = {name: [0.5, 0.5, last] for name in learning.GRADES}
        spent = {"epochs": [0, 3, 6], "judged": [0, 216, 432], "cpu_seconds": [0.0, 10.0, 20.0]}
        runs.append({"form": form, "seed": 3} | grades | spent)

    quick, panel = learning.summary(runs, "quickstart")
    assert quick["0.15 missed"] == 0
    assert quick["0.15 judged"]["mean"] == pytest.approx(216 + 216 * 0.15 / 0.4)
    assert panel["0.15 missed"] == 1
    assert panel["0.15 judged"]["mean"] == 432
    assert panel["0.15 judged"]["ratio"] == pytest.approx(432 / 297)
    assert "| panel | 1 | " in learning.table([quick, panel], "quickstart")
