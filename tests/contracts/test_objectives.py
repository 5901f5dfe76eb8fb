"""What every objective of the table promises, and that the contract sees versions that break it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor

from pacorl.core.objectives import OBJECTIVES, ObjectiveOptions, ObjectiveSpec, Step
from pacorl.testing import check_objective

EXAMPLES = Path(__file__).parents[2] / "examples"
CLIPPED = ["grpo_clip", "grpo_guard", "awm"]
Loss = tuple[Tensor, dict[str, Any]]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_keeps_the_contract(name: str) -> None:
    check_objective(OBJECTIVES[name])


@pytest.mark.parametrize("entry", ["reinforce.py:REINFORCE", "contrast.py:CONTRAST"])
def test_the_examples_of_the_docs_keep_the_contract(entry: str) -> None:
    check_objective(OBJECTIVES.named(f"{EXAMPLES / entry}"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_its_docstring_cites_a_paper(name: str) -> None:
    """By a year, as in `Williams (1992)`, or an arXiv number."""
    assert re.search(r"\b(19|20)\d\d\b|\b\d{4}\.\d{4,5}\b", OBJECTIVES[name].loss.__doc__ or "")


def changed(spec: ObjectiveSpec, change: Callable[[Callable[..., Loss], Any, Any], Loss]) -> ObjectiveSpec:
    """The objective with another loss."""

    def loss(batch: Any, options: Any) -> Loss:
        """A wrong version of arXiv 2505.05470."""
        return change(spec.loss, batch, options)

    return dataclasses.replace(spec, loss=loss)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_wrong_sign_is_seen(name: str) -> None:
    def negative(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
        value, metrics = loss(batch, options)
        return -value, metrics

    with pytest.raises(AssertionError, match="advantage 1 less likely"):
        check_objective(changed(OBJECTIVES[name], negative))


@pytest.mark.parametrize("name", CLIPPED)
def test_a_ratio_that_is_never_clipped_is_seen(name: str) -> None:
    def unclipped(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
        return loss(batch, options.model_copy(update={"clip_range": 1e9}))

    with pytest.raises(AssertionError, match="beyond the clip range"):
        check_objective(changed(OBJECTIVES[name], unclipped))


def test_a_range_of_another_name_is_seen() -> None:
    class Bounded(ObjectiveOptions):
        name: Literal["bounded"] = "bounded"
        epsilon: float = 0.2

    def bounded(step: Step, options: Bounded) -> Loss:
        """A ratio that is never clipped, as in Williams (1992)."""
        return -((step.log_prob_B - step.old_log_prob_B).exp() * step.advantage_B).mean(), {}

    spec = ObjectiveSpec(Bounded, bounded, needs="path")
    with pytest.raises(AssertionError, match="no option clip_… bounds the ratio"):
        check_objective(spec)
    check_objective(dataclasses.replace(spec, unclipped=True))


@pytest.mark.parametrize("name", CLIPPED)
def test_exchanged_bounds_of_the_clip_are_seen(name: str) -> None:
    """A negative range is clip(ρ, 1+ε, 1−ε)."""

    def exchanged(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
        return loss(batch, options.model_copy(update={"clip_range": -options.clip_range}))

    with pytest.raises(AssertionError):
        check_objective(changed(OBJECTIVES[name], exchanged))


@pytest.mark.parametrize("name", CLIPPED)
def test_the_larger_of_both_bounds_is_seen(name: str) -> None:
    """The maximum in place of the minimum: the loss of the opposite advantage, negated."""

    def optimistic(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
        value, metrics = loss(dataclasses.replace(batch, advantage_B=-batch.advantage_B), options)
        return -value, metrics

    with pytest.raises(AssertionError, match=r"beyond the clip range|pushed back"):
        check_objective(changed(OBJECTIVES[name], optimistic))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_sample_that_must_not_be_trained_on_and_is_is_seen(name: str) -> None:
    def all_used(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
        advantage_B = batch.advantage_B + 0.5
        if hasattr(batch, "used_B"):
            return loss(dataclasses.replace(batch, advantage_B=advantage_B, used_B=batch.used_B | True), options)
        return loss(dataclasses.replace(batch, advantage_B=advantage_B), options)

    with pytest.raises(AssertionError, match="an unused sample has a gradient"):
        check_objective(changed(OBJECTIVES[name], all_used))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_per_sample_is_seen(name: str) -> None:
    def per_sample(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
        value, metrics = loss(batch, options)
        return value.expand(3), metrics

    with pytest.raises((AssertionError, RuntimeError)):
        check_objective(changed(OBJECTIVES[name], per_sample))
