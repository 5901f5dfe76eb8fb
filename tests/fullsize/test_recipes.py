"""Every recipe's own loop on a pretended card: it runs, it waits for nothing, and it takes what its plan says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.fullsize.traced import CONFIGS, trace

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan.passes import fewest_blocks, published_depth

pytestmark = pytest.mark.slow
LOWEST = "flux_t2is_24gb memory=lowest model.compile=none evaluation.batch=2"
RECIPES = (LOWEST, "flux_t2is_1gpu", "kontext_edit", "qwen_edit")
"""A recipe of each family, the first in the smallest memory."""
WITHIN = 0.05
"""How far plan and loop may lie apart."""
SMALL = 0.3 * 2**30
"""A difference in bytes that decides nothing."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    # The ratio of values that nobody computed deviates from 1, of which a run warns.
    caplog.set_level(logging.ERROR)


@pytest.mark.parametrize(
    "recipe", [RECIPES[0], *(pytest.param(recipe, marks=pytest.mark.nightly) for recipe in RECIPES[1:])]
)
def test_a_recipe_s_loop(recipe: str, tmp_path: Path) -> None:
    """With the fewest blocks."""
    name, *changes = recipe.split()
    spec = load(PolicyConfig, CONFIGS / f"{name}.yaml", changes).generator
    depth = fewest_blocks(published_depth(spec.parts["transformer"]))

    traced = trace(name, tmp_path, depth=depth, overrides=changes)

    planned = traced.plan.memory.phases
    for phase, peak in traced.peaks.items():
        assert abs(planned[phase] - peak) < max(SMALL, WITHIN * peak), (phase, planned[phase], peak)
    # Nor is there more between the phases.
    most = max(traced.card.peaks.values())
    assert most - traced.plan.peak_bytes < max(SMALL, WITHIN * most)
