"""ViStoryBench on two tiny stories in the published folders."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from edit_twins import klein_pipeline
from PIL import Image, ImageOps
from torch import Tensor
from typer.testing import CliRunner

from pacorl.bench.vistory import LITE, VistoryBench, VistoryOptions, copy_rate, read_stories
from pacorl.cli.benchmark import app
from pacorl.core.questions import same_theme, shows_text
from pacorl.io.documents import write_json
from pacorl.io.images import open_image
from pacorl.judge.local import LocalJudge
from pacorl.judge.paco_reward import PacoReward
from pacorl.tiny.characters import all_panels, draw
from pacorl.types import Question

CASTS = {"01": (["Ann"], ["Ann", "Bob"], ["Bob"], []), "08": (["Ann"], ["Ann"]), "02": (["Ann"],)}
FIELDS = ("Setting Description", "Static Shot Description", "Shot Perspective Design")


def write_stories(folder: Path) -> Path:
    """Write stories 01, 08 and 02, which is not in the Lite selection, and their finished shots."""
    drawn = iter(all_panels()[::400])
    for story, casts in CASTS.items():
        shots = []
        for index, cast in enumerate(casts):
            texts = {field: {"en": f"{field[0]} {index}", "ch": "-"} for field in FIELDS}
            shots.append({"index": index, "Characters Appearing": {"en": cast, "ch": []}, **texts})
            path = folder / "made" / "shots" / story / f"{index:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(next(drawn), 32).save(path)
        characters = {}
        for name in sorted({name for cast in casts for name in cast}):
            characters[name] = {"name_en": name, "prompt_en": f"{name}, a hero", "tag": "human"}
            image = folder / "data" / story / "image" / name / "00.jpg"
            image.parent.mkdir(parents=True)
            draw(next(drawn), 32).save(image)
        write_json(folder / "data" / story / "story.json", {"Shots": shots, "Characters": characters})
    return folder / "data"


def options(folder: Path, **values: Any) -> VistoryOptions:
    return VistoryOptions(**({"images": folder / "made"} | values))


@pytest.mark.slow
def test_the_table_is_what_naive_loops_give(tmp_path: Path) -> None:
    data = write_stories(tmp_path)
    words = ["vistory", str(data), "--images", str(tmp_path / "made"), "--out", str(tmp_path / "run"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    values = json.loads(done.stdout)["tables"][0]["rows"][0]["values"]

    judge = LocalJudge.from_pretrained("tiny")

    def p_yes(text: str, *images: Image.Image) -> float:
        return judge.verdicts([Question(images, text)])[0].p_yes or 0.0

    figures: dict[str, list[float]] = {"Character, cross": [], "Character, self": [], "Alignment": []}
    for story in ("01", "08"):
        shots = [open_image(tmp_path / "made" / "shots" / story / f"{i:02d}.png") for i in range(len(CASTS[story]))]
        cross, alike = [], []
        for name in ("Ann", "Bob"):
            text = same_theme(f"{name}, a hero")
            shown = [shot for shot, cast in zip(shots, CASTS[story], strict=True) if name in cast]
            if shown:
                reference = open_image(data / story / "image" / name / "00.jpg")
                cross.append(fmean(p_yes(text, reference, shot) for shot in shown))
            if len(shown) > 1:
                alike.append(fmean(p_yes(text, a, b) for a, b in combinations(shown, 2)))
        figures["Character, cross"].append(fmean(cross))
        figures["Character, self"].append(fmean(alike))
        figures["Alignment"].append(fmean(p_yes(shows_text(f"S {i}"), shot) for i, shot in enumerate(shots)))
    for column, of_stories in figures.items():
        assert values[column]["mean"] == pytest.approx(fmean(of_stories), abs=1e-5)
    assert values["Copy-paste"] is None


class Pixels:
    """Encodes an image by its pixels."""

    def images(self, images: Any) -> Tensor:
        rows = np.stack([np.asarray(image.convert("RGB"), dtype=np.float32).reshape(-1) for image in images])
        return torch.nn.functional.normalize(torch.from_numpy(rows), dim=1)


def test_a_pasted_reference_is_a_copy_and_its_mirror_image_is_none(tmp_path: Path) -> None:
    reference = draw(all_panels()[0], 32).crop((0, 0, 20, 32))
    mirror = ImageOps.mirror(reference)
    even = Image.new("RGB", reference.size, "white")
    assert copy_rate(Pixels(), [reference], reference) > 0.9
    assert copy_rate(Pixels(), [mirror], reference) < 0.1
    assert copy_rate(Pixels(), [even], reference) == pytest.approx(0.5, abs=1e-3)
    # The mean over shots.
    assert copy_rate(Pixels(), [reference, mirror], reference) == pytest.approx(0.5, abs=1e-3)

    data = read_stories(write_stories(tmp_path), options(tmp_path))
    bench = VistoryBench(data, tmp_path / "made", PacoReward.from_pretrained("tiny", decline=False), {}, Pixels())
    (row,) = bench.measure(["01"])
    shots = {i: open_image(tmp_path / "made" / "shots" / "01" / f"{i:02d}.png") for i in range(3)}
    rates = []
    for name, numbers in {"Ann": (0, 1), "Bob": (1, 2)}.items():
        reference = open_image(tmp_path / "data" / "01" / "image" / name / "00.jpg")
        rates.append(fmean(copy_rate(Pixels(), [shots[i]], reference) for i in numbers))
    assert row["copied"] == pytest.approx(fmean(rates), abs=1e-5)  # fp32, divided by a small temperature


def test_the_lite_selection_is_read_and_the_whole_on_request(tmp_path: Path) -> None:
    data = write_stories(tmp_path)
    assert list(read_stories(data, options(tmp_path)).items) == ["01", "08"]
    assert list(read_stories(data, options(tmp_path, full=True)).items) == ["01", "02", "08"]
    assert list(read_stories(data, options(tmp_path, limit=1)).items) == ["01"]
    assert len(LITE) == 20
    shot = read_stories(data, options(tmp_path)).items["01"].shots[1]
    assert shot.text == "S 1 S 1 S 1"
    assert [character.name for character in shot.characters] == ["Ann", "Bob"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"Shots": {}}, "must hold Shots, a list, and Characters"),
        ({"Characters": {"Ann": {}}}, "character Ann: needs a name of a folder and the text 'prompt_en'"),
        ({"Characters": {"../Ann": {"prompt_en": "x"}}}, "needs a name of a folder"),
        ({"Characters": {"Eve": {"prompt_en": "x"}}}, "there is no image in"),
        ({"Characters": {}}, "shot 1: 'Ann' is none of the Characters"),
        ({"Shots": [{"index": 0}]}, "shot 1: 'Setting Description' must map en to a text"),
    ],
)
def test_a_story_of_another_form_is_named(change: dict[str, Any], fault: str, tmp_path: Path) -> None:
    data = write_stories(tmp_path)
    path = data / "08" / "story.json"
    write_json(path, json.loads(path.read_text()) | change)
    with pytest.raises(ValueError, match="08: ") as caught:
        read_stories(data, options(tmp_path))
    assert fault in str(caught.value)
    assert list(read_stories(data, options(tmp_path, skip_bad=True)).items) == ["01"]


def test_folders_of_another_form_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no NN/story\.json; name ViStoryBench's folder"):
        read_stories(tmp_path, VistoryOptions(model="tiny"))
    write_stories(tmp_path)
    for story in ("01", "08"):
        (tmp_path / "data" / story / "story.json").unlink()
    with pytest.raises(ValueError, match="has no story of the Lite selection; take --full"):
        read_stories(tmp_path / "data", options(tmp_path))
    with pytest.raises(ValueError, match="holds no folder shots; name METHOD/MODE/LANGUAGE/TIME"):
        VistoryOptions(images=tmp_path / "data")


def test_a_missing_shot_is_named(tmp_path: Path) -> None:
    data = read_stories(write_stories(tmp_path), options(tmp_path))
    (tmp_path / "made" / "shots" / "08" / "01.png").rename(tmp_path / "made" / "shots" / "08" / "shot_01.png")
    bench = VistoryBench(data, tmp_path / "made", PacoReward.from_pretrained("tiny", decline=False), {})
    assert "error" not in bench.measure(["08"])[0]
    (tmp_path / "made" / "shots" / "08" / "shot_01.png").unlink()
    with pytest.raises(ValueError, match=r"08/01\.png is missing"):
        bench.measure(["08"])


@pytest.mark.slow
def test_generated_shots_lie_in_the_published_folders(tmp_path: Path) -> None:
    data = write_stories(tmp_path)
    words = ["vistory", str(data), "--model", "tiny", "--steps", "2", "--out", str(tmp_path / "run"), "--generate-only"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    made = sorted(path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*.png"))
    assert made == [f"shots/{story}/{i:02d}.png" for story in ("01", "08") for i in range(len(CASTS[story]))]


@pytest.mark.slow
def test_a_shot_may_have_the_shot_before_as_a_reference(tmp_path: Path) -> None:
    """First shots are those without it, and processes that share the stories make the same."""
    data = write_stories(tmp_path)
    klein_pipeline().save_pretrained(tmp_path / "klein")
    words = ["vistory", str(data), "--model", str(tmp_path / "klein"), "--steps", "1", "--size", "32x32"]
    words += ["--image-batch", "1", "--generate-only"]
    runs = {"alone": [[]], "chained": [["--previous"]], "shared": [["--previous", "--shard", f"{i}/2"] for i in (1, 0)]}
    pixels: dict[str, dict[str, bytes]] = {}
    for name, calls in runs.items():
        for extra in calls:
            done = CliRunner().invoke(app, [*words, *extra, "--out", str(tmp_path / name)])
            assert done.exit_code == 0, (done.output, done.exception)
        shots = sorted((tmp_path / name / "shots").rglob("*.png"))
        pixels[name] = {f"{path.parent.name}/{path.stem}": open_image(path).tobytes() for path in shots}
    assert pixels["chained"] == pixels["shared"]
    same = [name for name, content in pixels["alone"].items() if content == pixels["chained"][name]]
    assert same == ["01/00", "08/00"]

    done = CliRunner().invoke(
        app, ["vistory", str(data), "--model", "tiny", "--previous", "--out", str(tmp_path / "no")]
    )
    assert "tiny takes no reference images, so none can be the panel before" in str(done.exception)
