"""Every recipe's own loop on a pretended card: it runs, it waits for nothing, and it takes what its plan says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.fullsize.traced import trace

pytestmark = pytest.mark.slow
LOWEST = "flux_t2is_24gb memory=lowest model.compile=none evaluation.batch=2"
RECIPES = {LOWEST: 0.3, "flux_t2is_1gpu": 0.8, "kontext_edit": 0.8, "qwen_edit": 0.8}
"""A recipe of each family → GiB by which plan and loop may lie apart: a hundredth of the card that it is for."""


@pytest.mark.parametrize(
    "recipe", [LOWEST, *(pytest.param(recipe, marks=pytest.mark.nightly) for recipe in RECIPES if recipe != LOWEST)]
)
def test_a_recipe_s_loop(recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the fewest blocks."""
    caplog.set_level(logging.ERROR)  # a ratio of values that nobody computed is not 1, of which a run warns
    name, *changes = recipe.split()
    # The last block of Qwen-Image trains nothing on its text.
    peaks, most, plan = trace(name, tmp_path, units=2 if name == "qwen_edit" else 1, overrides=changes)

    planned, apart = plan.memory.phases, RECIPES[recipe] * 2**30
    for phase, peak in peaks.items():
        assert abs(planned[phase] - peak) < apart, (phase, planned[phase], peak)
    # Nor is there more between the phases.
    assert most < plan.peak_bytes + apart
