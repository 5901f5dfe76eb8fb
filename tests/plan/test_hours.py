"""Hours of a run: the forwards that are counted are those that an epoch makes, and what they add up to."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import JPEG_SIZE
from toy_world import toy_config, toy_world

from pacorl.grpo import epoch
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.plan.hours import CARDS, forwards_of, hours_of
from pacorl.plan.peaks import Memory
from pacorl.plan.plan import Plan

PAPER = ["group_size=16", "sampling.steps=10", "sampling.suffix={}", "sampling.batch=16"]
ONE_START = "sampling.tree={seeds: 1}"
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
    assert forwards_of(config)[2:] == pytest.approx(forwards)
    training = PolicyTrainer(config)
    counted, learn = Counted(training.lora.transformer), epoch.learn

    def learning(*args: Any) -> Any:
        counted.phase = "other_policies"
        return learn(*args)

    monkeypatch.setattr(epoch, "learn", learning)
    training.run_epoch()
    training.close()
    images = 2 * config.group_size
    phases = ("sampling", "training", "other_policies")
    assert tuple(counted.count[phase] / images for phase in phases) == pytest.approx(forwards)


def test_hours_add_up_and_divide_among_the_processes() -> None:
    def hours(**settings: Any) -> tuple[float, float]:
        return hours_of(900e12, **settings)[card.name]

    card = CARDS[-1]
    computed = 900e12 / (card.tflops * 1e12 / 2) / 3600
    assert hours() == pytest.approx((1.06 * computed, 1.10 * computed))
    assert hours(processes=2) == pytest.approx((1.06 * computed / 2, 1.10 * computed / 2))
    assert hours(memory="lowest")[1] == pytest.approx(1.59 * computed)
    assert hours(scoring=900e12) == pytest.approx((1.06 * computed, 2 * 1.10 * computed))


def test_hours_are_those_of_the_listed_cards_that_hold_the_run() -> None:
    hours = {card.name: (2.0, 3.0) for card in CARDS}
    plan = Plan(Memory({"train": 30 * 2**30}), hours=hours, processes=2, device="no card here", device_bytes=None)

    def shown(plan: Plan) -> list[str]:
        """The cards with hours."""
        lines = [line for line in str(plan).splitlines() if line.startswith("hours on 2 ×")]
        assert all(line.endswith("2.0 to 3.0") for line in lines)
        return [card.name for card in CARDS if any(card.name in line for line in lines)]

    assert shown(plan) == [card.name for card in CARDS[3:]]
    assert shown(dataclasses.replace(plan, device="a card of 80 GB", device_bytes=80 * 2**30)) == [
        card.name for card in CARDS[4:]
    ]
    assert shown(dataclasses.replace(plan, device=CARDS[-1].name, device_bytes=141 * 10**9)) == [CARDS[-1].name]
