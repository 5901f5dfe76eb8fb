from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.cli.shared import BELOW
from pacorl.io.images import open_image, png_bytes, png_texts
from pacorl.tiny.characters import Oracle, draw, set_of, with_another

SUBJECT = ("red", "round", "crown", "night")


@pytest.fixture
def panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A character, three sound panels and a wrong one, with the recipes of `pacorl generate`."""
    monkeypatch.chdir(tmp_path)
    drawn = set_of(SUBJECT, 4, random.Random(1))
    Path("characters/hero").mkdir(parents=True)
    Path("characters/hero/card.yaml").write_text("description: a red round hero\n")
    draw(drawn[0], 64).save("characters/hero/1.png")
    shown = [*drawn[:3], with_another(drawn[3], "hat", random.Random(0))]
    names = []
    for number, (text, panel) in enumerate(zip(drawn, shown, strict=True), 1):
        names.append(f"{number}.png")
        recipe = {"Software": "pacorl 0.1.0", "panel": text.text, "layout": "2x2", "seed": "5"}
        Path(names[-1]).write_bytes(png_bytes(draw(panel, 64), recipe))
    return names


def repair(*arguments: object) -> Result:
    named = [] if "--judge" in arguments else ["--judge", "tiny"]
    return CliRunner().invoke(app, ["repair", *map(str, arguments), *named])


@pytest.mark.slow
def test_a_broken_set_is_repaired_by_the_tiny_generator(panels: list[str]) -> None:
    before = {name: Path(name).read_bytes() for name in panels}
    arguments = (*panels, "--character", "hero", "--min", 0.5)
    result = repair(*arguments, "--tries", 12, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["before"]["passed"], document["passed"]) == (False, True)
    assert document["before"]["odd_one_out"] == "4.png"
    tries = document["tries"]
    assert [entry["accepted"] for entry in tries][-1] is True
    assert {entry["panel"] for entry in tries} == {4}
    assert [entry["seed"] for entry in tries] == [str(5 + entry["try"]) for entry in tries]
    assert all(png_texts(Path(entry["image"]))["panel"] == png_texts(Path("4.png"))["panel"] for entry in tries)
    assert {name: Path(name).read_bytes() for name in panels} == before

    # The repaired folder is a set for the next commands.
    checked = CliRunner().invoke(
        app, ["check", *document["panels"], "--character", "hero", "--min", "0.5", "--judge", "tiny"]
    )
    assert checked.exit_code == 0, checked.output

    again = repair(*arguments)
    assert "repaired is there already" in str(again.exception)


@pytest.mark.slow
def test_a_set_that_still_fails_ends_with_code_4(panels: list[str]) -> None:
    other = ["--text", "blue tall hero, cap, day, waving, flag"] * 4
    result = repair(*panels, *other, "--character", "hero", "--min", 0.5, "--tries", 1)
    assert result.exit_code == BELOW, result.output
    assert "rejected" in result.stderr
    assert len(list(Path("repaired").glob("try-*.png"))) == 1


@pytest.mark.slow
def test_an_editor_repairs_from_the_reference(panels: list[str]) -> None:
    instructions = [
        option for prop in ("boat", "ball", "lamp", "flag") for option in ("--text", f"Put a {prop} beside the hero.")
    ]
    result = repair(
        *panels, *instructions, "--kind", "kontext", "--character", "hero", "--min", 0.5, "--tries", 12, "--json"
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (drawn,) = Oracle().read([open_image(document["panels"][3])])
    assert drawn is not None
    assert drawn.kept == SUBJECT
    assert drawn.prop == "flag"


@pytest.mark.slow
def test_a_dry_run_loads_and_writes_nothing(panels: list[str]) -> None:
    result = repair(*panels, "--min", 0.5, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["panels"] == [png_texts(Path(name))["panel"] for name in panels]
    assert not Path("repaired").exists()
