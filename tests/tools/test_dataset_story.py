"""All of pacorl in one command: a dataset, a judge that learned from it, and a policy that the judge rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tools.tiny.__main__ import app
from tools.tiny.dataset_story import compare, narrator, reasons
from tools.tiny.serving import serving_app
from typer.testing import CliRunner

from pacorl.dataset.explain import explain_pair
from pacorl.dataset.folder import LabelledPair
from pacorl.io.documents import read_jsonl
from pacorl.judge.http.chat import ChatModel
from pacorl.tiny.characters import Panel, draw
from pacorl.types import Comparison, Question, Verdict

pytest.importorskip("faiss", reason="faiss is not installed")
FIRST = Panel.parse("red round hero, crown, sunset, jumping, boat")
OTHER_HAT = Panel.parse("red round hero, cap, sunset, waving, tree")
STRANGER = Panel.parse("blue tall hero, cap, night, waving, tree")


def tell(folder: Path, *options: object) -> dict[str, Any]:
    """Run the story by its command, check what holds at every scale, and return the summary."""
    command = ["dataset-story", str(folder), "--json", *map(str, options)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    summary = json.loads(done.stdout)
    assert summary == json.loads((folder / "summary.json").read_text())
    dataset = summary["dataset"]
    grids = summary["scale"]["prompts"] * summary["scale"]["grids"]
    assert dataset["generate"] == {"grids": grids, "generated": grids, "missing": 0}
    assert dataset["pair"]["instances"] == grids * 4 * 3
    assert sum(dataset["annotate"].values()) >= dataset["pair"]["instances"]
    assert dataset["explain"]["failed"] == 0
    assert dataset["explain"]["explained"] > 50
    judge = summary["judge"]
    assert judge["pairs"] == len(read_jsonl(folder / "dataset/export/comparisons_test.jsonl")) > 0
    assert summary["policy"]["missing"] == 0
    assert 0 < summary["policy"]["reward"] < 1
    assert (folder / "policy/adapter/adapter_model.safetensors").is_file()
    return dict(summary)


@pytest.mark.campaign
def test_every_step_of_a_small_story(tmp_path: Path) -> None:
    folder = tmp_path / "story"
    summary = tell(folder, "--prompts", 8, "--grids", 2, "--judge-steps", 8)
    assert summary["scale"]["judge_steps"] == 8
    assert summary["judge"]["prompts"] >= 2
    with pytest.raises(ValueError, match="holds a finished story"):
        CliRunner().invoke(app, ["dataset-story", str(folder)], catch_exceptions=False)


@pytest.mark.campaign
def test_a_judge_learns_from_a_dataset_of_its_own(tmp_path: Path, measured: Callable[[str], None]) -> None:
    """The whole story: the judge improves on prompts that it never saw."""
    summary = tell(tmp_path / "story")
    judge = summary["judge"]
    assert judge["prompts"] >= 5
    assert judge["pairs"] > 100
    assert judge["margin"]["low"] > 0
    measured(f"the dataset story: margin {judge['margin']['mean']:.3f} on {judge['pairs']} held-out pairs")


def test_what_the_narrator_says() -> None:
    assert reasons(FIRST, OTHER_HAT, label=True) == {
        "answer": "Yes",
        "style": "Both show sunset.",
        "identity": "Both show red. Both show round. The hat differs: crown and cap.",
        "logic": "jumping, boat; waving, tree.",
    }
    assert reasons(FIRST, OTHER_HAT, label=False)["answer"] == "No"
    assert reasons(FIRST, STRANGER, label=True)["answer"] == "No"
    assert reasons(FIRST, FIRST, label=False)["answer"] == "Yes"


@pytest.mark.parametrize(("other", "status"), [(OTHER_HAT, "explained"), (STRANGER, "contradicted")])
def test_the_narrator_is_asked_as_any_model(tmp_path: Path, other: Panel, status: str) -> None:
    draw(FIRST, 32).save(tmp_path / "a.png")
    draw(other, 32).save(tmp_path / "b.png")
    pair = LabelledPair("key", "group", ("a.png", "b.png"), consistent=True, question="Are they alike?")
    with serving_app(narrator()) as url:
        model = ChatModel("narrator", base_url=f"{url}/v1")
        row = explain_pair(tmp_path, model, pair)
    assert row["status"] == status
    assert row["reasons"].startswith("Style: Both show sunset.") == (status == "explained")


class Fixed:
    """A judge of known answers."""

    def __init__(self, *p_yes: float | None) -> None:
        self.p_yes = p_yes

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        return [Verdict(one, error="" if one is not None else "no answer") for one in self.p_yes]

    def explain(self, question: Question) -> str:
        raise NotImplementedError


def test_judges_are_compared_by_prompt(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    pairs = [
        Comparison((tmp_path / "a.png",) * 2, "Same?", consistent=label, group=group)
        for group, label in [("one", True), ("one", False), ("two", True), ("two", False)]
    ]
    compared = compare(pairs, before=Fixed(0.1, 0.2, 0.3, 0.9), after=Fixed(0.9, 0.2, 0.3, 0.4))
    assert (compared["pairs"], compared["prompts"]) == (4, 2)
    assert [compared[name]["mean"] for name in ("before", "after", "margin")] == [0.25, 0.75, 0.5]
    assert (compared["margin"]["low"], compared["margin"]["high"]) == (0.5, 0.5)
    assert (compared["before"]["low"], compared["before"]["high"]) == (0.0, 0.5)
    with pytest.raises(ValueError, match="1 of 4 held-out pairs were not judged, the first because: no answer"):
        compare(pairs, before=Fixed(0.1, None, 0.3, 0.9), after=Fixed(0.9, 0.2, 0.3, 0.4))
