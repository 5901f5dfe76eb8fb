"""Tables of specs: imported when they are asked for, and clear about what they do not hold."""

from __future__ import annotations

import pytest

from pacorl.config.table import Table

TABLE: Table[float] = Table("constant", {"pi": "math:pi", "tau": "math:tau", "absent": "pacorl.no_such_module:X"})


def test_an_entry_is_what_its_file_says() -> None:
    import math

    assert TABLE["pi"] == TABLE.named("pi") == math.pi
    assert list(TABLE) == ["pi", "tau", "absent"]


def test_looking_at_the_names_imports_nothing() -> None:
    assert ("absent" in TABLE, "e" in TABLE, len(TABLE)) == (True, False, 3)
    with pytest.raises(ModuleNotFoundError):
        TABLE["absent"]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown constant 'pie'; did you mean 'pi'\? there are pi, tau, absent"):
        TABLE.named("pie")
    with pytest.raises(KeyError):
        TABLE["pie"]
