"""The lock has a hash for every package, and the bill of materials everything that is installed."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from tools.supply import lock, sbom


def report(folder: Path, *packages: dict[str, Any]) -> Path:
    """What pip writes."""
    path = folder / "pip.json"
    path.write_text(json.dumps({"install": packages}))
    return path


def package(name: str, **origin: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": "1.2"}, "download_info": {"url": "https://index.example"} | origin}


def test_a_lock_has_a_hash_for_every_package_but_this_one(tmp_path: Path) -> None:
    hashed = package("einops", archive_info={"hashes": {"sha256": "ab" * 32}})
    path = report(tmp_path, hashed, package("pacorl", dir_info={}))
    assert list(lock(path)) == [f"einops==1.2 --hash=sha256:{'ab' * 32}"]


def test_a_package_without_a_hash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="einops has no SHA-256"):
        list(lock(report(tmp_path, package("einops"))))


def test_the_bill_of_materials_names_what_is_installed() -> None:
    bill = sbom()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    components = {component["purl"]: component for component in bill["components"]}
    assert len(components) == len(bill["components"])
    assert components[f"pkg:pypi/pydantic@{version('pydantic')}"]["name"] == "pydantic"
