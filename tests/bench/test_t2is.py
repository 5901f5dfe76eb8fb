"""T2IS-Bench end to end: painted by the tiny generator, judged by the tiny judge; and the paper's average."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from pacorl.bench import t2is
from pacorl.bench.run import run
from pacorl.bench.scorers import JudgeTexts, RewardTexts
from pacorl.bench.t2is import TAB_3, T2isBench, average, prompts_by_case, read_cases
from pacorl.bench.table import BenchmarkOptions
from pacorl.cli.benchmark import app
from pacorl.cli.shared import INCOMPLETE
from pacorl.core.ranking import Interval
from pacorl.data.characters import character_prompts
from pacorl.data.leaks import trained_on
from pacorl.io.documents import read_jsonl
from pacorl.io.images import open_image
from pacorl.judges.local import LocalJudge
from pacorl.rewards.jpeg import JpegSize
from pacorl.score.reward import PacoReward
from pacorl.types import Question, Verdict


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["t2is", *[str(argument) for argument in arguments]])


@pytest.mark.parametrize("name", TAB_3.rows)
def test_the_ten_published_averages_are_reproduced(name: str) -> None:
    aesthetics, *parts, published = TAB_3.rows[name]
    assert round(average(aesthetics, parts[:3], parts[3:]), 3) == pytest.approx(published, abs=0.0011)


def by_hand(folder: Path, images: Path, judge: LocalJudge) -> dict[str, Any]:
    """Alignment and consistency from one question at a time."""
    criteria = json.loads((folder / "prompt_consistency.json").read_text())
    texts = json.loads((folder / "prompt_alignment.json").read_text())

    def p(*pictures: Image.Image, text: str) -> float:
        return judge.verdicts([Question(pictures, text)])[0].p_yes or 0.0

    cases: dict[str, dict[str, float]] = {}
    aligned: dict[str, list[float]] = {}
    for case, held in criteria.items():
        pictures = [open_image(images / f"{case}_{number:04d}.png") for number in range(1, 5)]
        small = [picture.resize((512, 512)) for picture in pictures]
        for dimension, named in held.items():
            question = "Do images meet the following criteria? {} Please answer Yes or No."
            values = [
                np.mean([p(*pair, text=question.format(text)) for pair in combinations(small, 2)])
                for text in named[0].values()
            ]
            cases.setdefault(dimension, {})[case] = float(np.mean(values))
        for picture, wanted in zip(pictures, texts[case].values(), strict=True):
            for dimension, several in wanted.items():
                shown = [
                    p(picture, text=f'Does this figure show "{text}"? Please answer yes or no.') for text in several
                ]
                aligned.setdefault(dimension, []).extend([float(np.mean(shown))] if shown else [])
    return {"consistency": cases, "alignment": {name: float(np.mean(values)) for name, values in aligned.items()}}


def test_painted_judged_and_averaged(t2is_folder: Path, tmp_path: Path, tiny: LocalJudge) -> None:
    arguments = (
        t2is_folder, "--model", "tiny", "--steps", 2, "--out", tmp_path / "run", "--aesthetics", "jpeg_size",
        "--aesthetics-scale", 0.5, "--json", "--limit", 3,
    )  # fmt: skip
    done = command(*arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    images = tmp_path / "run" / "images"
    assert sorted(path.name for path in images.iterdir())[:2] == ["0001_0001_0001.png", "0001_0001_0002.png"]
    values = json.loads(done.stdout)["tables"][0]["rows"][0]["values"]
    found = by_hand(t2is_folder, images, tiny)
    for dimension in ("Identity", "Style", "Logic"):
        mean = np.mean(list(found["consistency"][dimension].values()))
        assert values[dimension]["mean"] == pytest.approx(mean, abs=1e-5)
        assert values[f"{dimension}, all cases"]["mean"] == pytest.approx(mean, abs=1e-5)
    for dimension, mean in found["alignment"].items():
        assert values[dimension]["mean"] == pytest.approx(mean, abs=1e-5)
    parts = [[values[name]["mean"] for name in names] for names in (t2is.ALIGNED, t2is.CONSISTENT)]
    weighted = 0.2 * values["Aesthetics"]["mean"] + 0.3 * np.mean(parts[0]) + 0.5 * np.mean(parts[1])
    assert values["Average"]["mean"] == pytest.approx(weighted)

    painted = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.png")}
    assert command(*arguments).stdout == done.stdout  # nothing is painted or judged again
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.png")} == painted


class Counted:
    """P(Yes) by the question: 0 for Style, .5 for all else."""

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        return [Verdict(0.0 if "palette" in question.text.lower() else 0.5) for question in questions]

    def explain(self, question: Question) -> str:
        return ""


def finished(folder: Path, images: Path) -> Path:
    images.mkdir(exist_ok=True)
    for case in read_cases(folder).items.values():
        for number in range(1, len(case.captions) + 1):
            Image.new("RGB", (16, 16), (60 * number, 0, 0)).save(images / f"{case.id}_{number:04d}.png")
    return images


def bench_over(folder: Path, images: Path, **options: Any) -> T2isBench:
    judge = PacoReward(Counted(), name="counted")
    defaults: dict[str, Any] = {"alignment": JudgeTexts(judge), "made_by": {"images": str(images)}}
    return T2isBench(read_cases(folder), images, judge=judge, **(defaults | options))


def test_zero_valued_cases_are_left_out_as_released_and_kept_beside(t2is_folder: Path, tmp_path: Path) -> None:
    path = t2is_folder / "prompt_consistency.json"
    held = json.loads(path.read_text())
    first = next(iter(held))
    held[first]["Style"] = [{"Palette": "One palette."}]  # judged 0
    for other in list(held)[1:]:
        held[other]["Style"] = [{"Line": "One kind of line."}]  # judged .5
    path.write_text(json.dumps(held))
    bench = bench_over(t2is_folder, finished(t2is_folder, tmp_path / "images"))
    (line, *_) = run(bench, tmp_path / "run", BenchmarkOptions(name="here")).tables[0].lines
    cells = dict(zip(bench.columns, line.cells, strict=True))
    assert _mean(cells["Style"]) == 0.5
    assert _mean(cells["Style, all cases"]) == pytest.approx(1 / 3)
    assert _mean(cells["Average"]) != _mean(cells["Average"])  # no aesthetics, so no average


def _mean(value: Interval | float | None) -> float:
    assert isinstance(value, Interval)
    return value.mean


def test_pictures_of_others_and_no_alignment(t2is_folder: Path, tmp_path: Path) -> None:
    images = finished(t2is_folder, tmp_path / "images")
    aesthetics = RewardTexts(JpegSize(), "jpeg_size")
    bench = bench_over(t2is_folder, images, alignment=None, aesthetics=aesthetics)
    (line, *_) = run(bench, tmp_path / "run", BenchmarkOptions(name="here")).tables[0].lines
    cells = dict(zip(bench.columns, line.cells, strict=True))
    assert _mean(cells["Entity"]) != _mean(cells["Entity"])
    assert _mean(cells["Identity"]) == 0.5


def test_a_missing_picture_is_named(t2is_folder: Path, tmp_path: Path) -> None:
    images = finished(t2is_folder, tmp_path / "images")
    (images / "0002_0001_0003.png").unlink()
    done = command(t2is_folder, "--images", images, "--alignment", "none", "--out", tmp_path / "run")
    assert "0002_0001_0003.png is missing" in str(done.exception)
    done = command(t2is_folder, "--images", images, "--alignment", "none", "--out", tmp_path / "run", "--skip-bad")
    assert done.exit_code == INCOMPLETE
    assert "1 items left out, unusable, such as 0002_0001" in done.stdout


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        ("T2IS-Bench.json", lambda held: held.update(output_image_count=3), "'output_image_count' is 3 for 4"),
        ("T2IS-Bench.json", lambda held: held.pop("sub_caption"), "'sub_caption' must be a list of texts"),
        ("T2IS-Bench.json", lambda held: held.pop("instruction"), "'instruction' is missing"),
        ("prompt_alignment.json", lambda held: held.pop("sub_0"), "prompt_alignment.json has 3 entries for its 4"),
        ("prompt_consistency.json", lambda held: held.update(Identity=["x"]), "Identity must map names to texts"),
    ],
)
def test_a_case_of_another_schema_is_named(
    t2is_folder: Path, file: str, change: Callable[[dict[str, Any]], Any], fault: str
) -> None:
    path = t2is_folder / file
    held = json.loads(path.read_text())
    change(held["0001_0001"])
    path.write_text(json.dumps(held))
    with pytest.raises(ValueError, match="case 0001_0001: ") as caught:
        read_cases(t2is_folder)
    assert fault in str(caught.value)
    assert len(read_cases(t2is_folder, skip_bad=True).items) == 2


def test_files_that_are_none_of_the_benchmark(t2is_folder: Path) -> None:
    (t2is_folder / "prompt_alignment.json").write_text("{")
    with pytest.raises(ValueError, match=r"prompt_alignment\.json:\d+: not valid JSON"):
        read_cases(t2is_folder)
    (t2is_folder / "prompt_alignment.json").unlink()
    with pytest.raises(ValueError, match="give the folder of ChengyouJia/T2IS-Bench"):
        read_cases(t2is_folder)


def test_records_name_their_case(tmp_path: Path) -> None:
    record = {
        "prompt": "2x2 grid of a cat. [1]-[1]: a. [1]-[2]: b. [2]-[1]: c. [2]-[2]: d.",
        "original_idx": "0001_0002",
    }
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record | {"height": 64, "width": 64}) + "\n")
    assert list(prompts_by_case(path)) == ["0001_0002"]
    path.write_text(json.dumps({"prompt": "a cat"}) + "\n")
    with pytest.raises(ValueError, match="no record has an 'original_idx'"):
        prompts_by_case(path)


def test_neither_generator_nor_pictures(t2is_folder: Path, tmp_path: Path) -> None:
    done = command(t2is_folder, "--out", tmp_path / "run")
    assert "name a generator with --model, or a folder of finished images with --images" in str(done.exception)


# --- leaks ---------------------------------------------------------------------------------------------------------


def test_what_a_run_was_trained_on_is_found_by_text_and_by_id(t2is_folder: Path, tmp_path: Path) -> None:
    bench = bench_over(t2is_folder, tmp_path)
    records = tmp_path / "train.jsonl"
    theme = character_prompts("dev", 3)[1].theme
    lines = [
        {"prompt": "something else", "original_idx": "0001_0001"},
        {"prompt": "something new", "theme": f"  {theme.upper()} "},
    ]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text(f"prompts:\n  train: {records}\n")
    found = trained_on(bench.texts(), tmp_path)
    assert set(found) == {"0001_0001", "0002_0001"}
    assert found["0001_0001"] == "id 0001_0001"
    records.unlink()
    with pytest.raises(ValueError, match="which cannot be compared with the items"):
        trained_on(bench.texts(), tmp_path)
    (tmp_path / "config.yaml").write_text("epochs: 3\n")
    with pytest.raises(ValueError, match=r"names neither prompts\.train nor data\.train"):
        trained_on(bench.texts(), tmp_path)
    with pytest.raises(ValueError, match="is no run's folder"):
        trained_on(bench.texts(), tmp_path / "nowhere")


def test_a_judges_training_is_compared_by_the_themes_that_it_was_asked(tmp_path: Path) -> None:
    from pacorl.core import questions

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    lines = [
        {"images": ["a.png", "a.png"], "question": question, "consistent": True}
        for question in (questions.same_theme("a red fox."), questions.edit_kept("Add a hat."))
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text(f"data:\n  train: [{tmp_path / 'pairs.jsonl'}]\n")
    texts = {"1": ["A red fox"], "2": ["a green fox"], "3": ["add a hat"]}
    assert set(trained_on(texts, tmp_path)) == {"1", "3"}


def test_results_are_kept_raw(t2is_folder: Path, tmp_path: Path) -> None:
    run(
        bench_over(t2is_folder, finished(t2is_folder, tmp_path / "images")),
        tmp_path / "run",
        BenchmarkOptions(name="here"),
    )
    (row, *_) = read_jsonl(tmp_path / "run" / "results.jsonl")
    assert set(row) == {"key", "alignment", "consistency", "aesthetics"}
    assert len(row["alignment"]) == 4
