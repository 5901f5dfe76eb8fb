"""`pacorl generate` as it is called: files, JSON, pages, and what is refused before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import stories
from edit_twins import klein_pipeline
from PIL import Image
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.cli.generator import AdaptedGenerator
from pacorl.config.options import INCOMPLETE
from pacorl.core.calibration import Curve
from pacorl.judge.calibration import Calibration

SET = ("a red hero with a crown in town", *stories.SET)
SMALL = ("--size", "64x64", "--steps", "2")


def run(*words: str | Path):
    return CliRunner().invoke(app, ["generate", *map(str, words)])


def refused(*words: str | Path) -> str:
    result = run(*words)
    assert isinstance(result.exception, ValueError | OSError), result.output
    return str(result.exception)


@pytest.fixture
def no_weights(monkeypatch):
    """Nothing may be loaded."""
    monkeypatch.setattr(AdaptedGenerator, "load", Mock(side_effect=AssertionError("weights were loaded")))


# --- sets from one sentence, and characters ----------------------------------------------------------------------

SENTENCE = "Four images of a red hero with a crown in town: waving by a flag, jumping by a boat, "
SENTENCE += "standing by a tree and waving by a lamp"


@pytest.mark.slow
def test_a_file_of_prompts_makes_sets_of_each_with_scores(tmp_path):
    file = tmp_path / "prompts.txt"
    assert str(file) in refused(file)
    file.write_text(f"{SENTENCE}\n{SENTENCE.replace('red', 'blue')}\n")
    assert str(file) in refused(file, "--panel", "waving, flag")
    several = ("--best-of", "2", "--count", "2", "--seed", "4")
    result = run(file, *SMALL, *several, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    made = document["made"]
    names = [Path(image["file"]).name for image in made]
    assert names == [f"set-{number}.png" for number in (1, 2, 3, 4)]
    assert [(image["seed"] - 4) // 2 for image in made] == [0, 1, 2, 3], "of two candidates each"
    assert ["red" in image["prompt"] for image in made] == [True] * 2 + [False] * 2
    assert len(made[0]["pairs"]) == 4
    assert document["judge"] == "tiny"
    assert any("tiny world" in note for note in document["notes"])
    with Image.open(made[0]["file"]) as grid:
        assert (grid.size, grid.info["seed"]) == ((64, 64), str(made[0]["seed"]))
    assert [Path(path).is_file() for path in made[0]["panels"]] == [True] * 4


def test_a_sentence_makes_a_set_and_shows_its_panels(tmp_path):
    result = run(SENTENCE, *SMALL, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / "set-1.png") as grid:
        assert grid.info["layout"] == "2x2"
        assert "jumping, boat" in grid.info["panels"]
    assert "2. jumping, boat" in result.stderr


@pytest.mark.slow
def test_the_same_command_goes_on_and_another_replaces_nothing(tmp_path):
    words = (*SET, *SMALL, "--best-of", "2", "--out", tmp_path)
    assert run(*words, "--count", "2").exit_code == 0
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.glob("*.png")}
    stopped = [path for path in before if path.name.startswith("set-2")]
    for path in stopped:
        path.unlink()
    again = run(*words, "--count", "12", "--json")
    made = [Path(image["file"]).name for image in json.loads(again.stdout)["made"]]
    assert made == [f"set-{number}.png" for number in range(2, 13)]
    assert f"{tmp_path / 'set-1.png'} is finished" in again.stderr
    for path, (content, changed) in before.items():
        assert path.read_bytes() == content
        assert path in stopped or path.stat().st_mtime_ns == changed

    seen = {path: path.read_bytes() for path in tmp_path.glob("*.png")}
    calibration = tmp_path / "c.json"
    Calibration("tiny", Curve()).save(calibration)
    others = (("--seed", "1"), ("--min", "0.5"), ("--best-of", "3"), ("--steps", "3"), ("--calibration", calibration))
    for other in others:
        assert "is of another command" in refused(*words, *other)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.png")} == seen


@pytest.mark.slow
def test_a_finished_set_that_fails_keeps_its_code_and_changed_images_are_another_request(hero, tmp_path):
    words = ("a red round hero with a crown in town at night", *stories.SET, "--seed", "1", "--min", "0.5")
    words = (*words, "--tries", "1", "--out", tmp_path / "out")
    for _ in range(2):
        assert run(*words).exit_code == INCOMPLETE
    words = ("Give the hero a cap.", "--image", hero / "front.png", "--out", tmp_path / "edits")
    assert run(*words).exit_code == 0
    Image.new("RGB", (32, 32), "blue").save(hero / "front.png")
    assert "is of another command" in refused(*words)


@pytest.fixture
def hero(tmp_path, monkeypatch) -> Path:
    """A working folder with characters/hero."""
    folder = tmp_path / "characters" / "hero"
    folder.mkdir(parents=True)
    Image.new("RGB", (32, 32), "red").save(folder / "front.png")
    (folder / "card.yaml").write_text("description: a red round hero\nkeep: {outfit: crown, palette: night}\n")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.slow
def test_a_character_is_in_every_panel_and_in_the_recipe(hero, tmp_path):
    result = run("in town", *SET[1:], "--character", "hero", *SMALL, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("tiny takes 0 reference images of 1") == 1
    with Image.open(tmp_path / "out" / "set-1.png") as grid:
        assert json.loads(grid.info["characters"]) == ["hero"]
        assert "of a red round hero with a crown in town at night." in grid.info["prompt"]
    words = ("four images: it runs, it eats, {hero} sleeps, it hides", "--character", hero, "--model", "some/model")
    shown = run(*words, "--dry-run").stderr
    assert "1. A red round hero, crown, night, it runs\n" in shown
    assert "3. A red round hero, crown, night sleeps\n" in shown


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A random tiny FLUX.2-klein."""
    klein_pipeline().save_pretrained(tmp_path / "klein")
    return tmp_path / "klein"


@pytest.mark.slow
def test_a_character_s_images_are_references(hero, checkpoint, tmp_path):
    """Another image of it makes another image; the same model without its images, another yet."""
    words = ("a hero waves", "--model", checkpoint, "--size", "32x32", "--steps", "1", "--json")
    made = []
    for number, colour in enumerate((None, "red", "blue")):
        flags = ("--character", hero) if colour else ()
        if colour:
            Image.new("RGB", (64, 64), colour).save(hero / "front.png")
        result = run(*words, *flags, "--out", tmp_path / str(number))
        assert result.exit_code == 0, result.output
        assert "reference images" not in result.stderr
        made.append((tmp_path / str(number) / "set-1.png").read_bytes())
    assert len(set(made)) == 3
    with Image.open(tmp_path / "2" / "set-1.png") as image:
        assert json.loads(image.info["references"]) == ["front.png"]
    for number in range(4):
        Image.new("RGB", (64, 64)).save(hero / f"{number}.png")
    result = run("two images of a hero", *words[1:], "--character", hero, "--dry-run")
    assert "takes 4 reference images" in result.stderr
    assert "does not list" in result.stderr


def test_a_dry_run_refuses_what_the_run_refuses(hero, checkpoint, no_weights):
    image = hero / "front.png"
    many = ("a hat", *["--image", image] * 5, "--model", checkpoint)
    for words, fault in ((many, "has 5 sources"), (("--image", image), "a text or a file"), ((), "a text or a file")):
        assert fault in refused(*words)
        assert fault in refused(*words, "--dry-run")
