"""Seconds per epoch on the page of hardware: computed for each size of card, and measured by a day with one."""

from __future__ import annotations

from typing import Any

import pytest

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.plan.components import Row
from pacorl.lab.plan.cost import Cost
from pacorl.lab.plan.plan import Plan
from tools import hardware

GIB = 2**30
TEN_PFLOP = Cost(
    image=1e14,
    judged=1e12,
    questions=6,
    judges_here=False,
    judge_servers=1,
    samples=100,
    epochs=1,
    evaluations=(),
    world=1,
)


def measured(form: str, batch: int, seconds: float, **phase: Any) -> list[dict[str, Any]]:
    """Records at two depths: so many seconds a double block, and none besides."""
    common = {"form": form, "batch": batch, "side": 512, **phase}
    return [{**common, "blocks": blocks, "seconds": seconds * blocks} for blocks in (4, 8)]


def test_a_card_that_is_too_small_has_no_seconds() -> None:
    plan = Plan((Row("transformer", 30 * GIB),), (), (), "CPU", None, cost=TEN_PFLOP)
    row = hardware.seconds_row("flux_t2is_1gpu", plan, "")
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    seconds = 1e16 / (0.3 * 989.4e12)
    assert cells[1:] == ["1", "10", "–", "–", "–", f"{1e16 / (0.3 * 362e12):.0f}", f"{seconds:.0f}", ""]
    several = hardware.seconds_row("flux_t2is", plan, "12")
    assert [cell.strip() for cell in several.split("|")[-3:-1]] == [f"{seconds / 7:.0f}", "12"]


def test_a_measured_epoch_is_its_forwards_at_full_depth() -> None:
    settings = ["group_size=16", "prompts_per_epoch=42", "sampling.steps=10", "sampling.suffix={}"]
    run = load(PolicyConfig, None, [*settings, "model.gradient_checkpointing=true"])
    forward = measured("fused", 1, 0.01, phase="sample")
    step = measured("fused", 1, 0.04, phase="train", checkpointing=True)
    seconds = 672 / 7 * (10 * 19 * 0.01 + 19 * 0.04)
    assert hardware.measured_epoch(run, forward + step, processes=7) == f"{seconds:.0f}"
    assert hardware.measured_epoch(run, forward, processes=7) == ""  # no trained step
    assert hardware.measured_epoch(run, [], processes=7) == ""
    without = load(PolicyConfig, None, [*settings, "model.gradient_checkpointing=auto"])
    assert hardware.measured_epoch(without, forward + step, processes=7) == ""
    small = load(PolicyConfig, None, [*settings, "sampling.size=[256,256]"])
    assert hardware.measured_epoch(small, forward + step, processes=7) == ""


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ([], "fused"),
        (["sampling.fuse_lora=false"], "bf16"),
        (["model.quantize=int8"], "int8"),
        (["memory=lowest"], "streamed"),
        (["model.quantize=int8", "sampling.products=w8a8"], "w8a8"),
    ],
)
def test_a_recipe_has_a_form_of_the_benchmark(settings: list[str], form: str) -> None:
    assert hardware.form_of(load(PolicyConfig, None, settings)) == form
