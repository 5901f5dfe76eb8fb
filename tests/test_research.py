"""Research starts: its modules import, the results of its claims are read, and its bugs fit the code."""

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


def test_every_claim_has_its_results() -> None:
    from research.claims.claim import read_claims, read_results

    for claim in read_claims():
        assert len(read_results(claim)) == len(claim.arms) * len(claim.seeds), claim.name


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
