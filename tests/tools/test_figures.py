"""Figures: pages equal their rendering, every record is shown, and a wrong name is blamed on its comment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools.claims.claim import ROOT

from tools import figures

RECORD: dict[str, Any] = {
    "command": "python benchmarks/some.py",
    "machine": "one thread",
    "columns": [["form", "{}"], ["CPU s", "{:.1f}"], ["rise", "{:+.2f} ({:.2f} to {:.2f})"]],
    "rows": [["first", 12.34, [0.5, -0.25, 1]], ["second", None, "none yet"]],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "some.json").write_text(json.dumps(RECORD))
    twice = RECORD | {"rows": [["same", 1, None], ["same", 2, None]]}
    (tmp_path / "measured" / "twice.json").write_text(json.dumps(twice))
    return tmp_path


@pytest.mark.parametrize("path", figures.pages(), ids=lambda path: path.name)
def test_a_page_is_the_rendering_of_its_records(path: Path) -> None:
    page = path.read_text("utf-8")
    assert page == figures.render(page), "run python -m tools.figures"


@pytest.mark.parametrize("path", figures.pages(), ids=lambda path: path.name)
def test_no_line_begins_with_a_figure(path: Path) -> None:
    """Markdown would take it for a block of HTML, and break the paragraph."""
    assert [line for line in path.read_text("utf-8").splitlines() if line.lstrip().startswith("<!--=")] == []


def test_every_record_is_shown() -> None:
    sources = [*figures.pages(), *(ROOT / "claims").glob("*.yaml")]
    pages = "".join(path.read_text("utf-8") for path in sources)
    records = sorted((ROOT / figures.RECORDS).glob("*.json"))
    assert records
    unseen = []
    for path in records:
        comments = (f"<!-- table {path.stem} -->", f"<!--= {path.stem}; ", f"[[{path.stem};")
        if not any(comment in pages for comment in comments):
            unseen.append(path.name)
    assert unseen == []


def test_a_command_of_a_record_exists() -> None:
    for path in sorted((ROOT / figures.RECORDS).glob("*.json")):
        words = figures.record_of(path.stem).command.split()
        if words[:1] != ["python"] or words[1] == "-m":
            continue
        script = (ROOT / words[1]).read_text("utf-8")
        options = [word for word in words[2:] if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in script] == [], path.name


def test_tables_and_figures_are_filled_in(root: Path) -> None:
    page = "a\n\n<!-- table some -->\nold\n<!-- end -->\n\nIt took <!--= some; first; CPU s -->?<!-- --> s.\n"
    filled = figures.render(page, root)
    assert filled == (
        "a\n\n<!-- table some -->\n\n"
        "| form | CPU s | rise |\n|---|---|---|\n"
        "| first | 12.3 | +0.50 (−0.25 to 1.00) |\n"
        "| second |  | none yet |\n\n"
        "<small>`python benchmarks/some.py`, one thread.</small>\n\n<!-- end -->\n\n"
        "It took <!--= some; first; CPU s -->12.3<!-- --> s.\n"
    )
    assert figures.render(filled, root) == filled


def test_a_figure_has_a_form_of_its_own(root: Path) -> None:
    page = "<!--= some; first; rise; {1:.1f} --><!-- -->"
    assert figures.render(page, root) == "<!--= some; first; rise; {1:.1f} -->−0.2<!-- -->"


@pytest.mark.parametrize(
    ("comment", "fault"),
    [
        ("<!--= some; third; rise -->", "no row 'third'; there are first, second"),
        ("<!--= some; first; fall -->", "no column 'fall'; there are form, CPU s, rise"),
        ("<!--= other; first; rise -->", "other.json"),
        ("<!--= some; first; rise; {3:.1f} -->", "Replacement index 3 out of range"),
        ("<!--= claims/other; first; rise -->", "no such claim"),
        ("<!--= twice; same; rise -->", "2 rows are named 'same'"),
    ],
)
def test_a_wrong_name_is_blamed_on_its_comment(root: Path, comment: str, fault: str) -> None:
    with pytest.raises(ValueError, match=r"<!--= ") as failed:
        figures.render(f"{comment}<!-- -->", root)
    assert fault in str(failed.value)


@pytest.mark.parametrize(
    "page", ["<!-- table some -->\n", "<!--= some; first -->1<!-- -->", "<!--= some; first; rise -->"]
)
def test_a_comment_without_its_end_is_no_text(root: Path, page: str) -> None:
    with pytest.raises(ValueError, match="1 of 1 comments have no end"):
        figures.render(page, root)


def test_a_claim_with_missing_runs_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "read_results", lambda claim, root: {})
    with pytest.raises(ValueError, match="12 runs of the claim are missing"):
        figures.record_of("claims/resolution")


def test_a_claims_results_are_a_record() -> None:
    record = figures.record_of("claims/resolution")
    assert [title for title, _ in record.columns][:2] == ["arm", "rise_8"]
    cell, form = record.cell("64", "rise_24")
    assert isinstance(cell, list)
    assert cell[1] < cell[0] < cell[2]
    assert figures.shown(cell, form) == f"{cell[0]:.3f}"
