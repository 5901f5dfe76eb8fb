"""EditReward-Bench, VCReward-Bench and EditReward-Compass on tiny tables in their published forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from bench_data import cell, edit_reward_rows, write_parquet
from PIL import Image
from typer.testing import CliRunner

from pacorl.bench.benchmarks import BenchmarkOptions
from pacorl.bench.edit_reward_bench import DIMENSIONS, EditRewardBench, read_edit_data
from pacorl.bench.running import run
from pacorl.cli import app
from pacorl.dataset.convert import convert
from pacorl.gate.paco_reward import PacoReward
from pacorl.io.images import open_image
from pacorl.judge.local import LocalJudge
from pacorl.types import Question, Verdict


def scored_by_hand(rows: list[dict[str, Any]], judge: LocalJudge) -> dict[str, dict[str, float]]:
    """Output → dimension → score, one question after the other."""
    scores: dict[str, dict[str, float]] = {}
    for row in rows:
        before = open_image(row["input_image"]["bytes"])
        for key, output in zip(row["key"], row["output_images"], strict=True):
            after = open_image(output["bytes"]).resize(before.size)
            start = f"Given two images after an edit with instruction '{row['instruction']}', "
            texts = [
                start + "is the edit following the instruction well? Answer 'Yes' or 'No' only.",
                start + "do they maintain consistency in terms of style, logic and identity? "
                "Answer 'Yes' or 'No' only.",
            ]
            followed, consistent = (judge.verdicts([Question((before, after), text)])[0].p_yes or 0.0 for text in texts)
            scores[key] = {
                "prompt_following": followed,
                "consistency": consistent,
                "overall": sqrt(followed * consistent),
            }
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
    done = CliRunner().invoke(
        app,
        [
            "benchmark",
            "edit-reward-bench",
            str(edit_reward_folder),
            "--out",
            str(tmp_path / "run"),
            "--json",
            "--judge",
            "tiny",
        ],
    )
    assert done.exit_code == 0, (done.output, done.exception)
    rows = edit_reward_rows()
    scores = scored_by_hand(rows, judge)
    values = json.loads(done.stdout)["tables"][0]["rows"][0]["values"]
    for dimension, title in zip(DIMENSIONS, ("Prompt following", "Consistency", "Overall"), strict=True):
        assert values[title]["mean"] == pytest.approx(macro(rows, scores, dimension, ties=False))
        assert values[f"{title} (≥)"]["mean"] == pytest.approx(macro(rows, scores, dimension, ties=True))
    stored = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert [row["key"] for row in stored] == ["0_a", "0_b", "1_a", "1_b", "2_a", "2_b"]  # each output once
    for row in stored:
        assert row["prompt_following"] == pytest.approx(scores[row["key"]]["prompt_following"], abs=1e-5)


class Even:
    """Finds everything as good as everything else."""

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        return [Verdict(0.5) for _ in questions]

    def explain(self, question: Question) -> str:
        return "Yes."


def test_ties_are_wrong_strictly_and_right_otherwise(edit_reward_folder: Path, tmp_path: Path) -> None:
    bench = EditRewardBench(read_edit_data(edit_reward_folder), PacoReward(Even(), name="even"))
    cells = run(bench, tmp_path / "run", BenchmarkOptions(judge="even")).tables[0].lines[0].cells
    assert [cell.mean for cell in cells] == [0.0] * 3 + [1.0] * 3  # type: ignore[union-attr]


def test_a_limit_takes_rows_and_their_outputs(edit_reward_folder: Path) -> None:
    bench = EditRewardBench(read_edit_data(edit_reward_folder, limit=3), PacoReward(Even(), name="even"))
    assert [choice.number for choice in bench.data.items.values()] == [0, 3, 6]
    assert len(list(bench.texts())) == 6


# --- VCReward-Bench and EditReward-Compass -------------------------------------------------------------------------

COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200), (120, 120, 20))


def image(colour: tuple[int, int, int], size: int = 32) -> Image.Image:
    return Image.new("RGB", (size, size), colour)


def vc_rows() -> list[dict[str, Any]]:
    rows = []
    for number, colour in enumerate(COLOURS):
        task = ("color_alteration", "tone_transfer")[number % 2]
        rows.append(
            {
                "key": f"{task}_pair_{number}",
                "instruction": f"instruction {number}",
                "source_image": cell(image(colour), "in.png"),
                "edited_images": [cell(image(COLOURS[number - 1], 40), "a.png"), cell(image(colour, 40), "b.png")],
                "winner": ("Image A", "Image B")[number == 2],
                "task": task,
            }
        )
    return rows


def compass_rows(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for number, colour in enumerate(COLOURS):
        for name, shown in (("in", colour), ("a", COLOURS[number - 1]), ("b", colour)):
            image(shown).save(folder / f"{number}_{name}.png")
        for dimension in ("IA", "VC", "VQ"):
            row = {"source_image": f"{number}_in.png", "winner": f"{number}_a.png", "loser": f"{number}_b.png"}
            label = "tie" if number == 3 else "preference"
            rows.append(row | {"prompt": f"instruction {number}", "dimension": dimension, "label": label})
    (folder / "reward_eval.json").write_text(json.dumps(rows))
    return rows


def p_yes(judge: LocalJudge, before: Image.Image, after: Image.Image, instruction: str, about: str) -> float:
    asked = {
        "VC": "do they maintain consistency in terms of style, logic and identity? Answer 'Yes' or 'No' only.",
        "IA": "is the edit following the instruction well? Answer 'Yes' or 'No' only.",
    }[about]
    text = f"Given two images after an edit with instruction '{instruction}', {asked}"
    return judge.verdicts([Question((before, after.resize(before.size)), text)])[0].p_yes or 0.0


def values_of(data: Path, kind: str) -> dict[str, Any]:
    words = [
        "benchmark",
        kind,
        str(data),
        "--out",
        str(data.parent / "run"),
        "--json",
        "--judge",
        "tiny",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    values: dict[str, Any] = json.loads(done.stdout)["tables"][0]["rows"][0]["values"]
    return values


@pytest.mark.slow
def test_vc_reward_is_what_naive_loops_give(tmp_path: Path) -> None:
    rows = vc_rows()
    write_parquet(tmp_path / "bench" / "data" / "train-00000-of-00002.parquet", rows[:3])
    write_parquet(tmp_path / "bench" / "data" / "train-00001-of-00002.parquet", rows[3:])
    convert(tmp_path / "bench")
    values = values_of(tmp_path / "bench", "vc-reward-bench")

    judge = LocalJudge.from_pretrained("tiny", variants=True)
    right: dict[str, list[bool]] = {}
    for row in rows:
        before = open_image(row["source_image"]["bytes"])
        a, b = (
            p_yes(judge, before, open_image(edit["bytes"]), row["instruction"], "VC") for edit in row["edited_images"]
        )
        right.setdefault(row["task"], []).append(a > b if row["winner"] == "Image A" else b > a)
    every = [answer for answers in right.values() for answer in answers]
    assert values["Accuracy"]["mean"] == pytest.approx(sum(every) / 4)
    assert values["Mean over tasks"]["mean"] == pytest.approx(sum(sum(task) / len(task) for task in right.values()) / 2)


@pytest.mark.slow
def test_compass_is_what_naive_loops_give(tmp_path: Path) -> None:
    rows = compass_rows(tmp_path)
    values = values_of(tmp_path / "reward_eval.json", "edit-reward-compass")

    judge = LocalJudge.from_pretrained("tiny", variants=True)
    for dimension, column in (("IA", "Instruction awareness"), ("VC", "Visual consistency")):
        right = []
        for row in rows:
            if row["dimension"] == dimension:
                before = open_image(tmp_path / row["source_image"])
                a, b = (
                    p_yes(judge, before, open_image(tmp_path / row[name]), row["prompt"], dimension)
                    for name in ("winner", "loser")
                )
                right.append(abs(a - b) < 1e-5 if row["label"] == "tie" else a > b)
        assert values[column]["mean"] == pytest.approx(sum(right) / len(right))
    assert len(values) == 2, "no question is about visual quality"
