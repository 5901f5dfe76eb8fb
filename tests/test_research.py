"""Research starts: its modules import, and the results of its claims are read. Nothing else of it is tested."""

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
