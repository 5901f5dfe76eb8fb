"""The documentation site is strict: a dead link and a public name without a docstring fail its build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.campaign
def test_a_dead_link_and_an_undocumented_name_fail_the_build_and_nothing_else_does(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    for path in ROOT.iterdir():
        if path.name not in {"build", "docs", "tools", "mkdocs.yml"}:
            (tmp_path / path.name).symlink_to(path)
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    added = ("[nothing](nothing.md)", "::: pacorl.types.Conditioning.__len__", "::: pacorl.core.ranking.Interval")
    for page, line in zip(("faq", "api", "api"), added, strict=True):
        with (tmp_path / "docs" / f"{page}.md").open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    build = [sys.executable, "-m", "mkdocs", "build"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Conditioning.__len__ has no docstring" in done.stderr
    assert "Interval.low has no docstring" in done.stderr
    assert "'nothing.md'" in done.stderr
    assert "Aborted with 5 warnings" in done.stdout, "these two and the class's three fields are all that is wrong"
    pages = [page.read_text("utf-8") for page in (tmp_path / "build" / "site").rglob("*.html")]
    assert len(pages) > 30
    asks = re.compile(r"<(?:script|img|iframe|link rel=.stylesheet)[^>]*(?:src|href)=.https?://")
    assert [page for page in pages if asks.search(page)] == [], "the site asks no other server for anything"
