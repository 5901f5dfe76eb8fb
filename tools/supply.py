"""Origins of the installed code: a lock with hashes, and a bill of materials (`make lock`, `make sbom`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any


def lock(report: Path) -> Iterator[str]:
    """List the packages of `pip install --dry-run --report` as requirements with hashes.

    A wheel's hash is valid for one platform and one version of Python, and so is the lock.

    Raises:
        ValueError: if a package has no SHA-256.
    """
    for package in json.loads(report.read_text(encoding="utf-8"))["install"]:
        origin = package["download_info"]
        name = package["metadata"]["name"]
        if "dir_info" in origin:
            continue  # this project itself
        digest = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not digest:
            raise ValueError(f"{report}: {name} has no SHA-256; install it from an index that gives one")
        yield f"{name}=={package['metadata']['version']} --hash=sha256:{digest}"


def sbom() -> dict[str, Any]:
    """Describe the installed distributions in CycloneDX 1.5."""
    by_name = {}
    for distribution in distributions():
        by_name[distribution.name.lower()] = distribution

    # By name: the order of installation differs from machine to machine.
    components = []
    for _, distribution in sorted(by_name.items()):
        name = distribution.name
        version = distribution.version
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
        metadata = distribution.metadata
        licences = [{"expression": metadata["License-Expression"]}] if "License-Expression" in metadata else []
        component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        components.append(component | {"licenses": licences})
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": components}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["lock", path]:
            print("\n".join(sorted(lock(Path(path)))))
        case ["sbom"]:
            print(json.dumps(sbom(), indent=2))
        case words:
            sys.exit(f"supply: {' '.join(words) or 'no argument'} is neither `lock REPORT` nor `sbom`")
