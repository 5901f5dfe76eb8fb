"""The quickstart's numbers, from grid images whose truth is known; and the whole of it in small."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from tiny_sets import draw_grid, set_of
from typer.testing import CliRunner

from pacorl import quickstart
from pacorl.cli import app
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.quickstart import summarize
from pacorl.tiny.world import VALUES, Panel, all_panels, write_prompt
from pacorl.types import Grid

GRID = Grid(2, 2)
PROMPTS = 6


def other(panel: Panel, name: str) -> Panel:
    """The panel with the next value of an attribute."""
    values = VALUES[name]
    return replace(panel, **{name: values[(values.index(getattr(panel, name)) + 1) % len(values)]})


def evaluated(folder: Path, number: int, *, odd: tuple[bool, ...], p_yes: float) -> None:
    """One evaluation: images as asked for, but if `odd` the last panel has another hat."""
    lines = []
    with (folder.parent / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "evaluation", "epoch": number}) + "\n")
    (folder / f"evaluation-{number:06d}").mkdir(parents=True)
    for index, (is_odd, kept) in enumerate(zip(odd, all_panels()[::4000], strict=False)):
        wanted = set_of(kept.looks, GRID.count, random.Random(index))
        scenes = [(panel.pose, panel.prop) for panel in wanted]
        prompt = write_prompt(index, wanted[0].place, scenes, GRID)
        shown = [*wanted[:3], other(wanted[3], "hat") if is_odd else wanted[3]]
        name = f"evaluation-{number:06d}/{index}.png"
        draw_grid(shown, GRID, 64).save(folder / name)
        matrix = [[None if row == col else p_yes for col in range(4)] for row in range(4)]
        about = {"prompt_id": index, "seed": 0, "text": prompt.text, "panels": prompt.panels, "grid": "2x2"}
        lines.append({**about, "image": name, "p_yes": matrix})
    (folder / f"evaluation-{number:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_the_summary_is_what_the_sheets_show(tmp_path: Path) -> None:
    """Every second image has one panel of another hat before, none has after."""
    evaluated(tmp_path / "samples", 0, odd=(True, False) * 3, p_yes=0.25)
    evaluated(tmp_path / "samples", 60, odd=(False,) * PROMPTS, p_yes=0.75)

    found = summarize(tmp_path)

    # Of 6 pairs 3 hold the odd panel, which shares 3 of 4 looks.
    before = {"p_yes": 0.25, "attribute_agreement": 1 - 0.5 * 3 / 6 / 4, "all_equal_pairs": 0.75}
    before |= {"prompt_match": 1.0, "valid": 1.0}
    for name, value in before.items():
        after = 0.75 if name == "p_yes" else 1.0
        means = [found[side][name]["mean"] for side in ("before", "after", "difference")]
        assert means == pytest.approx([value, after, after - value], abs=1e-4)
    # The same prompts on both sides; of six prompts, Student's t.
    gains = [0.125, 0.0] * 3
    low, high = stats.t.interval(0.95, PROMPTS - 1, np.mean(gains), stats.sem(gains))
    interval = found["difference"]["attribute_agreement"]
    assert [interval["low"], interval["high"], interval["groups"]] == pytest.approx([low, high, PROMPTS], abs=1e-4)
    assert found["difference"]["p_yes"]["low"] is None, "all prompts differ alike"
    assert found["difference"]["diversity"]["mean"] == 0, "majorities are the same"
    # A hat of its own takes from its set's agreement, and from that with other sets by chance.
    assert found["before"]["kappa/hat"]["mean"] < found["after"]["kappa/hat"]["mean"] == 1


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that the command starts, which end at once, in the working folder of the test."""
    folders: list[Path] = []

    def finish(config: PolicyConfig, **_: object) -> tuple[Path, list[str]]:
        folders.append(config.out)
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / "summary.json").write_text("{}")
        return config.out / "report.html", []

    monkeypatch.setattr(quickstart, "run_quickstart", finish)
    monkeypatch.chdir(tmp_path)
    return folders


def test_a_killed_run_goes_on_and_a_second_one_has_a_folder_of_its_own(chosen: list[Path]) -> None:
    Path("runs/quickstart").mkdir(parents=True)
    Path("runs/quickstart/.lock").write_text("process 7 on elsewhere")
    for _ in range(3):
        CliRunner().invoke(app, ["quickstart"], catch_exceptions=False)
    assert chosen == [Path("runs/quickstart"), Path("runs/quickstart-2"), Path("runs/quickstart-3")]


@pytest.mark.parametrize("name", ["summary.json", "thesis.tex"])
def test_a_named_folder_that_is_occupied_stays_as_it_is(chosen: list[Path], name: str) -> None:
    Path("mine").mkdir()
    Path("mine", name).write_text("{}")
    result = CliRunner().invoke(app, ["quickstart", "out=mine"])
    assert isinstance(result.exception, ValueError)
    assert re.match("mine .*out=", str(result.exception))
    assert (chosen, [path.name for path in Path("mine").iterdir()]) == ([], [name])
