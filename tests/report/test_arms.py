"""Two settings over several seeds: runs are grouped by their configs, and differences are paired by seed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from run_folder import write_evaluation, write_metrics
from scipy import stats
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.core.ranking import T_975, t_interval
from pacorl.report.arms import mean_charts, write_arms
from pacorl.report.compare import write_comparison

RISES = {1: 0.125, 2: 0.25, 3: 0.1875}
"""Seed → how much more the second setting gets."""


def _run(folder: Path, *, seed: int, lr: float, value: float, epoch: int = 2, **settings: object) -> Path:
    run = write_metrics(folder, {"kind": "evaluation", "epoch": epoch})
    write_evaluation(run, epoch, {1: value, 2: value})
    lines = [f"{key}: {entry}\n" for key, entry in {"out": folder, "seed": seed, "lr": lr, **settings}.items()]
    (run / "config.yaml").write_text("".join([*lines, f"prompts: {{train: {folder}/prompts/train-0123abcd.jsonl}}\n"]))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three seeds of two settings, in the order of a shell's `*`."""
    low = [_run(tmp_path / f"low-{seed}", seed=seed, lr=0.1, value=0.5) for seed in RISES]
    high = [_run(tmp_path / f"high-{seed}", seed=seed, lr=0.2, value=0.5 + rise) for seed, rise in RISES.items()]
    return [*low, *high]


def _text(page: Path) -> str:
    return " ".join(page.read_text("utf-8").split())


def test_differences_are_paired_by_seed_with_a_t_interval(runs: list[Path]) -> None:
    page, lines = write_arms([runs[0], runs[4], runs[2], runs[1], runs[5], runs[3]])
    assert page == runs[4] / "seeds-low-1.html"
    low, high = stats.t.interval(0.95, 2, 0.1875, stats.sem(list(RISES.values())))
    assert lines == [
        "high minus low, by seed (1, 3, 2):",
        f"Consistency: +0.188 (+{low:.3f} to +{high:.3f}), n = 3 (1: +0.125, 3: +0.188, 2: +0.250)",
        "Valid panels: +0.000 (+0.000 to +0.000), n = 3 (1: 0, 3: 0, 2: 0)",
    ]
    text = _text(page)
    assert lines[0] in text
    assert lines[1] in text
    assert text.count('class="sure"') == 1
    assert re.findall(r'<td data-label="Seed \d">([^<]*)<', text)[:3] == ["+0.125", "+0.188", "+0.250"]
    assert '<th scope="row">lr</th>' in text
    assert '<th scope="row">seed</th>' not in text
    assert "prompts.train" not in text, "a run's own files of one digest are no difference"


def test_curves_are_means_over_the_seeds_at_the_epochs_of_all() -> None:
    first, second, third = ([(1.0, 0.2), (2.0, 0.4), (3.0, 0.5)], [(1.0, 0.4), (3.0, None)], [(3.0, 0.1), (1.0, 0.6)])
    runs = [SimpleNamespace(epochs=_records("loss", line), evaluations=[]) for line in (first, second, third)]
    (chart,) = mean_charts(runs)  # type: ignore[arg-type]
    (line,) = chart.lines
    assert line.points == [(1.0, pytest.approx(0.4)), (3.0, None)]
    runs[1].epochs = _records("kl", second)
    assert mean_charts(runs) == []  # type: ignore[arg-type]


def _records(key: str, points: list[tuple[float, float | None]]) -> list[dict[str, float | None]]:
    return [{"epoch": epoch, key: value} for epoch, value in points]


def test_two_seeds_have_no_interval_and_a_run_without_its_like_is_named(runs: list[Path]) -> None:
    page, lines = write_arms(runs[:5])
    assert lines[1] == "Consistency: +0.188, n = 2 (1: +0.125, 2: +0.250)"
    assert lines[-1] == "Left out, for want of a run of the same seed: low-3."
    assert 'class="sure"' not in _text(page)


def test_unequal_training_is_said_and_not_bold(runs: list[Path], tmp_path: Path) -> None:
    late = _run(tmp_path / "high-late", seed=3, lr=0.2, value=0.75, epoch=4)
    page, lines = write_arms([*runs[:5], late])
    said = "low-3 was evaluated after epoch 2 and high-late after epoch 4."
    assert lines[-1] == f"warning: {said}"
    assert said in _text(page)
    assert 'class="sure"' not in _text(page)


def test_a_third_setting_is_refused_by_its_keys(runs: list[Path], tmp_path: Path) -> None:
    other = _run(tmp_path / "odd", seed=4, lr=0.2, value=0.5, rank=8)
    with pytest.raises(ValueError, match=r"odd is of a third setting: it differs from .*low-1 in lr, rank and from .*"):
        write_arms([*runs, other])


def test_arms_that_cannot_be_paired_are_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 runs differ in nothing but their seed; name runs of two settings"):
        write_arms(runs[:3])
    with pytest.raises(ValueError, match=r"low-1 and .*low-1 have one setting and one seed, 1; name one of them"):
        write_arms([*runs, runs[0]])
    with pytest.raises(ValueError, match="share no seed, they have 1, 2 and 9; train both with the same seeds"):
        write_arms([*runs[:2], _run(tmp_path / "nine", seed=9, lr=0.2, value=0.5)])


def test_the_command_prints_the_differences_and_the_page(runs: list[Path]) -> None:
    result = CliRunner().invoke(app, ["report", *map(str, runs)])
    assert result.exit_code == 0, result.output
    assert "n = 3" in result.stdout
    assert f"page: {runs[3] / 'seeds-low-1.html'}" in result.stdout


def test_a_page_of_two_runs_says_that_it_has_one_training_seed(runs: list[Path]) -> None:
    text = _text(write_comparison(runs[0], runs[3]))
    assert "one training seed on each side, and no interval covers the chance of training" in text
    assert "pacorl report A1 A2 A3 B1 B2 B3" in text


@pytest.mark.parametrize("count", [3, 4, 18, 19, 40])
def test_a_t_interval_is_student_s_and_never_too_narrow(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count).tolist()
    interval = t_interval(values)
    low, high = stats.t.interval(0.95, count - 1, np.mean(values), stats.sem(values))
    assert interval.low is not None
    assert interval.high is not None
    assert interval.groups == count
    assert interval.high - interval.low == pytest.approx(high - low, rel=0.08 if count > 18 else 1e-3)
    assert interval.high - interval.low > (high - low) * 0.999


def test_the_table_of_t_is_complete() -> None:
    assert pytest.approx([float(stats.t.ppf(0.975, dof)) for dof in range(2, 18)], abs=6e-4) == list(T_975)
