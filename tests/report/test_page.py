"""The report page: complete where the run is, silent where it is not, harmless whatever the texts say."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from run_folder import EVIL, finished_run, json_lines, write_evaluation, write_metrics

from pacorl.core.ranking import Interval
from pacorl.report.curves import BUCKETS, Chart, charts, thinned
from pacorl.report.figures import (
    DARK_RAMP,
    LIGHT_RAMP,
    colour,
    data_url,
    luminance,
    readable_on,
    show,
)
from pacorl.report.folder import Sample, read_run
from pacorl.report.page import choose, match, spread, write_report
from pacorl.report.results import Result, alarms, compared, rows_of


class Elements(HTMLParser):
    """Collects every (tag, attributes) of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small finished run."""
    return finished_run(tmp_path / "run")


def _page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def test_page_has_every_part_of_a_finished_run(run: Path) -> None:
    page = _page(run)
    ids = {attributes.get("id") for _, attributes in Elements(page).elements}
    assert {"results", "gallery", "samples", "curves", "time", "config", "set-1-7", "set-2-7"} <= ids
    assert {"It got better.", "+0.250", "0.750", "1 min 30 s", "Largest gain"} <= set(
        re.findall(r">([^<>]+?)\s*<", page)
    )


def test_texts_are_escaped(run: Path) -> None:
    write_evaluation(run, 3, {1: 0.9}, text=EVIL, theme=EVIL, scores={EVIL: 1.0})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json_lines({"kind": "epoch", "epoch": 2, EVIL: 3, f"reward/{EVIL}/cv": 1, "reward/b/cv": 2}))
    page = _page(run)
    assert "alert(" in page
    assert "<script>alert" not in page
    assert [tag for tag, _ in Elements(page).elements].count("script") == 1


def test_page_asks_for_nothing(run: Path) -> None:
    page = _page(run)
    assert not re.search(r"https?://|@import|url\(", page)
    elements = Elements(page).elements
    sources = [
        value or ""
        for _, attributes in elements
        for name, value in attributes.items()
        if name in {"src", "href", "srcset"}
    ]
    assert sources
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert any(
        "default-src 'none'" in (attributes.get("content") or "") for tag, attributes in elements if tag == "meta"
    )


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run between two evaluations, two epochs of five in, without a summary."""
    seconds = {"seconds/rollout": 6.0, "seconds/reward": 1.0, "seconds/update": 3.0, "seconds/hidden_reward": 5.0}
    epoch = {"kind": "epoch", "monitor/blank": 0.0, "clip_fraction": 0.5, "grad_norm": 1.0, "judge/requests": 24.0}
    evaluation = {"kind": "evaluation", "held_out/ocr": 0.5, "monitor/blank": 0.0}
    folder = write_metrics(
        tmp_path / "running",
        evaluation | {"epoch": 0, "seconds/evaluation": 2.0},
        epoch | seconds | {"epoch": 1, "ratio_deviation/1": 0.0, "samples/missing": 0.0},
        epoch | seconds | {"epoch": 2, "alarm/blank": 1.0, "samples/missing": 0.25},
        evaluation | {"epoch": 2, "seconds/evaluation": 2.0, "held_out/ocr": 0.2, "alarm/held_out/ocr": 1.0},
    )
    write_evaluation(folder, 0, {1: 0.25, 2: 0.5, 3: 0.75}, scores={"fit": 0.25}, held_out={"ocr": 0.5})
    write_evaluation(folder, 2, {1: 0.875, 2: 0.5, 3: 0.75}, scores={"fit": 0.75}, held_out={"ocr": 0.25})
    (folder / "config.yaml").write_text("out: x\nepochs: 5\n")
    return folder


def test_a_page_shows_the_config_without_its_keys(running: Path) -> None:
    config = running / "config.yaml"
    config.write_text("epochs: 5\nrewards:\n- name: http\n  args: {api_key: mine, url: 'http://me:pass@host/x'}\n")
    page = write_report(running).read_text()
    assert "api_key: &#39;***&#39;" in page
    assert "mine" not in page
    assert "me:pass" not in page
    assert "<dt>of 5 epochs</dt>" in page
    assert "api_key: mine" in config.read_text()


def test_without_a_summary_the_images_themselves_are_compared(running: Path) -> None:
    compared_scores = {result.name: result for result in compared(read_run(running).samples)}
    assert set(compared_scores) == {"consistency", "fit", "held_out/ocr"}
    fit, ocr = compared_scores["fit"], compared_scores["held_out/ocr"]
    assert (fit.before.mean, fit.after.mean, fit.difference.mean) == (0.25, 0.75, 0.5)
    assert ocr.difference.mean == -0.25
    assert "Held out · ocr" in write_report(running).read_text()
    (running / "samples" / "evaluation-000002.jsonl").unlink()
    assert compared(read_run(running).samples) == []


def test_rebuilding_gives_the_same_page(run: Path) -> None:
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    assert sorted(path.name for path in run.glob("report*")) == ["report.html"]


def append_line(run: Path, line: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json_lines(line))


def test_samples_of_an_evaluation_that_the_log_lacks_are_not_shown(run: Path) -> None:
    page = _page(run)
    write_evaluation(run, 1, {1: 0.5})
    write_evaluation(run, 9, {1: 0.99, 2: 0.99, 3: 0.99})
    assert _page(run) == page


@pytest.mark.parametrize(("calibration", "said"), [("''", True), ("judge.json", False)])
def test_a_page_says_that_its_judge_is_uncalibrated(calibration: str, said: bool, run: Path) -> None:
    (run / "config.yaml").write_text(f"judge:\n  checkpoint: tiny\n  calibration: {calibration}\n")
    assert ("uncalibrated" in write_report(run).read_text()) == said


def test_a_line_being_written_is_left_for_later(run: Path) -> None:
    whole = len(read_run(run).epochs)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "epo')
    assert len(read_run(run).epochs) == whole


@pytest.mark.parametrize("image", ["../../secret.png", "/etc/secret.png"])
def test_images_cannot_come_from_elsewhere(run: Path, image: str) -> None:
    write_evaluation(run, 4, {1: 0.5}, image=image)
    with pytest.raises(ValueError, match=r"evaluation-000004\.jsonl:1: .*leads out of"):
        write_report(run)


# --- curves ----------------------------------------------------------------------------------------------------


def _charts(tmp_path: Path, *records: dict[str, Any]) -> dict[str, list[Chart]]:
    return charts(read_run(write_metrics(tmp_path, *records)))


def test_series_are_grouped_and_unknown_ones_come_last(tmp_path: Path) -> None:
    record = {"kind": "epoch", "epoch": 1, "step": 4, "new_thing": 2, "loss": 1, "seconds/rollout": 3, "note": "x"}
    record |= {"seconds/update": 1, "reward/fit/mean": 0.5, "reward/fit/std": 0.25, "reward/fit/cv": 0.5, "flag": True}
    groups = _charts(tmp_path, record | {"ratio_deviation/3": 0.0}, {"kind": "evaluation", "epoch": 1, "valid": 1})
    titles = {group: [chart.title for chart in drawn] for group, drawn in groups.items()}
    assert titles == {
        "Rewards in training": ["Fit", "Spread of rewards (std ÷ mean)"],
        "Evaluation": ["Valid panels"],
        "Training health": ["Loss", "Ratio − 1 before the first update, by step"],
        "Time": ["Seconds per epoch"],
        "More": ["New thing"],
    }
    assert [line.label for line in groups["Time"][0].lines] == ["Rollout", "Update"]
    assert groups["Rewards in training"][0].band == [(1.0, 0.25, 0.75)]


def test_a_value_that_is_not_finite_breaks_its_line(tmp_path: Path) -> None:
    records = [{"kind": "epoch", "epoch": e, "loss": value} for e, value in enumerate([1.0, 2.0, None, 3.0])]
    run = write_metrics(tmp_path, *records)
    assert charts(read_run(run))["Training health"][0].lines[0].points[2] == (2.0, None)
    assert _page(run).count("<polyline") == 2


def test_thinning_keeps_the_ends_and_the_spikes() -> None:
    points: list[tuple[float, float | None]] = [(float(epoch), 0.0) for epoch in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[4330] = (4330.0, -9.0)
    points[7777] = (7777.0, None)
    points_left = thinned(points)
    assert len(points_left) <= 2 * BUCKETS + 2
    assert points_left[0] == points[0]
    assert points_left[-1] == points[-1]
    assert {(4321.0, 9.0), (4330.0, -9.0)} <= set(points_left)


def test_alarms_are_in_the_order_of_their_first_time(tmp_path: Path) -> None:
    raised = {2: ["diversity"], 3: ["duplicates", "diversity"], 5: ["blank"]}
    records = []
    for epoch in range(1, 7):
        alarms_of = {f"alarm/{name}": 1.0 for name in raised.get(epoch, [])}
        records.append({"kind": "epoch", "epoch": epoch, "loss": 1.0, **alarms_of})
    found = alarms(read_run(write_metrics(tmp_path, *records)))
    assert [(alarm.first, alarm.last, alarm.times) for alarm in found] == [(2, 3, 2), (3, 3, 1), (5, 5, 1)]


def test_more_seeds_of_a_prompt_do_not_narrow_an_interval(tmp_path: Path) -> None:
    """A prompt's seeds are not independent: copies of each image show nothing new."""
    gains = [0.1, -0.2, 0.3, 0.05, -0.1, 0.2, 0.0, 0.15, -0.05, 0.25]

    def difference(seeds: int) -> Interval:
        sides: dict[int, list[Sample]] = {0: [], 1: []}
        for prompt, gain in enumerate(gains):
            for seed in range(seeds):
                sides[0].append(Sample(prompt, seed, tmp_path, scores={"panel_match": 0.5}))
                sides[1].append(Sample(prompt, seed, tmp_path, scores={"panel_match": 0.5 + gain}))
        (row,) = compared(sides)
        assert row.difference
        return row.difference

    one, many = difference(1), difference(8)
    assert (one.groups, many.groups) == (10, 10)
    assert one.low is not None
    assert (many.low, many.high) == (pytest.approx(one.low), pytest.approx(one.high))


# --- gallery ---------------------------------------------------------------------------------------------------


def _sample(prompt: int, p_yes: float | None, tmp_path: Path) -> Sample:
    image = tmp_path / "grid.png"
    Image.new("RGB", (8, 8)).save(image)
    return Sample(prompt_id=prompt, seed=0, image=image, p_yes=((None, p_yes), (p_yes, None)))


def test_gallery_takes_evenly_spread_changes_and_names_them(tmp_path: Path) -> None:
    before = [_sample(prompt, 0.5, tmp_path) for prompt in range(9)]
    after = [_sample(prompt, (prompt + 1) / 10, tmp_path) for prompt in range(9)]
    pairs, unmatched = match({0: before, 5: [], 9: after})
    rows = choose(pairs, count=3)
    assert unmatched == 0
    assert [row.pair.before.prompt_id for row in rows] == [8, 4, 0]
    assert [row.rank for row in rows] == ["Largest gain", "Median change", "Largest loss"]


def test_unjudged_pairs_come_last(tmp_path: Path) -> None:
    before = [_sample(prompt, 0.5, tmp_path) for prompt in (1, 2, 3)]
    after = [_sample(1, None, tmp_path), _sample(2, 0.25, tmp_path), _sample(3, 0.75, tmp_path)]
    pairs, _ = match({0: before, 1: after})
    assert [pair.before.prompt_id for pair in pairs] == [3, 2, 1]
    assert [pair.change for pair in pairs] == [0.25, -0.25, None]


def test_spread_holds_both_ends_and_no_index_twice() -> None:
    assert spread(48, count=5) == [0, 12, 24, 35, 47]
    assert spread(3, count=15) == [0, 1, 2]
    assert spread(0, count=15) == []


# --- pieces ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ramp", [LIGHT_RAMP, DARK_RAMP])
def test_numbers_can_be_read_on_every_cell(ramp: tuple[tuple[int, int, int], ...]) -> None:
    for step in range(101):
        background = colour(ramp, step / 100)
        levels = sorted((luminance(background), 0.0 if readable_on(background) == "#000" else 1.0))
        assert (levels[1] + 0.05) / (levels[0] + 0.05) >= 4.5


def test_small_images_stay_exact_and_large_ones_become_light() -> None:
    noise = Image.effect_noise((1400, 1400), 100).convert("RGB")
    assert data_url(Image.new("RGB", (128, 128))).startswith("data:image/png;base64,")
    assert len(data_url(noise)) < 220_000
    small = show(Image.new("RGB", (128, 128)))
    assert (small.width, small.height, small.pixel_art) == (384, 384, True)
    assert (show(noise).width, show(noise).pixel_art) == (384, False)
    assert show(Image.new("RGB", (1500, 300))).wide


def test_a_difference_is_sure_if_its_interval_excludes_zero() -> None:
    def sure(difference: Interval | None) -> bool:
        return Result("fit", None, None, difference).sure

    assert sure(Interval(0.2, 0.1, 0.3))
    assert sure(Interval(-0.2, -0.3, -0.1))
    assert not any(map(sure, (Interval(0.2, -0.1, 0.5), Interval(0.2), None)))


@pytest.mark.parametrize("count", [7, 8])
def test_few_prompts_have_no_interval(tmp_path: Path, count: int) -> None:
    run = write_metrics(tmp_path, *({"kind": "evaluation", "epoch": epoch, "step": epoch} for epoch in (0, 2)))
    write_evaluation(run, 0, dict.fromkeys(range(count), 0.25))
    write_evaluation(run, 2, dict.fromkeys(range(count), 0.5))

    (change,) = (row.difference for row in rows_of(read_run(run)) if row.name == "consistency")
    assert change == Interval(0.25, *((0.25, 0.25) if count == 8 else (None, None)), count)
    table = write_report(run).read_text("utf-8").partition('<section id="results">')[2].partition("</section>")[0]
    text = " ".join(table.split())
    assert ('class="sure"' in table) == (count == 8)
    assert f"<small>n = {count}</small>" in table
    assert "Before<small>before training (epoch 0)</small>" in text
    assert "After<small>after epoch 2</small>" in text


def test_images_without_a_score_are_counted(tmp_path: Path) -> None:
    run = write_metrics(tmp_path, *({"kind": "evaluation", "epoch": epoch} for epoch in (0, 2)))
    write_evaluation(run, 0, {1: 0.25, 2: 0.25, 3: 0.25}, scores={"fit": 0.5})
    write_evaluation(run, 2, {1: 0.5, 2: 0.5, 3: 0.5}, scores={"fit": 0.5})
    assert "no score" not in _page(run)
    path = run / "samples" / "evaluation-000002.jsonl"
    path.write_text(path.read_text().replace('"fit": 0.5', '"fit": NaN', 1).replace("NaN", "null"))
    assert {row.name: row.unscored for row in compared(read_run(run).samples)} == {"consistency": 0, "fit": 1}
    assert "<small>n = 2</small><small>1 image has no score</small>" in _page(run)


def test_one_name_stands_for_one_number(tmp_path: Path) -> None:
    """A log's `consistency` is the reward, a summary's the judge's P(Yes)."""
    records = [{"kind": "evaluation", "epoch": e, "consistency": 0.9, "p_yes": 0.25} for e in (0, 1)]
    epoch = {"kind": "epoch", "epoch": 0, "reward/consistency/mean": 0.8}
    run = write_metrics(tmp_path / "run", *records, epoch)
    for number in (0, 1):
        write_evaluation(run, number, {1: 0.25, 2: 0.25}, scores={"consistency": 0.9})
    groups = charts(read_run(run))
    ends = {chart.title: chart.ends for chart in groups["Evaluation"]}
    assert ends == {"Consistency": "0.250 → 0.250", "Consistency, as rewarded": "0.900 → 0.900"}
    assert [chart.title for chart in groups["Rewards in training"]] == ["Consistency, as rewarded"]
    measures = {result.name: result.after.mean for result in compared(read_run(run).samples) if result.after}
    assert measures == {"consistency": 0.25, "consistency_reward": 0.9}


def test_a_reward_that_is_p_yes_itself_is_shown_once(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "run", {"kind": "evaluation", "epoch": 0, "consistency": 0.5, "p_yes": 0.5 + 1e-9})
    assert [chart.title for chart in charts(read_run(run))["Evaluation"]] == ["Consistency"]


def test_a_page_opens_on_the_median_change(run: Path) -> None:
    write_evaluation(run, 5, {1: 0.35, 2: 0.5, 3: 0.15})
    append_line(run, {"kind": "evaluation", "epoch": 5})
    page = _page(run)
    headline = page[page.index('<header class="headline') : page.index("</header>")]
    assert "Median change" in headline
    assert 'href="#set-2-7"' in headline
    assert headline.count("<img") == 2
