from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import FakeServer, Handler
from tiny_sets import draw_grid
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.config.options import INCOMPLETE
from pacorl.core.questions import same_theme
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


def test_a_pair_without_a_score_ends_with_a_code_of_its_own(images: list[Path]) -> None:
    def third_fails(handler: Handler, number: int) -> bool:
        if number == 3:
            handler.fail(400, "no")
        return number == 3

    with FakeServer(behave=third_fails).running() as server:
        result = run(*images[:3], "--judge", f"{server.url}#judge", "--json")
    assert (result.exit_code, json.loads(result.stdout)["missing"]) == (INCOMPLETE, 1)


def test_theme_and_reasons(images: list[Path]) -> None:
    """By the committed judge, whose reasons come to an end."""
    result = run(*images[:2], "--json", "--theme", "a hero", "--reasons")
    assert result.exit_code == 0, result.output
    (pair,) = json.loads(result.stdout)["pairs"]
    question = Question(tuple(map(open_image, images[:2])), same_theme("a hero"))
    (verdict,) = LocalJudge.from_pretrained("tiny").verdicts([question])
    assert pair["p_yes"] == pytest.approx(verdict.p_yes, rel=1e-4)
    assert pair["reasons"]


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
