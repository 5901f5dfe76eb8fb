"""Seconds per epoch on the page of hardware: computed for each size of card, and measured by a day with one."""

from __future__ import annotations

from typing import Any

import pytest

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.plan.components import Row
from pacorl.lab.plan.cost import Cost, Load
from pacorl.lab.plan.plan import Plan
from tools import hardware

GIB = 2**30
TEN_PFLOP = Cost(
    phases={"sampling": Load(6e13), "training": Load(3e13, sent=1e11), "decoding": Load(1e13, moved=2e12)},
    judged=Load(1e12),
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


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_a_recipe_has_a_row_for_each_card_that_holds_it() -> None:
    """30 GiB: of the listed cards those of 48 and 80 GB, each with its own bounds."""
    plan = Plan((Row("transformer", 30 * GIB),), (), (), "CPU", None, cost=TEN_PFLOP)
    small, large = map(cells, hardware.seconds_rows("flux_t2is_1gpu", plan, {"NVIDIA L40S": "12"}).splitlines())
    assert small[1:4] == ["1", "10", "48 GB, L40S"]
    sampling, training, decoding = 6e15 / (0.5 * 362e12), 1e13 / (0.8 * 31.5e9), 2e14 / (0.8 * 864e9)
    assert small[4:8] == [f"{sampling:.3g}", f"{training:.3g} *bus*", f"{decoding:.3g} *memory*", ""]
    assert small[8:] == [f"{sampling + training + decoding:.0f}", "12"]
    assert large[3] == "80 GB, H100 80GB HBM3"
    assert large[9] == ""

    several = cells(hardware.seconds_rows("flux_t2is", plan, {}).splitlines()[1])
    assert several[4] == f"{6e15 / 7 / (0.5 * 989.4e12):.3g}"


def test_a_day_on_a_card_fills_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a card that the computed table leaves out too."""
    monkeypatch.setattr(hardware, "RECIPES", {"flux_t2is_own": 1})
    plan = Plan((Row("transformer", 30 * GIB),), (), (), "CPU", None, cost=TEN_PFLOP)
    monkeypatch.setattr(hardware, "planned", lambda run: plan)
    records = [
        *measured("compiled", 8, 0.01, phase="sample"),
        *measured("compiled", 2, 0.04, phase="train", checkpointing=True),
        *measured("compiled", 1, 0.04, phase="train", checkpointing=True),
        *measured("compiled", 1, 0.03, phase="train", checkpointing=False),
    ]
    for name, sold in (("NVIDIA H200", "141 GB, H200"), ("NVIDIA H100 80GB HBM3", "80 GB, H100 80GB HBM3")):
        text = hardware.page([{"figure": "device", "device": name, "torch": "2.11.0"}, *records])
        assert f"on an {name}, torch 2.11.0" in text
        rows = [cells(line) for line in text.splitlines() if line.startswith("| [flux_t2is_own.yaml]")]
        filled = {row[3]: row[9] for row in rows if len(row) == 10}
        assert float(filled.pop(sold)) > 1
        assert set(filled.values()) <= {""}
        assert f"| {sold} | 989.4 |" in text
    assert "H200" not in hardware.page()


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
        (["model.compile=blocks"], "compiled"),
        (["model.compile=blocks", "model.quantize=int8"], "compiled-int8"),
    ],
)
def test_a_recipe_has_a_form_of_the_benchmark(settings: list[str], form: str) -> None:
    assert hardware.form_of(load(PolicyConfig, None, settings)) == form
