"""`make matrix`: every generator as set, as edit and with references."""

from __future__ import annotations

import pytest
from qa.matrix import BEGIN, END, PAGE, Cell, cells, measure

from pacorl.models.policies import POLICIES


@pytest.mark.campaign
@pytest.mark.parametrize("cell", [pytest.param(cell, id=f"{cell.kind}-{cell.form}") for cell in cells()])
def test_a_cell_is_its_pipeline_and_trains_what_it_sampled(cell: Cell) -> None:
    row = measure(cell)
    assert row.fine, row


def test_the_table_has_every_cell() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    for cell in cells():
        assert f"| `{cell.kind}` | {cell.form} |" in table
    assert {cell.kind for cell in cells()} == set(POLICIES)
