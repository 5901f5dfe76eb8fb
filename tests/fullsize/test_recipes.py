"""Every recipe's own loop on a pretended card: it runs, it waits for nothing, and it takes what its plan says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.fullsize.traced import CONFIGS, Trace, trace

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan.memory import PROCESS
from pacorl.plan.passes import fewest_blocks, published_depth

pytestmark = pytest.mark.slow
LOWEST = "flux_t2is_24gb memory=lowest model.compile=none evaluation.batch=2"
RECIPES = (LOWEST, "flux_t2is_1gpu", "kontext_edit", "qwen_edit")
"""A recipe of each family, the first in the smallest memory."""
WITHIN = 0.05
"""How far plan and ledger may lie apart."""
SMALL = 0.15 * 2**30
"""A difference in bytes that decides nothing, in a phase of 2 GiB or less."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    # The ratio of values that nobody computed deviates from 1, of which a run warns.
    caplog.set_level(logging.ERROR)


def apart(traced: Trace) -> dict[str, float]:
    """How far the plan lies above the ledger, phase by phase, as a share of what it takes at the published depth."""
    shares = {}
    for phase, peak in traced.peaks.items():
        difference = traced.planned[phase] - peak
        shares[phase] = 0.0 if abs(difference) < SMALL else difference / (peak + traced.left_out(phase))
    return shares


def check_plan(traced: Trace) -> None:
    """What the card holds in each phase, and what main memory holds."""
    differences = apart(traced)
    assert max(map(abs, differences.values())) <= WITHIN, differences
    # Nor is there more between the phases.
    assert max(counts.peak for counts in traced.phases.values()) <= (1 + WITHIN) * traced.plan.peak_bytes
    host = max(counts.main_peak for counts in traced.phases.values()) + PROCESS
    assert traced.plan.memory.host == pytest.approx(host, rel=WITHIN)


def check_loop(traced: Trace) -> None:
    check_plan(traced)
    # What scores on this card does so beside the sampling, unless the two take turns.
    scores_here = "score" in traced.planned
    assert ("judge" in traced.phases) == (scores_here and traced.config.memory == "normal")


@pytest.mark.parametrize(
    "recipe", [RECIPES[0], *(pytest.param(recipe, marks=pytest.mark.nightly) for recipe in RECIPES[1:])]
)
def test_a_recipe_s_loop(recipe: str, tmp_path: Path) -> None:
    """With the fewest blocks, and resumed."""
    name, *changes = recipe.split()
    spec = load(PolicyConfig, CONFIGS / f"{name}.yaml", changes).generator
    depth = fewest_blocks(published_depth(spec.parts["transformer"]))
    check_loop(trace(name, tmp_path, depth=depth, overrides=changes, resumes=True))
