"""Hours of a run: the forwards that are counted are those that an epoch makes, and what they add up to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import JPEG_SIZE, planned
from toy_world import toy_config, toy_world

from pacorl.grpo import epoch
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.plan.hours import CARDS, Card, Cost, forwards_of
from pacorl.plan.memory import Memory
from pacorl.plan.plan import Plan

PAPER = ["group_size=16", "sampling.steps=10", "sampling.suffix={}", "sampling.batch=16"]
ONE_START = "sampling.tree={seeds: 1}"
SERVED = "judge.checkpoint=http://127.0.0.1:1/v1#one"
NFT = "objective.name=diffusion_nft"
FORMS = [
    ([], (10, 1, 0)),
    ([ONE_START], (8 + 2 / 16, 1 / 16, 0)),
    ([ONE_START, "sampling.suffix={solver: ab2, steps: 4}"], (4 + 2 / 16, 1 / 16, 0)),
    (["sampling.tree={seeds: 2}"], (8 + 4 / 16, 2 / 16, 0)),
    (["sampling.tree={seeds: 1, branches: [4, 4]}", "sampling.sde_steps=[1,4]"], (5 + 14 / 16, 5 / 16, 0)),
    ([ONE_START, "objective.kl_weight=0.1"], (8 + 2 / 16, 1 / 16, 1 / 16)),
    ([NFT, "objective.kl_weight=0.1"], (10, 1, 2)),
    ([NFT, ONE_START], (8 + 2 / 16, 1, 1)),
    (["objective.name=awm"], (10, 1, 0.5)),
]
"""Settings → forwards per image: sampling, training, other policies."""


class Counted:
    """Counts the rows that pass a transformer: sampled, trained, and of another policy within the update."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.count: Counter[str] = Counter()
        self.phase = "sampling"
        transformer.register_forward_pre_hook(self._forward)

    def _forward(self, module: torch.nn.Module, args: Any) -> None:
        self.count["training" if torch.is_grad_enabled() else self.phase] += len(args[0])


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    with toy_world():
        yield


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [pytest.param(*form, marks=pytest.mark.slow if number % 2 else []) for number, form in enumerate(FORMS)],
)
def test_the_forwards_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], forwards: tuple[float, float, float]
) -> None:
    """Two groups in two updates, through the trainer: the plan's count, the epoch's and the arithmetic's are one."""
    fixed = ["judge=none", f"rewards=[{{name: '{JPEG_SIZE}'}}]", "sampling.sde_steps=[1]"]
    config = toy_config(tmp_path / "run", *fixed, *PAPER, *settings)
    expected = dict(zip(("sampling", "training", "other_policies"), forwards, strict=True))
    assert forwards_of(config).per_image == pytest.approx(expected)
    training = PolicyTrainer(config)
    counted, learn = Counted(training.lora.transformer), epoch.learn

    def learning(*args: Any) -> Any:
        counted.phase = "other_policies"
        return learn(*args)

    monkeypatch.setattr(epoch, "learn", learning)
    training.run_epoch()
    training.close()
    images = 2 * config.group_size
    assert {phase: counted.count[phase] / images for phase in expected} == pytest.approx(expected)


def test_hours_add_up_and_divide_among_the_processes() -> None:
    cost = Cost(900e12, saved=0.0, form="bfloat16", processes=2)
    card = Card("100 TFLOP/s by the share that is assumed", 80, tflops=200)
    computed = 9 / 2 / 3600
    assert cost.hours(card) == (pytest.approx(1.06 * computed), pytest.approx(1.10 * computed))
    assert dataclasses.replace(cost, saved=3600e9).hours(card)[0] == pytest.approx(1.06 * computed + 1)
    assert dataclasses.replace(cost, form="streamed").hours(card)[1] == pytest.approx(1.59 * computed)

    # On the card that is here, or on the smallest that hold the run; none for a run of minutes.
    memory = Memory({"train": 30 * 2**30})
    long = dataclasses.replace(cost, flops=1e22)
    elsewhere = str(Plan(memory=memory, cost=long, device="CPU", device_bytes=None))
    assert f"2 × {CARDS[3].name}" in elsewhere
    assert CARDS[2].name not in elsewhere
    here = Plan(memory=memory, cost=long, device=CARDS[-1].name, device_bytes=141 * 10**9)
    assert f"2 × {CARDS[-1].name}" in str(here).splitlines()[-1]
    assert "hours" not in str(dataclasses.replace(here, cost=cost))


@pytest.mark.slow
def test_questions_are_counted_as_rewards_ask_them() -> None:
    """By a judge of this process: four panels are encoded once, and three of six questions' images are read once."""

    def judging(*overrides: str) -> float:
        costs = [planned(*overrides, judge).cost for judge in ("judge.checkpoint=tiny", SERVED)]
        assert costs[0]
        assert costs[1]
        return costs[0].flops - costs[1].flops

    alone = judging()
    more = judging("rewards=[{name: consistency}, {name: panel_match}]")
    assert alone < more < 10 / 6 * alone + alone
    assert judging("judge.symmetric=true") == pytest.approx(2 * alone)
    two = planned("processes=2").cost
    assert two
    assert two.processes == 2
    contrast = "rewards=[{{name: consistency, args: {{contrast: {}}}}}]"
    plain, across = (judging(contrast.format(weight), "sampling.batch=4", "group_size=16") for weight in (0, 1))
    assert 1.1 < across / plain <= 1.5
