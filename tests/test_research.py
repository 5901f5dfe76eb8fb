"""Research starts: modules import, results of claims are read, bugs fit the code, and a day with a card runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "research").rglob("*.py")
    if path.name != "__main__.py"
)


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports(module: str) -> None:
    importlib.import_module(module)


def test_every_claim_is_read_with_its_results() -> None:
    from research.claims.claim import claim_names, read_claim, read_curves

    for claim in map(read_claim, claim_names()):
        assert {arm for arm, _ in read_curves(claim)} <= set(claim.arms), claim.name


@pytest.mark.slow
def test_every_bug_of_the_list_fits_the_code() -> None:
    from research.mutants.mutants import read_mutants

    faults = []
    for mutant in read_mutants():
        try:
            mutant.apply((ROOT / "src" / "pacorl" / mutant.file).read_text(encoding="utf-8"))
        except (ValueError, FileNotFoundError) as error:
            faults.append(f"{mutant.name}: {error}")
    assert faults == []


@pytest.mark.slow
def test_a_day_with_a_card_runs_each_part_once(tmp_path: Path) -> None:
    from research.gpu_day.day import main, outcomes

    out = tmp_path / "day.jsonl"
    line = ["--tiny", "--parts", "card", "--out", str(out), "--work", str(tmp_path)]
    assert main([*line, "--slice", "0"]) == 0
    assert outcomes(out) == {}
    assert main(line) == 0
    assert outcomes(out) == {"card": "done"}
    records = out.read_text()
    assert main([*line, "--resume"]) == 0
    assert main(line) == 2
    assert out.read_text() == records
