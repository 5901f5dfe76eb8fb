"""Old config keys load under their new names, and say so."""

from __future__ import annotations

import pytest

from pacorl.config.upgrade import DROPPED, RENAMED, RETIRED, upgrade


def test_old_keys_move_to_their_new_names() -> None:
    document = {"model": {"text_tokens": 64, "kind": "flux"}, "sampling": {"noise_steps": [1]}, "seed": 1}
    notices = upgrade(document, "PolicyRun")
    assert document == {
        "model": {"max_sequence_length": 64, "kind": "flux"}, "sampling": {"sde_steps": [1]}, "seed": 1
    }  # fmt: skip
    assert notices[0] == "model.text_tokens is now called model.max_sequence_length"
    assert len(notices) == 2
    assert upgrade(document, "PolicyRun") == []


def test_a_key_under_both_names_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.text_tokens is now called model.max_sequence_length, and both are given"
    ):
        upgrade({"model": {"text_tokens": 1, "max_sequence_length": 2}}, "PolicyRun")


def test_a_dropped_key_may_only_say_what_it_always_said() -> None:
    document = {"adapter": {"dropout": 0.0, "rank": 4}}
    assert upgrade(document, "PolicyRun") == []
    assert document == {"adapter": {"rank": 4}}
    with pytest.raises(ValueError, match=r"adapter.dropout 0.1 is no longer a setting"):
        upgrade({"adapter": {"dropout": 0.1}}, "PolicyRun")


def test_a_retired_key_may_have_any_value_and_says_what_happens_now() -> None:
    document = {"advantages": {"min_valid": 4, "clip": 3.0}, "report_every": 0, "watch": {"average": 1}}
    assert upgrade(document, "PolicyRun") == [
        "watch is now called monitor",
        "advantages.min_valid is no longer a setting: groups with fewer than 2 judged samples are dropped",
        "monitor.average is no longer a setting: an epoch's signs are averaged over 3 epochs",
        "report_every is no longer a setting: report.html is built with each evaluation and each checkpoint",
    ]
    assert document == {"advantages": {"clip": 3.0}, "monitor": {}}


@pytest.mark.parametrize("document", [{"model": None}, {"model": [1]}, {"adapter": "text"}, {}])
def test_odd_documents_are_left_to_the_config_itself(document: dict[str, object]) -> None:
    before = dict(document)
    assert upgrade(document, "PolicyRun") == []
    assert document == before


def test_every_new_name_is_a_key_of_its_run() -> None:
    from pacorl.config.judge_run import RewardRun
    from pacorl.config.policy_run import PolicyRun

    runs = {"PolicyRun": PolicyRun, "RewardRun": RewardRun}
    for run, names in RENAMED.items():
        keys = set(_keys(runs[run]().model_dump()))
        assert set(names.values()) <= keys
        assert not {*names, *DROPPED.get(run, {}), *RETIRED.get(run, {})} & keys


def _keys(document: dict[str, object], prefix: str = "") -> list[str]:
    keys = []
    for name, value in document.items():
        keys.append(prefix + name)
        if isinstance(value, dict):
            keys += _keys(value, f"{prefix}{name}.")
    return keys


def test_the_schema_of_a_run_defines_all_that_it_refers_to() -> None:
    import json
    import re

    from pacorl.config.policy_run import PolicyRun

    schema = PolicyRun.model_json_schema()
    references = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(schema)))
    assert references
    assert references <= set(schema["$defs"])
    kinds = [one["properties"]["kind"]["const"] for one in schema["properties"]["model"]["oneOf"]]
    assert kinds[:2] == ["flux", "kontext"]
