"""Every key of a config is explained, in the terminal and on its page, and editors get a schema."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from pacorl.cli import app
from pacorl.config.reference import keys, matching
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["config", *words])


def test_every_key_says_what_it_means() -> None:
    assert [key.name for key in keys() if not key.text.endswith((".", ")"))] == []
    assert [key.name for key in keys() if not key.default and "section" not in key.type] == []


def test_defaults_are_those_of_a_config() -> None:
    assert {key.default for key in matching("sampling.size")} == {json.dumps(list(PolicyConfig().sampling.size))}
    assert [key.default for key in matching("optimizer.lr")] == ["0.0003", "0.0002", "0.0001"]


def test_the_options_of_every_entry_are_keys() -> None:
    names = {(key.name, key.only) for key in keys()}
    for section, choice, table in (("model", "kind", POLICIES), ("objective", "name", OBJECTIVES)):
        for entry in table:
            fields = set(table[entry].options.model_fields)
            has = {
                name.removeprefix(f"{section}.")
                for name, only in names
                if not only or entry in only.split(": ")[1].split(", ")
            }
            assert fields <= has, entry
        (kinds,) = {key.type for key in keys() if key.name == f"{section}.{choice}"}
        assert kinds.split(" | ") == list(table)


def test_the_end_of_a_key_is_enough() -> None:
    assert run("seeds").stdout.startswith("sampling.tree.seeds: integer | none = null\n    Initial noises per prompt")
    assert "objective.beta: number = 0.1\n    (with name: diffusion_nft)" in run("objective").stdout


def test_a_key_that_no_config_has_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no config has the key 'samplng.tree'; did you mean 'sampling.tree'"):
        matching("samplng.tree")


def test_editors_get_a_schema() -> None:
    schema = json.loads(run("--schema", "train-policy").stdout)
    assert schema["properties"].keys() == PolicyConfig.model_fields.keys()
    assert json.loads(run("--schema", "train-reward").stdout)["properties"].keys() > {"loss", "data"}
