"""Tables of specs: imported when they are asked for, and clear about what they do not hold."""

from __future__ import annotations

import math

import pytest

from pacorl.config.table import Table

TABLE: Table[float] = Table("constant", {"pi": "math:pi", "tau": "math:tau", "absent": "pacorl.no_such_module:X"})


def test_an_entry_is_imported_when_it_is_asked_for_and_not_with_the_names() -> None:
    assert (list(TABLE), "absent" in TABLE, "e" in TABLE, len(TABLE)) == (["pi", "tau", "absent"], True, False, 3)
    assert TABLE["pi"] == TABLE.named("pi") == math.pi
    with pytest.raises(ModuleNotFoundError):
        TABLE["absent"]
    with pytest.raises(KeyError):
        TABLE["e"]
