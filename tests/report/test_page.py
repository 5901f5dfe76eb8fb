"""The report page: complete where the run is, silent where it is not, harmless whatever the texts say."""

from __future__ import annotations

import re
import shlex
from itertools import product
from pathlib import Path

import pytest
import typer
from run_folder import EVIL, finished_run, json_lines, write_evaluation, write_metrics

from pacorl.cli import app
from pacorl.core.ranking import Interval
from pacorl.report.curves import charts
from pacorl.report.folder import Sample, read_run
from pacorl.report.page import next_command, write_report
from pacorl.report.results import compared, rows_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small finished run."""
    return finished_run(tmp_path / "run")


def _page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def test_page_has_every_part_of_a_finished_run_masks_keys_and_asks_for_nothing(run: Path) -> None:
    (run / "config.yaml").write_text("rewards:\n- args: {api_key: mine, url: 'http://me:pass@host/x'}\n")
    page = _page(run)
    ids = set(re.findall(r'\bid="([\w-]+)"', page))
    assert {"results", "gallery", "curves", "config", "set-1", "set-2"} <= ids
    assert {"It got better.", "+0.250", "0.750", "Image 2 of 2, next to the median change"} <= set(
        re.findall(r">([^<>]+?)\s*<", page)
    )
    assert "api_key: &#39;***&#39;" in page
    assert "me:pass" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href|srcset)=["'](?!data:|#)|@import|url\(""", page)


def test_texts_are_escaped(run: Path) -> None:
    write_evaluation(run, 3, {1: 0.9}, text=EVIL, theme=EVIL, scores={EVIL: 1.0})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json_lines({"kind": "epoch", "epoch": 2, f"reward/{EVIL}/mean": 1}))
    page = _page(run)
    assert "alert(" in page
    assert "<script>alert" not in page
    assert page.count("<script") == 1


def test_samples_of_an_evaluation_that_the_log_lacks_are_not_shown(run: Path) -> None:
    page = _page(run)
    write_evaluation(run, 1, {1: 0.5})
    write_evaluation(run, 9, {1: 0.99, 2: 0.99, 3: 0.99})
    assert _page(run) == page


def test_images_cannot_come_from_elsewhere(run: Path) -> None:
    write_evaluation(run, 4, {1: 0.5}, image="../../secret.png")
    with pytest.raises(ValueError, match=r"evaluation-000004\.jsonl:1: .*leads out of"):
        write_report(run)


# --- what was done, and what is next -----------------------------------------------------------------------------


POLICY = """\
model: {checkpoint: black-forest-labs/FLUX.1-dev}
objective: {name: grpo_clip}
prompts: {train: mine.jsonl}
judge: {checkpoint: runs/judge}
rewards: [{name: consistency}, {name: clip}]
"""


@pytest.mark.parametrize(
    ("config", "finished", "started"),
    [
        (POLICY, True, "pacorl generate --model black-forest-labs/FLUX.1-dev --adapter RUN/adapter"),
        (
            POLICY.replace("model: {", "model: {kind: 'mine.py:PAINTER', "),
            True,
            "pacorl generate --model black-forest-labs/FLUX.1-dev --kind mine.py:PAINTER",
        ),
        (POLICY, False, "pacorl train-policy RUN/config.yaml --resume auto"),
        ("character: characters/hero\n", False, "pacorl train-character characters/hero --config RUN/config.yaml"),
        ("model: {checkpoint: tiny}\ndata: {train: [a.json]}\n", True, "pacorl calibrate RUN/adapter OTHER_PAIRS"),
        ("lr: 0.001\n", True, ""),
    ],
)
def test_a_page_ends_with_a_next_command_that_exists(run: Path, config: str, finished: bool, started: str) -> None:
    (run / "config.yaml").write_text(config)
    if not finished:
        (run / "summary.json").unlink()
    command = next_command(read_run(run))
    assert command.startswith(started.replace("RUN", str(run)))
    assert (f'<pre tabindex="0">{command}</pre>' in _page(run)) == bool(command)
    if command:
        name, *words = shlex.split(command)[1:]
        typer.main.get_command(app).commands[name].make_context(name, words)


# --- curves ----------------------------------------------------------------------------------------------------


def test_alarms_are_in_the_order_of_their_first_time(tmp_path: Path) -> None:
    raised = {2: ["diversity"], 3: ["duplicates", "diversity"], 5: ["across"]}
    records = []
    for epoch in range(1, 7):
        alarms_of = {f"alarm/{name}": 1.0 for name in raised.get(epoch, [])}
        records.append({"kind": "epoch", "epoch": epoch, "loss": 1.0, **alarms_of})
    found = read_run(write_metrics(tmp_path, *records)).alarms
    assert [alarm.epoch for alarm in found] == [2, 3, 5]


def test_more_seeds_of_a_prompt_do_not_narrow_an_interval() -> None:
    """A prompt's seeds are not independent: copies of each image show nothing new."""
    gains = [0.1, -0.2, 0.3, 0.05, -0.1, 0.2, 0.0, 0.15, -0.05, 0.25]

    def difference(seeds: int) -> Interval:
        pairs = []
        for (prompt, gain), seed in product(enumerate(gains), range(seeds)):
            sides = ({"prompt_id": prompt, "seed": seed, "image": "", "scores": {"fit": 0.5 + g}} for g in (0, gain))
            pairs.append(tuple(map(Sample.model_validate, sides)))
        return compared(pairs)[0].difference

    one, many = difference(1), difference(8)
    assert (one.groups, many.groups) == (10, 10)
    assert one.low is not None
    assert (many.low, many.high) == (pytest.approx(one.low), pytest.approx(one.high))


# --- pieces ----------------------------------------------------------------------------------------------------


def test_images_without_a_score_are_counted(tmp_path: Path) -> None:
    run = write_metrics(tmp_path, *({"kind": "evaluation", "epoch": epoch} for epoch in (0, 2)))
    write_evaluation(run, 0, {1: 0.25, 2: 0.25, 3: 0.25}, scores={"fit": 0.5})
    write_evaluation(run, 2, {1: 0.5, 2: 0.5, 3: 0.5}, scores={"fit": 0.5})
    assert "no score" not in _page(run)
    path = run / "samples" / "evaluation-000002.jsonl"
    path.write_text(path.read_text().replace('"fit": 0.5', '"fit": NaN', 1).replace("NaN", "null"))
    assert {row.name: row.unscored for row in rows_of(read_run(run))} == {"p_yes": 0, "fit": 1}
    assert "<small>n = 2</small><small>1 image has no score</small>" in _page(run)


def test_one_name_stands_for_one_number(tmp_path: Path) -> None:
    """A log's `consistency` is the reward, its `p_yes` the judge's P(Yes)."""
    records = [{"kind": "evaluation", "epoch": e, "consistency": 0.9, "p_yes": 0.25, "loss": 7} for e in (0, 1)]
    epoch = {"kind": "epoch", "epoch": 0, "reward/consistency/mean": 0.8}
    run = write_metrics(tmp_path / "run", *records, epoch)
    for number in (0, 1):
        write_evaluation(run, number, {1: 0.25, 2: 0.25}, scores={"consistency": 0.9})
    drawn = {chart.title: list(chart.lines) for chart in charts(read_run(run))}
    assert drawn["Evaluation"] == ["Consistency", "Consistency, as rewarded"]
    assert drawn["Held-out loss"] == ["Loss"]
    assert drawn["Reward of training samples"] == ["Consistency, as rewarded"]
    measures = {result.name: result.after.mean for result in rows_of(read_run(run)) if result.after}
    assert measures == {"p_yes": 0.25, "consistency": 0.9}


def test_the_plain_reward_is_one_line_with_the_judge_s_p_yes(tmp_path: Path) -> None:
    """As by default; if it has no score where some pairs were judged, both are shown."""
    records = [{"kind": "evaluation", "epoch": e, "consistency": 0.25, "p_yes": 0.25} for e in (0, 1)]
    run = write_metrics(tmp_path / "run", *records)
    for number in (0, 1):
        write_evaluation(run, number, {1: 0.25, 2: 0.25}, scores={"consistency": 0.25 + 1e-9})
    page = _page(run)
    assert "as rewarded" not in page
    assert "Images on each side: 2. Prompts: 2." in page
    assert [list(chart.lines) for chart in charts(read_run(run))] == [["Consistency"]]
    path = run / "samples" / "evaluation-000001.jsonl"
    path.write_text(path.read_text().replace('"consistency": 0.25', '"consistency": null, "x": 0.25', 1))
    assert [row.name for row in rows_of(read_run(run))][:2] == ["p_yes", "consistency"]


@pytest.mark.parametrize("last", [{1: 0.35, 2: 0.5, 3: 0.15}, {1: 0.2, 2: 0.6}])
def test_a_page_opens_on_the_median_change(run: Path, last: dict[int, float]) -> None:
    """Of two middle ones on the lower one, which is not called the median."""
    write_evaluation(run, 5, last)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json_lines({"kind": "evaluation", "epoch": 5}))
    page = _page(run)
    headline = page[page.index('<header class="headline') : page.index("</header>")]
    assert (", the median change" in headline) == (len(last) % 2 == 1)
    assert f"After <b>{last[2 if len(last) % 2 else 1]:.3f}</b>" in " ".join(headline.split())
    assert headline.count("<img") == 2
