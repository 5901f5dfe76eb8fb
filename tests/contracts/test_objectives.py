"""Every objective of the table keeps the contract, which refuses wrong versions of each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pacorl.core.objectives import OBJECTIVES
from pacorl.testing import check_objective

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def negative(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
    value, metrics = loss(batch, options)
    return -value, metrics


def all_used(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
    if hasattr(batch, "used_B"):
        return loss(dataclasses.replace(batch, used_B=batch.used_B | True), options)
    return loss(dataclasses.replace(batch, advantage_B=batch.advantage_B + 0.5), options)


def per_sample(loss: Callable[..., Loss], batch: Any, options: Any) -> Loss:
    value, metrics = loss(batch, options)
    return value.expand(3), metrics


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("change", [negative, all_used, per_sample])
def test_a_wrong_loss_breaks_the_contract(name: str, change: Callable[..., Loss]) -> None:
    right = OBJECTIVES[name]

    def loss(batch: Any, options: Any) -> Loss:
        """A wrong version of arXiv 2505.05470."""
        return change(right.loss, batch, options)

    with pytest.raises((AssertionError, RuntimeError)):
        check_objective(dataclasses.replace(right, loss=loss))
