"""ConsistencyRank end to end on a tiny folder in the published format."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from bench_examples import rank_example
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.core.ranking import order_of, rank_agreement
from pacorl.io.documents import read_jsonl
from pacorl.io.images import open_image
from pacorl.judge.local import LocalJudge
from pacorl.records.consistency_rank import load_ranked, save_ranked
from pacorl.types import Question

PLAIN = (
    "Do the two images maintain consistency in terms of style, logic and identity? "
    'Answer "Yes" and "No" first, and then provide detailed reasons.'
)


@pytest.fixture
def rank_folder(tmp_path: Path) -> Path:
    return rank_example(tmp_path)[0]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["benchmark", *[str(argument) for argument in arguments]])


NAMES = {
    "Accuracy": "accuracy",
    "Kendall τ (order lists)": "order_tau",
    "Spearman ρ (order lists)": "order_rho",
    "T1B1": "top1_bottom1",
}
"""Columns of the released evaluation → measures, which `tests/core/test_ranking.py` works by hand."""


def test_a_judge_ranks_as_it_would_if_asked_pair_by_pair(rank_folder: Path, tmp_path: Path, tiny: LocalJudge) -> None:
    done = command("consistency-rank", rank_folder, "--judge", "tiny", "--out", tmp_path / "run", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    rows = read_jsonl(rank_folder / "consistency_full_rank.jsonl")
    folder = rank_folder / "images"
    questions = [
        Question(
            (open_image(folder / row["folder"] / row["ref_image"]), open_image(folder / row["folder"] / name)), PLAIN
        )
        for row in rows
        for name in row["comp_images"]
    ]
    p_yes = [verdict.p_yes for verdict in tiny.verdicts(questions)]
    scores = [[p_yes[3 * row + index] or 0.0 for index in range(3)] for row in range(len(rows))]
    table = json.loads(done.stdout)["table"]
    (measured,) = table["rows"]  # three items are not the published data
    agreements = []
    for row, values in zip(rows, scores, strict=True):
        true = [row["comp_images"].index(name) for name in row["rank_images"]]
        agreements.append(rank_agreement(order_of(values), true))
    for name, measure in NAMES.items():
        mean = fmean(agreement[measure] for agreement in agreements)
        assert measured["values"][name]["mean"] == pytest.approx(mean, abs=1e-9), name
        assert (measured["values"][name]["low"], measured["values"][name]["high"]) == (None, None)  # of three folders
    assert measured["name"] == "tiny"
    stored = [row["scores"] for row in read_jsonl(tmp_path / "run" / "results.jsonl")]
    assert stored == [pytest.approx(expected, abs=1e-6) for expected in scores]


def test_what_is_written_is_read_back_equal(rank_folder: Path) -> None:
    items = load_ranked(rank_folder)
    save_ranked(items, rank_folder)
    assert load_ranked(rank_folder) == items


def test_a_broken_image_stops_the_run(rank_folder: Path, tmp_path: Path) -> None:
    (rank_folder / "images" / "0000" / "0_1.png").write_bytes(b"no image")
    done = command("consistency-rank", rank_folder, "--judge", "tiny", "--out", tmp_path / "run")
    assert "0_1.png: not an image of a known format" in str(done.exception)
