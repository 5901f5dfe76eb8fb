"""Hours of a run: what is counted, on which cards, and what is printed of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image
from tiny_hero import make_hero
from tiny_runs import TINY_SETS, planned
from typer.testing import CliRunner

from pacorl.cli import app, train
from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan import judges
from pacorl.plan.hours import CARDS, Card, Cost
from pacorl.plan.memory import Row
from pacorl.plan.plan import Plan, plan_policy, timed_cards
from pacorl.types import Question, Verdict

LARGE = ("evaluation={size: [128, 128], steps: 6, every: 5}", "epochs=11")
ROUND = Card("round", 80, tflops=200)
"""100 TFLOP/s by the share that is assumed."""
RUN = Cost(
    image={"sampling": 100e12, "training": 200e12},
    judged=30e12,
    judge_elsewhere=True,
    samples=10,
    epochs=3,
    evaluation=200e12,
    evaluations=2,
    saved=0.0,
    form="bfloat16",
    world=2,
)


def cost(*overrides: str, world: int = 1) -> Cost:
    counted = planned(*overrides, world=world).cost
    assert counted
    return counted


def test_hours_add_up_the_phases_and_divide_among_the_processes() -> None:
    """An epoch of 10 images: sampling 1 s and training 2 s each; an evaluation takes 2 s."""
    computed = (3 * 10 * (1 + 2) + 2 * 2) / 2 / 3600
    assert RUN.hours(ROUND) == (pytest.approx(1.06 * computed), pytest.approx(1.10 * computed))
    saving = dataclasses.replace(RUN, saved=3600e9)
    assert saving.hours(ROUND)[0] == pytest.approx(1.06 * computed + 1)
    streamed = dataclasses.replace(RUN, form="streamed")
    assert streamed.hours(ROUND)[1] == pytest.approx(1.59 * computed)


@pytest.mark.slow
def test_a_judge_of_this_process_takes_time_of_the_run_and_a_server_s_does_not() -> None:
    here = cost(*LARGE)
    served = cost(*LARGE, "judge.checkpoint=http://127.0.0.1:1/v1#one")
    assert here.image["judging"] == pytest.approx(here.judged)
    assert "judging" not in served.image
    assert (here.judge_cards, served.judge_cards > 1) == (0, True), "the published judge is larger than the generator"
    assert here.evaluations == 4, "before the first epoch, after the fifth, the tenth and the last"


@pytest.mark.slow
def test_questions_share_the_images_that_they_begin_with() -> None:
    """Four panels are encoded once, and three of six questions' first images are read once."""
    alone = cost()
    more = cost("rewards=[{name: consistency}, {name: panel_match}]")
    assert alone.judged < more.judged < 10 / 6 * alone.judged + alone.judged
    assert cost("judge={checkpoint: tiny, symmetric: true}").judged == pytest.approx(2 * alone.judged)
    assert cost("sampling={size: [64, 64], tree: {seeds: 1}}").image["training"] < alone.image["training"]


@pytest.mark.slow
def test_contrast_is_at_most_half_as_much_work_again() -> None:
    rewards = "rewards=[{{name: consistency, args: {{contrast: {}}}}}]"
    plain, contrast = (cost(rewards.format(weight), "sampling.batch=4", "group_size=16") for weight in (0, 1))
    assert 1.2 < contrast.judged / plain.judged <= 1.5


@pytest.mark.slow
def test_questions_about_references_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each panel that names the hero: one about the panel, two about the panel and the reference."""
    asked: list[int] = []

    class Counting(judges.Recorder):
        def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
            asked.append(len(questions))
            return super().verdicts(questions)

    monkeypatch.setattr(judges, "Recorder", Counting)
    Image.new("RGB", (8, 8)).save(tmp_path / "hero.png")
    record = {
        "prompt": "1x3 grid layout",
        "panels": ["the hero waves", "a flag", "the hero jumps"],
        "characters": {"hero": {"images": ["hero.png"]}},
        "references": [],
    }
    (tmp_path / "here.jsonl").write_text(json.dumps(record))

    def questions(train: str, evaluation: str) -> int:
        prompts = f"prompts={{train: {tmp_path}/{train}.jsonl, evaluation: {tmp_path}/{evaluation}.jsonl}}"
        asked.clear()
        cost("rewards=[{name: reference}]", "sampling.batch=1", prompts)
        return asked[0]

    assert questions("here", "here") == 6
    assert questions("absent", "here") == 6, "an evaluation's prompt stands for absent ones"
    assert questions("absent", "absent") == 12, "four panels, each of a character with a reference"


@pytest.mark.slow
def test_hours_are_of_the_recipe_s_processes_unless_some_are_started() -> None:
    config = load(PolicyConfig, None, [*TINY_SETS, "processes=2"])
    for world, expected in ((None, 2), (1, 1)):
        counted = plan_policy(config, world=world).cost
        assert counted
        assert counted.world == expected


def test_hours_are_of_the_card_that_is_here_or_of_those_that_hold_the_run() -> None:
    rows = (Row("transformer", 30 * 2**30),)

    def on(name: str, size: int | None) -> Plan:
        return Plan(rows=rows, device=name, device_bytes=size)

    long = dataclasses.replace(RUN, epochs=10_000)
    h200 = CARDS[-1]
    assert [card.gigabytes for card in timed_cards(on("CPU", None), long)] == [48, 80, 80]
    assert timed_cards(on(h200.name, 141 * 10**9), long) == [h200]
    assert timed_cards(on(h200.name, 141 * 10**9), RUN) == [], "minutes"
    assert [card.gigabytes for card in timed_cards(on("a card of 80 GB", 80 * 2**30), long)] == [80, 80]
    text = str(dataclasses.replace(on(h200.name, 141 * 10**9), cost=long))
    assert f"on 2 × {h200.name}" in text


# --- measured --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("peaks", [(3 * 2**30, 4 * 2**30), None])
@pytest.mark.parametrize("command", ["train-character"])
def test_training_on_a_card_ends_with_its_peak(
    command: str, peaks: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trained:
        folder, adapter = tmp_path, tmp_path / "adapter"

        def __init__(self, *_: object, **__: object) -> None: ...

        def train(self) -> Trained:
            return self

    monkeypatch.setattr("pacorl.character_training.character_trainer.CharacterTrainer", Trained)
    monkeypatch.setattr("pacorl.runtime.processes.destroy_process_group", lambda: True)
    monkeypatch.setattr(train, "card_peaks", lambda: peaks)
    source = recipe() if command == "train-policy" else make_hero(tmp_path / "zorp", pictures=3)
    done = CliRunner().invoke(app, [command, str(source), f"out={tmp_path / 'run'}"])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if line.startswith("memory:")]
    assert [line.startswith("memory: 3.0 GiB allocated and 4.0 GiB reserved") for line in lines] == [True] * bool(peaks)
    assert all(line.endswith(" planned") for line in lines)
