"""Logs of earlier versions are read under today's names."""

from __future__ import annotations

import pytest

from pacorl.core.metric_names import HELD_OUT_MEANING, current_name, sign_meaning


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("watch/lattice", "monitor/grid_artifact"),
        ("watch/blank", "monitor/blank"),
        ("alarm/lattice", "alarm/grid_artifact"),
        ("alarm/held_out/lattice", "alarm/held_out/lattice"),
        ("reward/lattice", "reward/lattice"),
        ("loss", "loss"),
        ("watch", "watch"),
        ("monitor/grid_artifact", "monitor/grid_artifact"),
    ],
)
def test_a_former_name_is_read_as_todays(key: str, name: str) -> None:
    assert current_name(key) == name


def test_a_sign_means_the_same_under_both_names() -> None:
    assert sign_meaning("lattice") == sign_meaning("grid_artifact") != HELD_OUT_MEANING
    assert sign_meaning("held_out/clip") == HELD_OUT_MEANING
