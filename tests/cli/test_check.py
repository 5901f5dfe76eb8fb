from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.cli.shared import BELOW
from pacorl.core.calibration import Curve
from pacorl.judge.calibration import Calibration, read_calibration
from pacorl.tiny.characters import draw, set_of, with_another

SUBJECT = ("red", "round", "crown", "night")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character of one image, five sound panels, and a wrong one."""
    folder = tmp_path_factory.mktemp("set")
    panels = set_of(SUBJECT, 6, random.Random(1))
    (folder / "hero").mkdir()
    (folder / "hero" / "card.yaml").write_text("description: a red round hero\n")
    draw(panels[0], 64).save(folder / "hero" / "1.png")
    for number, panel in enumerate(panels[1:], 1):
        draw(panel, 64).save(folder / f"{number}.png")
    draw(with_another(panels[5], "hat", random.Random(0)), 64).save(folder / "wrong.png")
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_sound_set_passes_and_a_broken_one_ends_with_code_4(folder: Path, tmp_path: Path) -> None:
    sound = [folder / f"{number}.png" for number in range(1, 6)]
    result = run("check", *sound, "--character", folder / "hero", "--min", 0.5, "--report", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "Passed: all 5 panels" in result.stdout
    assert "uncalibrated" in (tmp_path / "page.html").read_text()

    result = run("check", *sound[:4], folder / "wrong.png", "--character", folder / "hero", "--min", 0.5, "--json")
    assert result.exit_code == BELOW, result.output
    document = json.loads(result.stdout)
    assert document["odd_one_out"] == str(folder / "wrong.png")
    assert document["asked"] == 5 + 3
    assert document["calibrated"] is False


def test_a_threshold_comes_from_the_calibration_or_must_be_given(folder: Path, tmp_path: Path) -> None:
    pair = (folder / "1.png", folder / "2.png")
    result = run("check", *pair)
    assert result.exit_code == 1
    assert "--min" in str(result.exception)
    path = tmp_path / "c.json"
    Calibration("tiny", {"": Curve()}, {"panels": {4: 0.25}}).save(path)
    result = run("check", *pair, "--calibration", path, "--json")
    assert result.exit_code == 0, result.output
    assert (json.loads(result.stdout)["least"], json.loads(result.stdout)["calibrated"]) == (0.25, True)
    result = run("score", *pair, "--calibration", path, "--json")
    assert json.loads(result.stdout)["calibrated"] is True


def test_a_calibration_is_written_from_pairs(tmp_path: Path) -> None:
    out, page = tmp_path / "c.json", tmp_path / "c.html"
    result = run("calibrate", "tiny", "tiny:dev:60", "--out", out, "--report", page)
    assert result.exit_code == 0, result.output
    assert "ECE, cross-validated: 0." in result.stdout
    assert read_calibration(out) is not None
    assert 'class="reliability"' in page.read_text()


def test_rankings_label_their_best_and_worst(folder: Path, tmp_path: Path) -> None:
    lines = ["reference,candidates,group"]
    for number in range(1, 6):
        for other in range(1, 6):
            if other != number:
                lines.append(f"{number}.png,{other}.png | wrong.png,{number}-{other}")
    (folder / "rankings.csv").write_text("\n".join(lines))
    out = tmp_path / "c.json"
    result = run("calibrate", "tiny", folder / "rankings.csv", "--out", out)
    assert result.exit_code == 0, result.output
    assert "40 pairs of" in result.stdout
    assert "20 labelled Yes" in result.stdout
    assert read_calibration(out) is not None


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    out.write_text('{"mine": 1}')
    assert run("calibrate", "tiny", "tiny:dev:60", "--out", out).exit_code == 1
    assert out.read_text() == '{"mine": 1}'
