"""`pacorl generate --min` and `--from`: failing panels are drawn again, and a page never becomes worse."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from stories import SET
from tiny_sets import set_of
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.cli.redraw import Redrawing
from pacorl.core.grid import join
from pacorl.generate.repair import FinishedPage
from pacorl.io.images import images_in, open_image, png_bytes, png_texts
from pacorl.tiny.world import LOOKS, draw, theme_text, with_another
from pacorl.types import Grid

SUBJECT = ("red", "round", "crown", "night")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of three sound panels and a wrong one, with the recipe of `pacorl generate`, and its character."""
    monkeypatch.chdir(tmp_path)
    drawn = set_of(SUBJECT, 4, random.Random(1))
    Path("characters/hero").mkdir(parents=True)
    Path("characters/hero/card.yaml").write_text("description: a red round hero\n")
    draw(drawn[0], 64).save("characters/hero/1.png")
    shown = [*drawn[:3], with_another(drawn[3], "hat", random.Random(0))]
    texts = [panel.scene for panel in drawn]
    theme = theme_text(drawn[0].place, dict(zip(LOOKS, SUBJECT, strict=True)))
    recipe = {"Software": "pacorl 0.1.0", "model": "tiny", "layout": "2x2", "seed": "5", "separate": "True"}
    recipe |= {"theme": theme, "panels": json.dumps(texts)}
    Path("page.png").write_bytes(png_bytes(join([draw(panel, 64) for panel in shown], Grid(2, 2)), recipe))
    return Path("page.png")


def again(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


@pytest.mark.slow
def test_a_page_is_repaired_and_passes_the_check(page: Path) -> None:
    before = page.read_bytes()
    options = ("--character", "hero", "--kind", "kontext", "--judge", "tiny", "--min", 0.5, "--tries", 16, "--seed", 2)
    result = again("--from", page, *options, "--json")
    assert result.exit_code == 0, result.output
    (document,) = json.loads(result.stdout)["made"]
    assert (document["before"]["passed"], document["passed"]) == (False, True)
    assert document["before"]["odd_one_out"] == "page.png[4]"
    tries = document["tries"]
    assert [entry["accepted"] for entry in tries][-1] is True
    assert {entry["panel"] for entry in tries} == {4}
    assert [entry["seed"] for entry in tries] == [str(5 + 2 + entry["try"]) for entry in tries]
    texts = json.loads(png_texts(page)["panels"])
    assert all(png_texts(Path(entry["image"]))["panel"] == texts[3] for entry in tries)
    assert page.read_bytes() == before

    # The repaired page is one for the next commands.
    repaired = Path(document["file"])
    assert json.loads(png_texts(repaired)["redrawn"]) == {"4": tries[-1]["seed"]}
    words = ["check", str(repaired), "--character", "hero", "--min", "0.5", "--judge", "tiny"]
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.slow
def test_a_stopped_command_leaves_finished_pages_under_their_names(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def repaired(_: Redrawing, page: FinishedPage, target: Path) -> dict[str, Any]:
        if target.name == "set-2.png":
            raise KeyboardInterrupt
        target.write_bytes(b"")
        return {"passed": True, "tries": []}

    monkeypatch.setattr(Redrawing, "repaired", repaired)
    panels = [f"--panel={text}" for text in ("waving, flag", "jumping, boat", "standing, tree", "waving, lamp")]
    again("a red round hero with a crown in town at night", *panels, "--steps", 1, "--min", 0.5, "--count", 3)
    assert [path.name for path in images_in(Path("generated")) if "panel" not in path.name] == ["set-1.png"]
    assert [path.name for path in images_in(Path("generated/tries"))] == ["set-1-before.png", "set-2-before.png"]


@pytest.mark.slow
def test_a_set_is_drawn_until_it_passes(page: Path) -> None:
    gate = ("--seed", 1, "--min", 0.5, "--tries", 12, "--json")
    result = again("a red round hero with a crown in town at night", *SET, *gate)
    assert result.exit_code == 0, result.output
    (made,) = json.loads(result.stdout)["made"]
    assert made["passed"]
    assert made["tries"]
    before = open_image(Path("generated/tries/set-1-before.png"))
    assert before.tobytes() != open_image(Path(made["file"])).tobytes()
    checked = CliRunner().invoke(app, ["check", made["file"], "--min", "0.5", "--json"])
    assert checked.exit_code == 0, checked.output
    scores = [panel["score"] for panel in json.loads(checked.stdout)["panels"]]
    assert scores == pytest.approx([panel["score"] for panel in made["after"]["panels"]], abs=1e-6)
