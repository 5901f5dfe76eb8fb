"""What every table of a config's sections promises: a config names its entries and keeps their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pacorl.config.base import dump, load
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES

CHOICES = [
    *(pytest.param(POLICIES[name], f"model.kind={name}", "model.dtype=float32", id=name) for name in POLICIES),
    *(
        pytest.param(OBJECTIVES[name], f"objective.name={name}", "objective.kl_weight=0.5", id=name)
        for name in OBJECTIVES
    ),
]
"""Spec, what names it in a config, and a setting of its section."""


@pytest.mark.parametrize(("spec", "choice", "setting"), CHOICES)
def test_a_config_names_it_and_keeps_its_settings(spec: Any, choice: str, setting: str, tmp_path: Path) -> None:
    section, _, key = choice.partition("=")[0].partition(".")
    assert getattr(spec.options(), key) == choice.partition("=")[2], "the options' name is not the table's"
    run = load(PolicyConfig, None, [choice, setting])
    chosen = getattr(run, section)
    assert type(chosen) is spec.options
    path = tmp_path / "run.yaml"
    path.write_text(dump(run))
    assert load(PolicyConfig, path) == run
    assert spec.options.__doc__
