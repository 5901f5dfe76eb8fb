"""The hub's cache without a network."""

from __future__ import annotations

from pathlib import Path


def snapshot_in(cache: Path, name: str) -> Path:
    """The folder of a repository's snapshot, as a download leaves it; it is not made yet."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    return repo / "snapshots" / "abc"
