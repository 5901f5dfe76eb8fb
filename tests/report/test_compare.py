"""Two runs, or two settings over seeds, on one page: only what both were asked for is compared, paired."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_folder import finished_run, json_lines, write_evaluation, write_metrics
from scipy import stats

from pacorl.core.ranking import T_975
from pacorl.report.compare import differing_keys, results_of, write_comparison
from pacorl.report.folder import RunFolder, read_run

RISES = {1: 0.125, 2: 0.25, 3: 0.1875}
"""Seed → how much more the second setting gets."""


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs whose newest evaluations share prompts 1 and 2."""
    first = finished_run(tmp_path / "one")
    second = write_metrics(
        tmp_path / "two",
        {"kind": "epoch", "epoch": 0, "loss": 0.9},
        {"kind": "epoch", "epoch": 1, "loss": 0.3},
        {"kind": "evaluation", "epoch": 2, "p_yes": 0.5},
    )
    write_evaluation(second, 2, {1: 0.375, 2: 0.75, 9: 0.5})
    (second / "config.yaml").write_text("title: other\nlr: 0.002\nadapter: {rank: 4}\nout: elsewhere\n")
    return first, second


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    """Three seeds of two settings, in the order of a shell's `*`."""
    low = [trained(tmp_path / f"low-{seed}", seed=seed, lr=0.1, value=0.5) for seed in RISES]
    high = [trained(tmp_path / f"high-{seed}", seed=seed, lr=0.2, value=0.5 + rise) for seed, rise in RISES.items()]
    return [*low, *high]


def trained(folder: Path, *, seed: int, lr: float, value: float, epoch: int = 2, **settings: object) -> Path:
    evaluations = [{"kind": "evaluation", "epoch": number} for number in dict.fromkeys((0, epoch))]
    run = write_metrics(folder, *evaluations)
    write_evaluation(run, 0, {1: 0.25, 2: 0.25})
    if epoch:
        write_evaluation(run, epoch, {1: value, 2: value})
    lines = [f"{key}: {entry}\n" for key, entry in {"out": folder, "seed": seed, "lr": lr, **settings}.items()]
    (run / "config.yaml").write_text("".join([*lines, f"prompts: {{train: {folder}/prompts/train-0123abcd.jsonl}}\n"]))
    return run


def text_of(page: Path) -> str:
    return " ".join(page.read_text("utf-8").split())


def test_the_page_has_both_sides_of_everything_and_lies_beside_the_runs(runs: tuple[Path, Path]) -> None:
    path, _ = write_comparison(runs)
    assert path == runs[1].parent / "compare-one-two.html"
    page = path.read_text("utf-8")
    texts = [" ".join(text.split()) for text in re.findall(r">([^<>]+)<", page)]
    assert {"one and two", "+0.250", "−0.500", "0.002", "adapter.rank"} <= set(texts)
    assert "Image 2 of 2, next to the median change" in texts
    assert "in the other run: 2 of the images." in text_of(path)
    assert not re.search(r"https?://|@import|url\(", page)
    assert write_comparison(runs)[0].read_text("utf-8") == page


def test_the_same_number_is_another_prompt_if_its_text_is(runs: tuple[Path, Path]) -> None:
    first, second = runs
    with (second / "metrics.jsonl").open("a") as log:
        log.write(json_lines({"kind": "evaluation", "epoch": 3}))
    write_evaluation(second, 3, {1: 0.9, 2: 0.9}, text="something else")
    assert results_of(read_run(first), read_run(second)) == []
    assert any("prompts.evaluation" in line for line in write_comparison(runs)[1])


def test_two_judges_have_no_interval_and_no_note_on_any(tmp_path: Path) -> None:
    runs = [write_metrics(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        (run / "summary.json").write_text('{"held_out_pairs": 9, "held_out_digest": "a", "after": {"accuracy": 0.5}}')
    page, lines = write_comparison(runs)
    assert lines == ["Accuracy, two − one: +0.000, undecided"]
    assert "seeds of noise" not in text_of(page)


@pytest.mark.parametrize("epoch", [1, 2])
def test_no_difference_of_unequal_training_is_bold(tmp_path: Path, epoch: int) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for run, at, value in ((first, 2, 0.75), (second, epoch, 0.5)):
        write_metrics(run, {"kind": "evaluation", "epoch": at})
        write_evaluation(run, at, {prompt: value + prompt * value / 100 for prompt in range(8)})
    page, lines = write_comparison([first, second])
    assert ("epoch of the newest evaluation 2 / 1" in lines[0]) == (epoch != 2)
    assert ('class="sure"' in text_of(page)) == (epoch == 2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"evaluation": "{size: [192, 192]}"}, "evaluation.size.0 96 / 192"),
        ({"judge": "{checkpoint: other}"}, "judge.checkpoint tiny / other"),
        ({"rewards": "[{args: {ask: criteria}}]"}, "rewards.0.args.ask – / criteria"),
        ({"seed": 2}, "seed 1 / 2"),
    ],
)
def test_runs_that_are_evaluated_differently_have_no_verdict(
    tmp_path: Path, settings: dict[str, object], named: str
) -> None:
    shared: dict[str, object] = {"seed": 1, "evaluation": "{size: [96, 96]}", "judge": "{checkpoint: tiny}"}
    runs = [
        trained(tmp_path / str(value), lr=0.1, value=value, **(shared | changes))  # type: ignore[arg-type]
        for value, changes in ((0.5, {}), (0.75, settings))
    ]
    page, lines = write_comparison(runs)
    assert named in lines[0]
    assert named in text_of(page)
    assert 'class="verdict"' not in text_of(page)


def test_a_difference_below_the_shown_decimals_is_a_tie(tmp_path: Path) -> None:
    runs = [
        trained(tmp_path / f"{name}-{seed}", seed=seed, lr=lr, value=0.5 + rise * seed)
        for name, lr, rise in (("low", 0.1, 0.0), ("high", 0.2, 1e-6))
        for seed in RISES
    ]
    page, lines = write_comparison(runs)
    assert "+0.000, n = 3 seeds, higher in 0 of 3 seeds" in lines[0].replace(" (+0.000 to +0.000)", "")
    assert 'class="sure"' not in text_of(page)
    assert "e−0" not in text_of(page)


def test_configs_differ_by_dotted_keys_and_not_by_the_folder_of_a_run_s_own_files(tmp_path: Path) -> None:
    def run(out: str, text: str) -> RunFolder:
        folder = write_metrics(tmp_path / out)
        (folder / "config.yaml").write_text(f"out: {out}\n{text}")
        return read_run(folder)

    first = run("a", "seed: 1\nadapter: {rank: 4, alpha: 8}\nrewards: [{name: a}]\ntrain: a/train-0123abcd.jsonl")
    second = run("b", "seed: 2\nrewards: []\ntrain: b/train-0123abcd.jsonl\ntest: b/train-0123abce.jsonl")
    assert differing_keys(first, second) == [
        ("adapter.rank", "4", "–"),
        ("adapter.alpha", "8", "–"),
        ("rewards.0.name", "a", "–"),
        ("rewards", "–", "[]"),
        ("test", "–", "b/train-0123abce.jsonl"),
    ]


# --- seeds -----------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed_with_a_t_interval(seeds: list[Path]) -> None:
    page, lines = write_comparison([seeds[0], seeds[4], seeds[2], seeds[1], seeds[5], seeds[3]])
    assert page == seeds[0].parent / "compare-low-high.html"
    low, high = stats.t.interval(0.95, 2, 0.1875, stats.sem(list(RISES.values())))
    assert lines == [
        f"Consistency, high − low: +0.188 (+{low:.3f} to +{high:.3f}), n = 3 seeds, higher in 3 of 3 seeds",
        "Valid panels, high − low: +0.000, n = 3 seeds, higher in 0 of 3 seeds, undecided",
    ]
    text = text_of(page)
    assert lines[0] in text
    assert text.count('class="sure"') == 1
    assert re.findall(r'<td data-label="Before"> ?<b>([^<]*)<', text) == ["0.250", "1.000"]
    assert "Image 4 of 6, next to the median change</a>" in text, "the images are of all seeds"
    assert re.findall(r'<td data-label="Seed \d">([^<]*)<', text)[:3] == ["+0.125", "+0.188", "+0.250"]
    assert '<th scope="row">lr</th>' in text
    assert '<th scope="row">seed</th>' not in text
    assert "prompts.train" not in text, "a run's own files of one digest are no difference"


def test_two_seeds_have_counts_and_no_verdict(seeds: list[Path]) -> None:
    page, lines = write_comparison([*seeds[:2], *seeds[3:5]])
    assert lines[0] == "Consistency, high − low: +0.188, n = 2 seeds, higher in 2 of 2 seeds, undecided"
    assert 'class="sure"' not in text_of(page)


def test_settings_that_cannot_be_paired_are_refused(seeds: list[Path], tmp_path: Path) -> None:
    odd = trained(tmp_path / "odd", seed=4, lr=0.2, value=0.5, rank=8)
    twin = trained(tmp_path / "twin", seed=1, lr=0.1, value=0.5)
    nine = trained(tmp_path / "nine", seed=9, lr=0.2, value=0.5)
    cases = {"odd": [*seeds, odd], "1 settings": seeds[:3], "twin": [*seeds, twin], "1, 2 and 9": [*seeds[:2], nine]}
    for named, runs in cases.items():
        with pytest.raises(ValueError, match=named):
            write_comparison(runs)


def test_agreement_across_sets_is_compared_by_the_log(tmp_path: Path) -> None:
    runs = []
    for name, across in (("one", 0.25), ("two", 0.5)):
        epochs = [{"kind": "epoch", "epoch": epoch, "monitor/across": across * epoch} for epoch in range(4)]
        runs.append(write_metrics(tmp_path / name, *epochs, {"kind": "evaluation", "epoch": 4, "kappa": 0.5}))
    lines = write_comparison(runs)[1]
    assert lines == [
        "Agreement beyond chance (κ), two − one: +0.000, undecided",
        "Agreement across sets, in training, two − one: +0.750, undecided",
    ]


def test_the_table_of_t_is_complete() -> None:
    assert pytest.approx([float(stats.t.ppf(0.975, dof)) for dof in range(2, 18)], abs=6e-4) == list(T_975)
