"""Two runs on one page: only what both were asked for is compared, and differences are paired."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_folder import finished_run, json_lines, write_evaluation, write_metrics

from pacorl.report.compare import (
    asked_of_both,
    differing_keys,
    results_of_both,
    side_names,
    write_comparison,
)
from pacorl.report.folder import read_run
from pacorl.report.page import write_report


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs whose newest evaluations share prompts 1 and 2."""
    first = finished_run(tmp_path / "one")
    second = write_metrics(
        tmp_path / "two",
        {"kind": "epoch", "epoch": 0, "loss": 0.9},
        {"kind": "epoch", "epoch": 1, "loss": 0.3},
        {"kind": "evaluation", "epoch": 2, "consistency": 0.5},
    )
    write_evaluation(second, 2, {1: 0.375, 2: 0.75, 9: 0.5})
    (second / "config.yaml").write_text("title: other\nlr: 0.002\nadapter: {rank: 4}\nout: elsewhere\n")
    return first, second


def test_the_page_has_both_sides_of_everything(runs: tuple[Path, Path]) -> None:
    page = write_comparison(*runs).read_text("utf-8")
    texts = [" ".join(text.split()) for text in re.findall(r">([^<>]+)<", page)]
    assert {"one and two", "Largest gain", "+0.250", "−0.500", "0.002", "adapter.rank"} <= set(texts)
    assert "2 images of one run alone are left out." in texts
    assert texts.count("Loss") == 1, "the losses of both are one chart"
    assert not re.search(r"https?://|@import|url\(", page)
    assert write_comparison(*runs).read_text("utf-8") == page


def test_the_same_number_is_another_prompt_if_its_text_is(runs: tuple[Path, Path]) -> None:
    first, second = runs
    write_evaluation(second, 3, {1: 0.9, 2: 0.9}, text="something else")
    samples, alone = asked_of_both(read_run(first), read_run(second))
    assert (samples, alone) == ({}, 5)
    assert "No image of one run" in write_comparison(*runs).read_text("utf-8")


def test_alarms_and_leaks_of_either_run_are_shown(runs: tuple[Path, Path]) -> None:
    first, second = runs
    with (second / "metrics.jsonl").open("a") as log:
        log.write(json_lines({"kind": "evaluation", "epoch": 3, "alarm/diversity": 1.0}))
    (first / "leaks.txt").write_text("8 of 8 training prompts are measured on\n")
    page = write_comparison(*runs).read_text("utf-8")
    headline = " ".join(page[page.index("<header") : page.index("</header>")].split())
    assert "two raised an alarm" in headline
    assert "different prompts get the same image. <span>After epoch 3" in headline
    assert "one raised" not in headline
    assert "one: 8 of 8 training prompts are measured on" in headline
    assert "8 of 8 training prompts are measured on" in write_report(first).read_text("utf-8")


def test_each_run_s_value_before_training_is_beside_its_last(runs: tuple[Path, Path]) -> None:
    first, second = map(read_run, runs)
    samples, _ = asked_of_both(first, second)
    (row,) = [row for row in results_of_both(first, second, samples) if row.name == "consistency"]
    assert row.starts == (0.375, None), "the mean of 0.25 and 0.5 of the shared prompts; the second was evaluated once"
    assert "<small>0.375 before training</small>" in write_comparison(*runs).read_text("utf-8")


@pytest.mark.parametrize(
    ("epoch", "stated"), [(0, "before training (epoch 0)"), (1, "after epoch 1"), (2, "after epoch 2")]
)
def test_no_difference_of_unequal_training_is_bold(tmp_path: Path, epoch: int, stated: str) -> None:
    runs = []
    for name, at, value in (("one", 2, 0.75), ("two", epoch, 0.5)):
        run = write_metrics(tmp_path / name, {"kind": "evaluation", "epoch": at})
        write_evaluation(run, at, dict.fromkeys(range(8), value))
        runs.append(run)

    page = " ".join(write_comparison(*runs).read_text("utf-8").split())
    assert f"two<small>{stated}</small>" in page
    assert ("one was evaluated after epoch 2 and two" in page) == (epoch != 2)
    assert ('class="sure"' in page) == (epoch == 2)


def test_a_run_s_own_files_of_one_digest_are_no_difference_wherever_they_are() -> None:
    def config(out: str, name: str) -> str:
        return f"out: {out}\nprompts: {{train: {out}/prompts/{name}.jsonl}}"

    first = config("runs/a", "train-0123abcd")
    assert differing_keys(first, config("runs/b", "train-0123abcd")) == []
    assert len(differing_keys(first, config("runs/b", "train-0123abce"))) == 1
    assert len(differing_keys(config("runs/a", "train"), config("runs/b", "train"))) == 1


def test_configs_differ_by_dotted_keys() -> None:
    first, second = (
        "out: x\nseed: 1\nadapter: {rank: 4, alpha: 8}\nrewards: [{name: a}]",
        "out: y\nseed: 1\nrewards: []",
    )
    assert differing_keys(first, second) == [
        ("adapter.rank", "4", "–"),
        ("adapter.alpha", "8", "–"),
        ("rewards.0.name", "a", "–"),
        ("rewards", "–", "[]"),
    ]
    assert differing_keys("", "") == []


def test_a_comparison_shows_no_key(runs: tuple[Path, Path]) -> None:
    for run, key in zip(runs, ("mine", "yours"), strict=True):
        (run / "config.yaml").write_text(f"seed: {len(key)}\nrewards: [{{name: http, args: {{api_key: {key}}}}}]\n")
    page = write_comparison(*runs).read_text()
    assert 'data-label="one">4</td>' in page
    assert "mine" not in page
    assert "yours" not in page


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    assert side_names(tmp_path / "a", tmp_path / "b") == ("a", "b")
    assert side_names(tmp_path / "x/run", tmp_path / "y/run") == ("x/run", "y/run")
