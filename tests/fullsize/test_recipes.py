"""Every recipe's own loop on a pretended card: it runs, it waits for nothing, and it takes what its plan says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.fullsize.traced import CONFIGS, Trace, trace

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
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


def check_loop(traced: Trace) -> None:
    for phase, peak in traced.peaks.items():
        difference = abs(traced.planned[phase] - peak)
        assert difference < max(SMALL, WITHIN * peak), (phase, traced.planned[phase], peak)
    # Nor is there more between the phases.
    assert max(traced.phases.values()) <= (1 + WITHIN) * traced.plan.peak_bytes
    # A judge on this card scores beside the sampling, unless the two take turns.
    scores_here = "score" in traced.planned
    assert ("judge" in traced.phases) == (scores_here and traced.config.memory == "normal")


@pytest.mark.parametrize(
    "recipe", [RECIPES[0], *(pytest.param(recipe, marks=pytest.mark.nightly) for recipe in RECIPES[1:])]
)
def test_a_recipe_s_loop(recipe: str, tmp_path: Path) -> None:
    """With the fewest blocks."""
    name, *changes = recipe.split()
    spec = load(PolicyConfig, CONFIGS / f"{name}.yaml", changes).generator
    depth = fewest_blocks(published_depth(spec.parts["transformer"]))
    check_loop(trace(name, tmp_path, depth=depth, overrides=changes))
