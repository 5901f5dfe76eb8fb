"""Every recipe's own loop on a pretended card: it runs, it waits for nothing, and it takes what its plan says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from qa.fullsize.published import QUARTERS, fewest_blocks, published_depth
from qa.fullsize.traced import CONFIGS, Trace, deep_run, new_folder, trace
from tiny_runs import JPEG_SIZE

from pacorl.config.base import load
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.plan.components import PROCESS
from pacorl.models.policies import POLICIES

pytestmark = pytest.mark.slow
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.startswith("tiny"))
"""Of published generators; the tiny ones run whole in tests of their own."""
PEAK_GIB = {"flux_t2is_24gb": 22.0, "klein_t2is_16gb": 14.5}
"""Promised to who has such a card, with buffers of unpacked weights and without CUDA's context; test_peaks.py."""
WITHIN = 0.05
"""How far plan and ledger may lie apart."""
NO_JUDGE = ["judge=none", "best_by=''", f"rewards=[{{name: '{JPEG_SIZE}'}}]", "evaluation.rewards=[]"]
COMMON = [*NO_JUDGE, "model.gradient_checkpointing=true"]
OTHERS = {
    "sd3": ["model.kind=sd3", *COMMON],
    "qwen_image": ["model.kind=qwen_image", *COMMON],
    "qwen_edit_plus": ["model.kind=qwen_edit_plus", *COMMON],
    "qwen_image_21": ["model.kind=qwen_image_21", *COMMON],
}
"""Kinds of generators without a recipe."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    # The ratio of values that nobody computed deviates from 1, of which a run warns.
    caplog.set_level(logging.ERROR)


def base_of(kind: str) -> str:
    """The recipe that OTHERS changes."""
    return "qwen_edit" if POLICIES[kind].edits else "flux_t2is"


def shallow(recipe: str, folder: Path, *overrides: str, resumes: bool = False) -> Trace:
    """A recipe's trace with the fewest blocks."""
    depth = fewest_blocks(load(PolicyConfig, CONFIGS / f"{recipe}.yaml", overrides).generator)
    return trace(recipe, folder, depth=depth, overrides=overrides, resumes=resumes)


def check_steps(traced: Trace) -> None:
    """No denoising step waits for the card, and steps without noise send it nothing."""
    assert traced.steps
    assert {step.to_host for step in traced.steps} == {0}
    assert sum(step.to_card > 0 for step in traced.steps) <= traced.times["SDE step"] < len(traced.steps)
    for name in ("forward", "trained forward"):
        assert (traced.single[name].to_card, traced.single[name].to_host) == (0, 0)
    assert traced.single["SDE step"].to_host == 0
    # Conditioning, sigma, and which child has which parent and noise.
    assert traced.single["SDE step"].to_card <= 12
    # A micro-batch of training is waited for once at most.
    assert traced.phases["train"].to_host <= traced.phases["train"].forwards


def apart(traced: Trace) -> dict[str, float]:
    """How far the plan lies above the ledger, phase by phase, as a share of what it takes at the published depth."""
    return {
        phase: (traced.planned[phase] - peak) / (peak + traced.left_out(phase)) for phase, peak in traced.peaks.items()
    }


def check_plan(traced: Trace) -> None:
    """What the card holds in each phase, and what main memory holds."""
    differences = apart(traced)
    assert all(abs(difference) <= WITHIN for difference in differences.values()), differences
    # Nor is there more between the phases.
    assert max(counts.peak for counts in traced.phases.values()) <= (1 + WITHIN) * traced.plan.peak_bytes
    host = max(counts.main_peak for counts in traced.phases.values()) + PROCESS
    assert traced.plan.host_bytes == pytest.approx(host, rel=WITHIN)


def check_loop(traced: Trace) -> None:
    check_steps(traced)
    check_plan(traced)
    # What scores on this card does so beside the sampling, unless the two take turns.
    scores_here = any(row.component.endswith("at work") for row in traced.plan.rows)
    assert ("judge" in traced.phases) == (scores_here and traced.config.memory == "normal")


QUICK = "flux_t2is_12gb"
"""In the smallest memory; the campaign runs the others. Of flux_t2is the loop is in test_layouts.py."""


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=() if recipe == QUICK else pytest.mark.campaign)
        for recipe in RECIPES
        if recipe not in PEAK_GIB
    ],
)
def test_a_recipe_s_loop(recipe: str, tmp_path: Path) -> None:
    check_loop(shallow(recipe, tmp_path, resumes=True))


@pytest.mark.campaign
@pytest.mark.parametrize("kind", OTHERS)
def test_a_kind_without_a_recipe(kind: str, tmp_path: Path) -> None:
    traced = shallow(base_of(kind), tmp_path, *OTHERS[kind])
    check_steps(traced)
    check_plan(traced)


WHOLE = {
    "flux": "flux_t2is",
    "kontext": "kontext_edit",
    "klein": "klein_edit_16gb",
    "qwen_edit": "qwen_edit",
    **dict.fromkeys(OTHERS),
}
"""By kind, the recipe whose blocks are all run; without one as in OTHERS."""


@pytest.mark.campaign
@pytest.mark.parametrize("kind", WHOLE)
def test_every_further_block_asks_for_the_same(kind: str, tmp_path: Path) -> None:
    """So what a few blocks say of the published depth is exact: here all of them run."""
    recipe, overrides = WHOLE[kind] or base_of(kind), OTHERS.get(kind, [])
    deep, depth = deep_run(recipe, tmp_path, overrides=overrides), published_depth(POLICIES[kind])
    whole = trace(recipe, new_folder(tmp_path, depth), depth=depth, quarters=QUARTERS, overrides=overrides)
    check_loop(whole)
    for phase, counts in whole.phases.items():
        for figure in ("forwards", "kernels", "flops", "bytes", "to_card", "to_host", "weights"):
            by_few = deep(lambda t, phase=phase, figure=figure: getattr(t.phases[phase], figure))
            assert by_few == pytest.approx(getattr(counts, figure)), (phase, figure)
        # Elsewhere what is largest may be another thing, or at another moment, with few blocks than with all.
        if phase.rpartition("/")[2] in {"sample", "decode", "score"}:
            assert deep(lambda t, phase=phase: t.phases[phase].peak) == pytest.approx(counts.peak, rel=0.01), phase


def test_every_kind_is_traced() -> None:
    recipes = {load(PolicyConfig, CONFIGS / f"{recipe}.yaml", []).model.kind for recipe in RECIPES}
    assert recipes | set(OTHERS) == set(WHOLE) == set(POLICIES)


@pytest.mark.campaign
@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "grpo_clip"])
def test_an_objective_s_loop(objective: str, tmp_path: Path) -> None:
    """The recipes train by grpo_clip."""
    kl = "objective.kl_weight=0.1"
    traced = shallow("flux_t2is", tmp_path, f"objective.name={objective}", kl, *NO_JUDGE)
    check_plan(traced)
    assert {step.to_host for step in traced.steps} == {0}
