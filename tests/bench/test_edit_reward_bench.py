"""EditReward-Bench, VCReward-Bench and EditReward-Compass on tiny tables in their published forms."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from asked import Asked
from bench_examples import edit_reward_example
from typer.testing import CliRunner

from pacorl.bench.edit_reward_bench import DIMENSIONS, EditRewardBench, EditRewardCompass
from pacorl.bench.options import BenchmarkOptions
from pacorl.bench.running import run
from pacorl.cli import app
from pacorl.gate.paco_reward import PacoReward
from pacorl.io.documents import read_jsonl, write_jsonl
from pacorl.io.images import open_image
from pacorl.judge.local import LocalJudge
from pacorl.types import Question


@pytest.fixture
def edit_reward_folder(tmp_path: Path) -> Path:
    return edit_reward_example(tmp_path)[0].parent


def scored_by_hand(rows: list[dict[str, Any]], folder: Path, judge: LocalJudge) -> dict[str, dict[str, float]]:
    """Output → dimension → score, one question after the other."""
    scores: dict[str, dict[str, float]] = {}
    for row in rows:
        before = open_image(folder / row["input_image"])
        for key, output in zip(row["key"], row["output_images"], strict=True):
            after = open_image(folder / output)
            start = f"Given two images after an edit with instruction '{row['instruction']}', "
            texts = [
                start + "is the edit following the instruction well? Answer 'Yes' or 'No' only.",
                start + "do they maintain consistency in terms of style, logic and identity? "
                "Answer 'Yes' or 'No' only.",
            ]
            followed, consistent = (judge.verdicts([Question((before, after), text)])[0].p_yes or 0.0 for text in texts)
            scores[key] = dict(zip(DIMENSIONS, (followed, consistent, sqrt(followed * consistent)), strict=True))
    return scores


def macro(rows: list[dict[str, Any]], scores: dict[str, dict[str, float]], dimension: str, *, ties: bool) -> float:
    shares = []
    for task in {row["task_type"] for row in rows}:
        pairs = [
            tuple(scores[key][dimension] for key in row["key"])
            for row in rows
            if row["task_type"] == task and row["dimension"] == dimension
        ]
        shares.append(sum(a >= b if ties else a > b for a, b in pairs) / len(pairs))
    return sum(shares) / len(shares)


@pytest.mark.slow
def test_the_table_is_what_naive_loops_give(edit_reward_folder: Path, tmp_path: Path) -> None:
    judge = LocalJudge.from_pretrained("tiny", variants=True)
    words = ["benchmark", "edit-reward-bench", str(edit_reward_folder), "--json", "--judge", "tiny"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = read_jsonl(edit_reward_folder / "rows.jsonl")
    scores = scored_by_hand(rows, edit_reward_folder, judge)
    values = json.loads(done.stdout)["table"]["rows"][0]["values"]
    for dimension, title in zip(DIMENSIONS, ("Prompt following", "Consistency", "Overall"), strict=True):
        assert values[title]["mean"] == pytest.approx(macro(rows, scores, dimension, ties=False))
        assert values[f"{title} (≥)"]["mean"] == pytest.approx(macro(rows, scores, dimension, ties=True))


def test_ties_are_wrong_strictly_and_right_otherwise(edit_reward_folder: Path, tmp_path: Path) -> None:
    bench = EditRewardBench(edit_reward_folder, BenchmarkOptions(judge="even", out=tmp_path / "run"))
    cells = run(bench, PacoReward(Asked(lambda question: 0.5))).table.lines[0].cells
    assert [cell.mean for cell in cells] == [0.0] * 3 + [1.0] * 3  # type: ignore[union-attr]
    assert {cell.groups for cell in cells} == {1}, "all rows have one instruction"  # type: ignore[union-attr]


# --- VCReward-Bench and EditReward-Compass -------------------------------------------------------------------------

COMPASS = {"source_image": "in.png", "winner": "a.png", "loser": "b.png", "prompt": "Paint it."}


def test_of_a_tie_only_equal_scores_are_right(tmp_path: Path) -> None:
    rows = [COMPASS | {"dimension": "VC", "label": label} for label in ("tie", "preference")]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    bench = EditRewardCompass(tmp_path, BenchmarkOptions())
    scored = [{"key": key, "consistency": 0.5} for key in bench.texts()]
    assert [figure.mean for figure in bench.figures(scored)][1] == 0.5
