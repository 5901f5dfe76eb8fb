"""The quickstart's numbers, from grid images whose truth is known; and the whole of it in small."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_runs import SMALL_QUICKSTART

from pacorl.config import base as configs
from pacorl.config.policy_run import PolicyConfig, recipe
from pacorl.data.characters import VALUES, Oracle, Panel, all_panels, draw_grid, set_of
from pacorl.quickstart import METRICS, before_and_after, run_quickstart, summarize
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
    (folder / f"evaluation-{number:06d}").mkdir(parents=True)
    for index, (is_odd, kept) in enumerate(zip(odd, all_panels()[::800], strict=False)):
        wanted = set_of(kept.kept, GRID.count, random.Random(index))
        shown = [*wanted[:3], other(wanted[3], "hat") if is_odd else wanted[3]]
        name = f"evaluation-{number:06d}/{index}.png"
        draw_grid(shown, GRID, 64).save(folder / name)
        matrix = [[None if row == col else p_yes for col in range(4)] for row in range(4)]
        lines.append({"image": name, "grid": "2x2", "p_yes": matrix, "panels": [panel.text for panel in wanted]})
    (folder / f"evaluation-{number:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_summary_is_what_the_sheets_show(tmp_path: Path) -> None:
    """Every second image has one panel of another hat before, none has after."""
    evaluated(tmp_path / "samples", 0, odd=(True, False) * 3, p_yes=0.25)
    evaluated(tmp_path / "samples", 60, odd=(False,) * PROMPTS, p_yes=0.75)
    timed = [{"kind": "epoch", "seconds/sampling": 1.5, "seconds/hidden/x": 9.0}, {"seconds/sampling": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timed))
    config = configs.load(PolicyConfig, recipe(), [f"out={tmp_path}"])

    found = summarize(config, Oracle(), judge={"pair_accuracy": 0.9})

    # Of 6 pairs 3 hold the odd panel, which shares 3 of 4 kept attributes, and 5 of 6 that its text names.
    before = {"consistency": 0.25, "attribute_agreement": 1 - 0.5 * 3 / 6 / 4, "all_equal_pairs": 0.75}
    before |= {"prompt_match": 1 - 0.5 / 4 / 6, "valid": 1.0}
    after = dict.fromkeys(before, 1.0) | {"consistency": 0.75}
    for name in before:
        assert found["before"][name]["mean"] == pytest.approx(before[name], abs=1e-4)
        assert found["after"][name] == dict.fromkeys(("mean", "low", "high"), after[name])
        assert found["difference"][name]["mean"] == pytest.approx(after[name] - before[name], abs=1e-4)
    # The same prompts on both sides: if half of six images change by .125, means over drawn images have a binomial's
    # quantiles.
    counts = np.random.default_rng(7).binomial(PROMPTS, 0.5, 200_000) / PROMPTS * 0.125
    low, high = np.quantile(counts, [0.025, 0.975])
    interval = found["difference"]["attribute_agreement"]
    assert (interval["low"], interval["high"]) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert found["before"]["diversity"] == found["after"]["diversity"]  # majorities are the same
    diversity = found["before"]["diversity"]
    assert 0 <= diversity["low"] < diversity["mean"] < diversity["high"] <= 1
    assert (found["judge"], found["prompts"], found["seconds"]) == ({"pair_accuracy": 0.9}, 6, {"sampling": 3.5})
    assert (found["seed"], len(found["config_hash"]), len(found["verdict"])) == (42, 12, 3)
    assert found["verdict"][0].startswith("attributes that panels share: 0.94 → 1.00 (+0.06, 95 % interval +")
    assert {"pacorl", "torch", "diffusers", "transformers"} <= found["versions"].keys()


def test_before_stands_above_after(tmp_path: Path) -> None:
    evaluated(tmp_path / "samples", 0, odd=(True, True), p_yes=0.5)
    evaluated(tmp_path / "samples", 60, odd=(False, False), p_yes=0.5)
    picture = before_and_after(tmp_path)
    assert picture.size == (2 * 256 + 8, 2 * 256 + 8)
    for row, number in enumerate((0, 60)):
        for column in range(2):
            left, top = column * 264, row * 264
            cut = picture.crop((left, top, left + 256, top + 256)).resize((128, 128), Image.Resampling.NEAREST)
            with Image.open(tmp_path / f"samples/evaluation-{number:06d}/{column}.png") as sheet:
                assert cut.tobytes() == sheet.convert("RGB").tobytes()


@pytest.mark.slow
def test_the_whole_of_it_in_small(tmp_path: Path) -> None:
    config = configs.load(PolicyConfig, recipe(), [f"out={tmp_path / 'run'}", *SMALL_QUICKSTART])
    page, verdict = run_quickstart(config)
    assert len(verdict) == 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["judge"]["pair_accuracy"] >= 0.95
    for side in ("before", "after"):
        assert summary[side].keys() == set(METRICS)
        assert all(one["low"] <= one["mean"] <= one["high"] for one in summary[side].values())
    assert {"sampling", "evaluation"} & summary["seconds"].keys()
    html = page.read_text()
    assert html.count("data:image/") >= 4
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html), "the page asks nobody for anything"
    assert (tmp_path / "run" / "before-after.png").is_file()
    # A finished run is made anew, and comes out the same.
    assert run_quickstart(config) == (page, verdict)
