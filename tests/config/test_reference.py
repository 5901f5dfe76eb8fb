"""Every key of a config is explained, in the terminal and on its page, and editors get a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.config.base import Section
from pacorl.config.reference import RUNS, keys_of, matching
from pacorl.config.table import Table
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["config", *words])


def test_every_key_says_what_it_means_and_has_a_default() -> None:
    keys = [key for model in RUNS.values() for key in keys_of(model)]
    assert [key.name for key in keys if not key.text.endswith((".", ")"))] == []
    assert [key.name for key in keys if not key.default and "section" not in key.type] == []
    assert {key.default for key in matching("sampling.size")} == {json.dumps(list(PolicyConfig().sampling.size))}
    assert [key.default for key in matching("optimizer.lr")] == ["0.0003", "0.0002", "0.0001"]


@pytest.mark.parametrize(
    ("section", "choice", "table"), [("model", "kind", POLICIES), ("objective", "name", OBJECTIVES)]
)
def test_the_options_of_every_entry_are_keys(section: str, choice: str, table: Table[Any]) -> None:
    keys = list(keys_of(PolicyConfig))
    for name in table:
        having = [key.name for key in keys if not key.only or name in key.only.split(": ")[1].split(", ")]
        assert {f"{section}.{field}" for field in table[name].options.model_fields} <= set(having)
    (kinds,) = [key.type for key in keys if key.name == f"{section}.{choice}"]
    assert kinds.split(" | ") == list(table)


def test_the_end_of_a_key_is_enough() -> None:
    assert run("seeds").stdout.startswith("sampling.tree.seeds: integer | null = null\n    Initial noises per prompt")
    assert "objective.beta: number = 0.1\n    (with name: diffusion_nft)" in run("objective").stdout


def test_every_section_that_a_file_may_be_has_a_schema() -> None:
    """Else a wrong key of it would end in a traceback."""
    sections = [Section]
    for section in sections:
        sections += section.__subclasses__()
        assert "properties" in section.model_json_schema()


def test_a_key_that_no_config_has_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'samplng.tree'; did you mean 'sampling.tree'"):
        matching("samplng.tree")


def test_editors_get_a_schema() -> None:
    schema = json.loads(run("--schema", "train-policy").stdout)
    assert schema["properties"].keys() == PolicyConfig.model_fields.keys()
