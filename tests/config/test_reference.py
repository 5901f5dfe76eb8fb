"""Every key of a config is explained in the terminal."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from pacorl.cli import app
from pacorl.config.reference import RUNS, keys_of, matching
from pacorl.config.table import Table
from pacorl.config.user_files import FORM
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES


def shown(key: str) -> str:
    return CliRunner().invoke(app, ["config", key]).stdout


def test_every_key_says_what_it_means() -> None:
    keys = {key: text for model in RUNS.values() for key, text in keys_of(model).items()}
    assert [key for key, text in keys.items() if not text.endswith((".", ")"))] == []
    assert not any("  " in text.replace("\n    ", "") for text in keys.values())


@pytest.mark.parametrize(
    ("section", "choice", "table"), [("model", "kind", POLICIES), ("objective", "name", OBJECTIVES)]
)
def test_the_options_of_every_entry_are_keys(section: str, choice: str, table: Table[Any]) -> None:
    keys = keys_of(PolicyConfig)
    for name in table:
        assert {f"{section}.{field}" for field in table[name].options.model_fields} <= keys.keys()
    assert f"{section}.{choice}: {' | '.join([*table, FORM])}\n" in keys[f"{section}.{choice}"]


def test_a_key_is_found_by_its_parts_and_a_wrong_one_names_the_nearest() -> None:
    assert "train-character: character, out" in shown("")
    assert shown("tree.seeds").startswith("train-policy sampling.tree.seeds: null\n    Initial noises per prompt")
    assert "objective.beta: 0.1\n" in shown("objective")
    assert "consistency: temperature = 1.0, ask: theme | criteria = 'theme', contrast = 0.0" in shown("rewards.args")
    assert 'model.compile: none | blocks = "none"' in shown("compile")
    assert "sampling.size: [512, 512]" in shown("sampling")
    assert [text.split("\n")[0] for text in matching("optimizer.lr")] == [
        "train-policy optimizer.lr: 0.0003",
        "train-reward optimizer.lr: 0.0002",
        "train-character optimizer.lr: 0.0001",
    ]
    for wrong, meant in {
        "samplng.tree": "sampling.tree",
        "ema": "optimizer.ema_decay",
        "credt": "credit",
        "kl": "objective.kl_weight",
    }.items():
        with pytest.raises(ValueError, match=f"'{wrong}'; did you mean .*'{meant}'"):
            matching(wrong)
