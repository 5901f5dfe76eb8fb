from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import FakeServer, Handler
from tiny_sets import draw_grid
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.cli.shared import INCOMPLETE
from pacorl.core.questions import meets_criterion
from pacorl.io.images import open_image, png_bytes
from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import all_panels, draw
from pacorl.types import Grid, Question

PANELS = list(all_panels()[::8000])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{number}.png" for number in range(4)]
    for path, panel in zip(paths, PANELS, strict=True):
        draw(panel, 32).save(path)
    return paths


def run(*arguments: object) -> Result:
    named = [] if "--judge" in arguments or not arguments else ["--judge", "tiny"]
    return CliRunner().invoke(app, ["score", *map(str, arguments), *named])


def p_yes(judge: LocalJudge, paths: list[Path], text: str) -> float:
    value = judge.verdicts([Question(tuple(map(open_image, paths)), text)])[0].p_yes
    assert value is not None
    return value


def test_a_pair_without_a_score_ends_with_a_code_of_its_own(images: list[Path]) -> None:
    def third_fails(handler: Handler, number: int) -> bool:
        if number == 3:
            handler.fail(400, "no")
        return number == 3

    with FakeServer(behave=third_fails).running() as server:
        result = run(*images[:3], "--judge", f"{server.url}#judge", "--json")
    assert (result.exit_code, json.loads(result.stdout)["missing"]) == (INCOMPLETE, 1)


def test_criteria_and_reasons(images: list[Path]) -> None:
    """By the committed judge, whose reasons come to an end."""
    plain = ("Same hat.", "One palette.")
    result = run(*images[:2], "--json", "--criteria", plain[0], "--criteria", plain[1], "--reasons")
    assert result.exit_code == 0, result.output
    judge = LocalJudge.from_pretrained("tiny")
    (pair,) = json.loads(result.stdout)["pairs"]
    for text in plain:
        expected = p_yes(judge, images[:2], meets_criterion(text))
        assert pair["by_question"][text] == pytest.approx(expected, rel=1e-4)
    assert pair["p_yes"] == pytest.approx(sum(pair["by_question"].values()) / 2)
    assert all(f"{text}: " in pair["reasons"] for text in plain)


# --- pages -----------------------------------------------------------------------------------------------------


def test_a_page_is_cut_by_its_recipe_and_is_no_panel(images: list[Path], tmp_path: Path) -> None:
    texts = {"whole": {"layout": "2x2"}, "panel": {"layout": "2x2", "panel": "a hat"}, "alone": {"layout": "1x1"}}
    paths = {name: tmp_path / f"{name}.png" for name in texts}
    for name, path in paths.items():
        path.write_bytes(png_bytes(draw_grid(PANELS, Grid(2, 2), 32), texts[name]))
    said = f"{paths['whole']} is a whole page of 2x2 panels"
    assert said in str(run(paths["alone"], paths["whole"]).exception)
    assert "whole.png[4]" in run(paths["whole"]).stdout
    assert run(paths["alone"], paths["panel"]).exit_code == 0
