"""FLOPs of a run: evaluations, hours on a card, and the notes about both sides."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from tiny_hero import make_hero
from tiny_runs import TINY_SETS, planned
from typer.testing import CliRunner

from pacorl.cli import app, train
from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.console import PlainConsole
from pacorl.plan.components import Row
from pacorl.plan.cost import CARDS, Card, Cost, Load, _evaluations, roofline
from pacorl.plan.plan import Plan, peak_line, print_plan, summary, timed_cards

H100 = CARDS[-1]
LARGE = ("evaluation={size: [128, 128], steps: 6, every: 5}", "epochs=11")
PAPER = Cost(
    phases={"sampling": Load(200e12), "training": Load(100e12)},
    judged=Load(30e12),
    questions=6,
    judges_here=False,
    judge_servers=1,
    samples=672,
    epochs=100,
    evaluations=(Load(1e17),) * 11,
    world=7,
)


def cost(*overrides: str) -> Cost:
    counted = planned(*overrides).cost
    assert counted
    return counted


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], (40.0,) * 4),
        (["evaluation.samples_per_prompt=2"], (80.0,) * 4),
        (["evaluation.every=0"], (40.0,) * 2),
        (["max_steps=3"], (40.0,) * 2),
    ],
)
def test_evaluations_are_counted(settings: list[str], expected: tuple[float, ...]) -> None:
    """Before the first epoch, after the fifth, the tenth and the last: four prompts of ten FLOPs."""
    config = load(PolicyConfig, None, [*TINY_SETS, "epochs=11", "evaluation.every=5", *settings])
    found = _evaluations(config, Load(10), 4)
    assert tuple(load.flops for load in found) == expected


@pytest.mark.slow
def test_questions_about_references_are_counted(tmp_path: Path) -> None:
    """Of two panels that name the hero: one about each panel, two about each panel and reference."""
    Image.new("RGB", (8, 8)).save(tmp_path / "hero.png")
    record = {
        "prompt": "1x3 grid layout",
        "panels": ["the hero waves", "a flag", "the hero jumps"],
        "characters": {"hero": {"images": ["hero.png"]}},
        "references": [],
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    settings = ["rewards=[{name: reference}]", "prompts.leaks=off", f"prompts.evaluation={tmp_path / 'train.jsonl'}"]
    assert cost(*settings, f"prompts.train={tmp_path / 'train.jsonl'}").questions == 6
    # Absent prompts: a reference is assumed, so that the judge is counted.
    assert cost(*settings, f"prompts.train={tmp_path / 'none.jsonl'}").questions == 12


@pytest.mark.slow
def test_a_judge_of_this_process_takes_time_of_the_run() -> None:
    counted = cost(*LARGE)
    assert counted.judges_here
    assert counted.epoch == pytest.approx(counted.samples * (counted.image + counted.judged.flops))
    assert counted.total == 11 * counted.epoch + counted.evaluation
    assert dataclasses.replace(counted, judges_here=False).epoch == pytest.approx(counted.samples * counted.image)


def test_the_share_of_evaluation_is_printed_and_noted_above_a_quarter() -> None:
    plan = planned(*LARGE)
    assert plan.cost
    console = PlainConsole(width=300, file=io.StringIO())
    print_plan(plan, console)
    assert isinstance(console.file, io.StringIO)
    assert plan.cost.evaluation_line in console.file.getvalue()
    assert json.loads(plan.to_json())["cost"]["epochs"] == plan.cost.epochs
    assert PAPER.warnings() == []
    (note,) = dataclasses.replace(PAPER, evaluations=(Load(1e18),) * 11).warnings()
    assert note.startswith("evaluation takes 35% of the run's FLOPs: lower evaluation.size")
    assert (
        dataclasses.replace(PAPER, epochs=1, samples=1, evaluations=(Load(1e16),)).warnings() == []
    )  # a matter of seconds


@pytest.mark.slow
def test_a_slow_judge_is_noted_for_the_processes_of_the_run() -> None:
    (note,) = dataclasses.replace(PAPER, judged=Load(60e12)).warnings()
    assert note.startswith("the judge is the slower side: its servers are 1, and 2 cards would keep up with 7")
    assert dataclasses.replace(PAPER, judged=Load(60e12), world=5).warnings() == []
    assert dataclasses.replace(PAPER, judged=Load(60e12), judge_servers=2).warnings() == []

    # The published judge is larger by far than the tiny generator.
    for checkpoint, servers in (("http://127.0.0.1:1/v1", 1), ("http://127.0.0.1:1,http://127.0.0.1:2", 2)):
        plan = planned(f"judge={{checkpoint: '{checkpoint}', model: one}}")
        assert plan.cost
        assert (plan.cost.judge_servers, plan.cost.judges_here) == (servers, False)
        assert [note for note in plan.warnings if note.startswith("the judge is the slower side")]


ROUND = Card("round", 80, tflops=200, memory_rate=1000, bus_rate=50)
"""100 TFLOP/s of products, 800 GB/s of memory and 40 GB/s of the bus by the shares that are assumed."""


@pytest.mark.parametrize(
    ("load", "seconds", "bound"),
    [
        (Load(300e12, moved=1600e9, sent=80e9), 3.0, "products"),
        (Load(100e12, moved=1600e9, sent=40e9), 2.0, "memory"),
        (Load(100e12, moved=1600e9, sent=200e9), 5.0, "bus"),
        (Load(0), 0.0, "products"),
    ],
)
def test_a_phase_takes_the_longest_of_three_times(load: Load, seconds: float, bound: str) -> None:
    found, by = roofline(ROUND, load)
    assert (found, by) == (pytest.approx(seconds), bound)


def test_hours_add_up_the_phases_and_divide_among_the_processes() -> None:
    """An epoch of 10 images: sampling by products 1 s, training by memory 2 s, judging by the bus 3 s."""
    phases = {"sampling": Load(100e12, moved=80e9), "training": Load(50e12, moved=1600e9)}
    judged = Load(0, sent=120e9)
    run = dataclasses.replace(
        PAPER,
        phases=phases,
        judged=judged,
        judges_here=True,
        samples=10,
        epochs=3,
        evaluations=(Load(400e12),),
        world=2,
    )
    assert run.hours(ROUND) == pytest.approx((3 * 10 * (1 + 2 + 3) + 4) / 2 / 3600)
    assert dataclasses.replace(run, judges_here=False).hours(ROUND) == pytest.approx((3 * 10 * 3 + 4) / 2 / 3600)
    line = f"hours, computed by a roofline at 50% of the peak in bf16: {run.hours(ROUND):.3g} on round"
    assert run.time_line([ROUND]) == line


@pytest.mark.slow
def test_streamed_weights_and_traffic_are_counted_by_phase() -> None:
    """A trained step sends the weights three times with gradient checkpointing, and twice without."""
    settings = ["model.quantize=int8", "model.gradient_checkpointing=true", "sampling.batch=2"]
    kept, streamed = cost(*settings).phases, cost(*settings, "model.stream=true").phases
    without = cost(*settings[::2], "model.stream=true", "model.gradient_checkpointing=false").phases
    for phase in ("sampling", "training", "decoding"):
        assert kept[phase].sent == 0
        assert streamed[phase].flops == pytest.approx(kept[phase].flops)
        assert streamed[phase].moved > 0
    assert streamed["decoding"].sent == 0
    assert streamed["training"].sent == pytest.approx(without["training"].sent * 3 / 2)
    # Streamed weights arrive in the card's memory once more than weights that stay there.
    extra = streamed["sampling"].moved - kept["sampling"].moved
    assert extra == pytest.approx(streamed["sampling"].sent)


def test_hours_are_of_the_card_that_is_here_or_of_those_that_hold_the_run() -> None:
    rows = (Row("transformer", 30 * 2**30),)
    assert [card.gigabytes for card in timed_cards(Plan(rows, (), (), "CPU", None), PAPER)] == [48, 80, 80, 141]
    assert timed_cards(Plan(rows, (), (), H100.name, 80 * 10**9), PAPER) == [H100]
    minutes = dataclasses.replace(PAPER, epochs=1, samples=1, evaluations=())
    assert timed_cards(Plan(rows, (), (), H100.name, 80 * 10**9), minutes) == []


def test_a_plan_without_a_card_names_the_cards_that_need_checkpointing() -> None:
    checkpointed = Plan((Row("transformer", 30 * 2**30),), (), (), "CPU", None, cost=PAPER)
    rows = (Row("transformer", 100 * 2**30),)
    plan = dataclasses.replace(checkpointed, rows=rows, checkpointed=checkpointed)
    lines = list(summary(plan))
    assert lines[0] == (
        "device: CPU; 100.0 GiB needed without gradient checkpointing, 30.0 GiB with it (`auto`: by the card)"
    )
    setting = " with gradient checkpointing, which these cards need"
    assert lines[-2:] == [PAPER.time_line(CARDS[-1:]), PAPER.time_line(CARDS[3:-1], setting)]
    assert lines[-1].startswith(f"hours{setting}, computed")


# --- measured --------------------------------------------------------------------------------------------------


def test_the_measured_peak_stands_beside_the_planned_one() -> None:
    plan = Plan((Row("transformer", 3 * 2**30),), (), (), "a card", 80 * 2**30)
    line = peak_line(plan, allocated=2 * 2**30, reserved=5 * 2**29)
    assert line == "memory: 2.0 GiB allocated and 2.5 GiB reserved at the peak, 3.0 GiB planned"


@pytest.mark.slow
@pytest.mark.parametrize("peaks", [(3 * 2**30, 4 * 2**30), None])
def test_a_run_on_a_card_ends_with_its_peak(
    peaks: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = SimpleNamespace(train=lambda: SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr("pacorl.grpo.trainer.PolicyTrainer", lambda *_, **__: finished)
    monkeypatch.setattr("pacorl.report.page.write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("pacorl.runtime.processes.destroy_process_group", lambda: True)
    monkeypatch.setattr(train, "card_peaks", lambda: peaks)
    done = CliRunner().invoke(app, ["train-policy", str(recipe()), f"out={tmp_path / 'run'}"])
    assert done.exit_code == 0, done.output
    assert_peak(done.stdout, peaks)


def assert_peak(printed: str, peaks: tuple[int, int] | None) -> None:
    lines = [line for line in printed.splitlines() if line.startswith("memory:")]
    assert [line.startswith("memory: 3.0 GiB allocated and 4.0 GiB reserved") for line in lines] == [True] * bool(peaks)
    assert all(line.endswith(" planned") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("peaks", [(3 * 2**30, 4 * 2**30), None])
def test_a_character_s_training_on_a_card_ends_with_its_peak(
    peaks: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trained:
        page, adapter = tmp_path / "report.html", tmp_path / "best"

        def __init__(self, *_: object, **__: object) -> None: ...

        def train(self) -> Trained:
            return self

    monkeypatch.setattr("pacorl.character_training.character_trainer.CharacterTrainer", Trained)
    monkeypatch.setattr(train, "card_peaks", lambda: peaks)
    hero = make_hero(tmp_path / "zorp", pictures=3)
    done = CliRunner().invoke(app, ["train-character", str(hero), f"out={tmp_path / 'run'}"])
    assert done.exit_code == 0, done.output
    assert_peak(done.stdout, peaks)
