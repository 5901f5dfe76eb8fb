"""Which changes of processes, batches and stops change bits: the bounded form of the lattice, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import lattice
import pytest
import worlds

from pacorl.lab.verify.recompute import TOLERANCE, Comparison, Quantity


def comparison(**differences: float) -> Comparison:
    quantities = [Quantity(name, not d, d, TOLERANCE[name]) for name, d in differences.items()]
    return Comparison("epoch", 1, quantities, {})


def test_a_cell_names_what_lies_farthest_out() -> None:
    assert lattice.cell(comparison(samples=0, weights=0)) == "="
    assert lattice.cell(comparison(samples=1e-6, weights=2e-3)) == "weights 2e-03"
    assert lattice.cell(comparison(samples=0.5, weights=9)) == "**differs** samples 5e-01"
    assert lattice.cell(None) == ""


def test_the_page_has_the_rows_of_the_toy_world_and_one_cell_differs() -> None:
    shown, variations = lattice.shown_rows(), [name for name in lattice.VARIATIONS if name != lattice.BASE]
    assert {case for case in lattice.CASES if case.startswith("toy")} <= shown.keys() <= {*lattice.CASES}, (
        "make lattice"
    )
    for case, cells in shown.items():
        assert [bool(text) for text in cells] == [lattice.fits(case, name) for name in variations], case
    differing = [
        (case, name) for case in shown for name, text in zip(variations, shown[case], strict=True) if "differs" in text
    ]
    assert differing == [("kontext: grpo_clip", "batches of 2")]  # docs/verify.md says why


@pytest.mark.campaign
def test_processes_batches_and_stops(tmp_path: Path) -> None:
    names = ("2 processes", "batches of 2", "stopped")
    rows = lattice.lattice(("toy: grpo_clip", "toy: tree"), names, tmp_path)
    for row in rows.values():
        assert all(row[name].first is None for name in names), row
        assert row["stopped"].answer == "equal bits"
        assert row["2 processes"].environment == {"processes": [1, 2], "launcher": ["no", "multi_cpu"]}
    # A run of one process is held to two.
    run = lattice.out_of(tmp_path, lattice.BASE, "toy: grpo_clip")
    worlds.run(lattice.verify, run, tmp_path / "answer.json", world=2)
    answers = json.loads((tmp_path / "answer.json").read_text())
    assert [answer["kind"] for answer in answers] == ["epoch", "evaluation"]
    for answer in answers:
        assert answer["answer"] != "differs"
        assert answer["environment"]["processes"] == [1, 2]
