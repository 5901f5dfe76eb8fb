"""What generators may cost at the published depth: forwards, trained steps, images, and loading."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
from budgets import ALONE, FLUX, FORMS, cost_rows, image_rows, images_of, page, traced_generators
from traced import CONFIGS, Deep, Trace

from pacorl.config.base import load
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.plan.components import PROCESS
from pacorl.lab.plan.plan import plan_policy

pytestmark = pytest.mark.campaign
WITHIN = 0.05
PAGE = Path(__file__).parents[2] / "docs" / "budgets.md"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Deep[Trace]]:
    return traced_generators(tmp_path_factory.mktemp("generators"), [FLUX])


def test_the_page_s_rows_of_flux_are_of_today(traced: dict[str, Deep[Trace]]) -> None:
    rows = PAGE.read_text().splitlines()
    assert [row for row in [*cost_rows(traced), *image_rows(traced)] if row not in rows] == []


def test_an_image_takes_what_is_promised(traced: dict[str, Deep[Trace]]) -> None:
    images = dict(images_of(traced))
    assert len(images) == 3
    for form, value in images.items():
        assert value <= FORMS[form][1], form


def test_the_page_of_budgets_is_of_today(tmp_path: Path) -> None:
    """All generators, and an image without gradient checkpointing."""
    traced = traced_generators(tmp_path)
    assert page(traced) == PAGE.read_text()
    assert all(value <= FORMS[form][1] for form, value in images_of(traced))


def test_seven_processes_share_what_they_load(traced: dict[str, Deep[Trace]]) -> None:
    """Pages of the files once, and of each process what is its own."""
    flux = traced[FLUX]
    # Each phase by itself: with a few blocks the encoders are what is largest, with all of them the transformer.
    host = max(flux(partial(loaded, phase=phase)) for phase in ("load", "encode", "place"))
    assert host <= 40 * 2**30
    plan = plan_policy(load(PolicyConfig, CONFIGS / "flux_t2is.yaml", ALONE), world=7)
    assert plan.phase_bytes("encode", place="host") == pytest.approx(host, rel=WITHIN)


def loaded(traced: Trace, *, phase: str) -> float:
    counts = traced.phases[phase]
    return 7 * (counts.host_peak + PROCESS) + counts.pages_peak
