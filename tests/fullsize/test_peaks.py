"""What small cards hold at most, generator and judge at their published depth: the peaks of ledger and plan."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.fullsize.test_recipes import PEAK_GIB, WITHIN, check_loop
from tests.fullsize.traced import CONFIGS, deep_run, deep_sets

from pacorl.config.base import load
from pacorl.config.options import MEMORY
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies.flux import FLUX
from pacorl.plan.plan import plan_generation, plan_policy
from pacorl.plan.rows import PROCESS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.mark.nightly  # a trace per kind of block; with the fewest, klein's loop for edits is in test_recipes.py
@pytest.mark.parametrize("recipe", PEAK_GIB)
def test_a_small_card_s_loop_and_its_peak(recipe: str, tmp_path: Path) -> None:
    """Of generator and judge at their published depth, loading included."""
    deep = deep_run(recipe, tmp_path)
    check_loop(deep.traces[0])
    peak = max(deep(lambda trace, phase=phase: trace.phases[phase].peak) for phase in deep.traces[0].phases)
    assert peak <= PEAK_GIB[recipe] * 2**30
    assert plan_policy(load(PolicyConfig, CONFIGS / f"{recipe}.yaml", [])).peak_bytes == pytest.approx(peak, rel=WITHIN)


@pytest.mark.nightly
@pytest.mark.parametrize(("memory", "gib"), [("low", 14.5), ("lowest", 2.5)])
def test_sets_by_flux_fit_small_cards(memory: str, gib: float, tmp_path: Path) -> None:
    deep = deep_sets(tmp_path, memory=memory)
    peak = max(deep(lambda phases, phase=phase: phases[phase].peak) for phase in deep.traces[0])
    host = max(deep(lambda phases, phase=phase: phases[phase].main_peak) for phase in deep.traces[0]) + PROCESS
    assert peak <= gib * 2**30
    plan = plan_generation(FLUX.options_for(FLUX.published, dtype="bfloat16", **MEMORY[memory]), low=True)
    assert (plan.peak_bytes, plan.host_bytes) == pytest.approx((peak, host), rel=WITHIN)
