"""Every page of the project in Chromium, in light and dark, on a desk and on a phone: axe-core finds nothing to mend.

Screenshots are the tests' output: build/screenshots, or the folder in PACORL_SCREENSHOTS.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from asked import Asked
from browsers import PATIENCE, playwright
from dataset_folder import AnnotationServer
from judges import by_grey, grey
from page_blocks import ROOT
from ports import free_port
from run_folder import finished_run
from tiny_sets import draw_grid

from pacorl.gate import check as gate
from pacorl.report.compare import write_comparison
from pacorl.report.page import write_report
from pacorl.studio.folder import Recipe
from pacorl.studio.work import Studio
from pacorl.tiny.world import Panel, draw
from pacorl.types import Grid

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SCREENSHOTS = Path(os.environ.get("PACORL_SCREENSHOTS") or ROOT / "build" / "screenshots")
WIDTHS = {"desk": (1440, 900), "phone": (390, 844)}
SCHEMES: dict[str, dict[str, Any]] = {"light": {}, "dark": {"runOnly": ["color-contrast", "link-in-text-block"]}}
"""Colour scheme → the rules that are asked: in the dark only colours differ."""
UNFOLD = "for (const fold of document.querySelectorAll('details')) fold.open = true"


@dataclass(frozen=True)
class Case:
    """One page, in one state."""

    name: str
    site: str
    """The fixture that gives the URLs of its site by their names."""
    page: str
    reach: Callable[[Any], object] = lambda page: None
    """What a visitor does there before the page is looked at."""
    part: str | None = None
    """What is looked at, if not all: behind an open dialog its backdrop dims all colours."""
    reload: bool = False
    """Whether the page chooses its colours once, when it is loaded."""


def rank_one(page: Any) -> None:
    playwright.expect(page.locator("#pool .card").first).to_be_visible()
    page.keyboard.press("1")


def open_dialog(button: str) -> Callable[[Any], object]:
    def reach(page: Any) -> None:
        playwright.expect(page.locator("#pool .card").first).to_be_visible()
        page.locator(button).click()

    return reach


def after_its_redirect(page: Any) -> None:
    """Wait until a link with a key has led to the page without it."""
    page.wait_for_load_state("networkidle")


def first_screen(page: Any) -> None:
    page.get_by_role("tab", name="Pages").click()  # the studio keeps the tab of the last visit
    playwright.expect(page.get_by_label("What should the pictures show?")).to_be_visible(timeout=PATIENCE)


def page_in_studio(page: Any) -> None:
    first_screen(page)
    page.get_by_text("Why?").click()
    playwright.expect(page.get_by_text("The order of pages also counts")).to_be_visible(timeout=PATIENCE)


def character_in_studio(page: Any) -> None:
    first_screen(page)
    page.get_by_role("tab", name="Characters").click()
    captions = page.get_by_label("What it shows")
    captions.first.press("Tab")
    playwright.expect(captions.last).to_be_focused()


def models_in_studio(page: Any) -> None:
    page_in_studio(page)
    page.get_by_role("button", name="Drawn by").click()
    playwright.expect(page.get_by_label("Access token").first).to_be_visible(timeout=PATIENCE)


def removed_in_studio(page: Any) -> None:
    """Remove the page, and have its words refused."""
    page_in_studio(page)
    page.get_by_label("Remove a hero").press("Enter")
    page.get_by_role("button", name="Draw", exact=True).press("Enter")
    playwright.expect(page.locator(".fault")).to_contain_text("makes sets of", timeout=PATIENCE)
    playwright.expect(page.get_by_role("button", name="Undo")).to_be_visible(timeout=PATIENCE)


CASES = [
    *(Case(name, "files", name) for name in ("report", "compare", "seeds", "check")),
    Case("annotate", "annotation", "ann", rank_one),
    Case("annotate-keys", "annotation", "ann", open_dialog("#help")),
    Case("annotate-skip", "annotation", "ann", open_dialog("#skip")),
    Case("annotate-admin", "annotation", "admin", after_its_redirect),
    Case("join", "annotation", "join"),
    Case("studio", "studio", "open", first_screen),
    Case("studio-page", "studio", "open", page_in_studio),
    Case("studio-models", "studio", "open", models_in_studio, part=".q-dialog"),
    Case("studio-character", "studio", "open", character_in_studio),
    Case("studio-removed", "studio", "open", removed_in_studio),  # the last one with a page
    Case("docs", "docs_site", "index.html", reload=True),
    # Every class and function on one page: two minutes.
    pytest.param(Case("docs-api", "docs_site", "api.html", reload=True), marks=pytest.mark.nightly),
]


# --- what the pages show ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run's report, two runs and two settings compared, a check with an odd panel."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [finished_run(folder / name) for name in ("low-1", "low-2", "high-1", "high-2")]
    for run in runs:
        name, seed = run.name.split("-")
        (run / "config.yaml").write_text(f"seed: {seed}\nlr: {0.1 if name == 'low' else 0.2}\n")
    pages = {
        "report": write_report(runs[0]),
        "compare": write_comparison(runs[::2])[0],
        "seeds": write_comparison(runs)[0],
    }
    checked = gate.check_set(Asked(by_grey), grey(20, 20, 20, 120), least=0.5)
    pages["check"] = folder / "check.html"
    pages["check"].write_text(gate.check_page(checked, judge="toy"), encoding="utf-8")
    return {name: page.as_uri() for name, page in pages.items()}


@pytest.fixture(scope="module")
def annotation(made_datasets: Callable[..., Path]) -> Iterator[dict[str, str]]:
    """The links of `pacorl dataset annotate`, and an incomplete one."""
    with AnnotationServer(made_datasets(2, 2, paired=True), "--annotators", "ann", port=free_port()) as links:
        yield links | {"join": links["ann"].partition("#")[0]}


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The link of `pacorl studio`."""
    folder = tmp_path_factory.mktemp("studio") / "studio"
    studio = Studio(folder)
    hero = Panel("red", "round", "crown", "night", "town", "waving", "flag")
    name = studio.folder.new_character("hero", "a red hero with a crown")
    for _ in range(2):
        studio.folder.add_picture(name, draw(hero, 64), "waving, flag")
    recipe = Recipe(theme="a hero", prompt="a hero", layout="1x2").updated(panels=["waves", "jumps"])
    recipe = recipe.updated(score=0.5, tied=2, checked=["Odd one out: panel 2, 0.1000."], odd=1)
    recipe = recipe.updated(matrix=((None, 0.1), (0.1, None)), characters=[name])
    picture = draw_grid([hero, hero], Grid(1, 2), 64)
    drawings = [(picture, recipe), (picture, recipe), (picture, Recipe(note="Panel 2: 0.5, accepted"))]
    page = studio.folder.add_page(drawings)
    studio.keep(page=page, words="a hero\nwaves\njumps", character=name)
    studio.close()
    command = [sys.executable, "-m", "pacorl", "studio", "--port", "0", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        link = process.stdout.readline().strip().removeprefix("studio: ")
        assert link.startswith("http://127.0.0.1:"), link
        yield {"open": link}
        process.terminate()


@pytest.fixture(scope="module")
def docs_site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The built documentation."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "NO_MKDOCS_2_WARNING": "1",
    }
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True)
    return {path.name: path.as_uri() for path in folder.glob("*.html")}


# --- the test --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_axe_finds_nothing(case: Case, browser: Any, request: pytest.FixtureRequest) -> None:
    site = request.getfixturevalue(case.site)
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)  # of screenshots too
    page = context.new_page()
    page.goto(site[case.page])
    case.reach(page)
    faults = [fault for device in WIDTHS for fault in faults_on(page, case, device)]
    context.close()
    assert not faults, "\n".join(faults)


def faults_on(page: Any, case: Case, device: str) -> list[str]:
    """What axe-core calls a violation, one line each; a page that is wider than its window is a fault too."""
    from axe_playwright_python import sync_playwright as axe

    width, height = WIDTHS[device]
    page.set_viewport_size({"width": width, "height": height})
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    faults = []
    for scheme, rules in SCHEMES.items():
        page.emulate_media(color_scheme=scheme)
        if case.reload:
            page.evaluate("localStorage.clear()")
            page.reload()
        page.screenshot(path=SCREENSHOTS / f"{case.name}-{device}-{scheme}.png")
        page.evaluate(UNFOLD)  # what is folded away is not looked at
        options = rules | {"resultTypes": ["violations"]}
        if case.part and scheme == "light":
            # axe-core takes the backdrop of Quasar's dialog for the colour behind its buttons; in the dark it is asked.
            options["rules"] = {"color-contrast": {"enabled": False}}
        violations = axe.Axe().run(page, case.part, options).response["violations"]
        faults += [f"{device}, {scheme}: {line}" for each in violations for line in lines_of(each)]
    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return faults + [f"{device}: the page is {overflow} pixels wider than its window"] * (overflow > 0)


def lines_of(violation: dict[str, Any], *, most: int = 3) -> list[str]:
    nodes = violation["nodes"]
    lines = [
        f"{violation['id']} ({violation['impact']}), {node['target']}: {node['failureSummary']!r}" for node in nodes
    ]
    return lines[:most] + [f"… and {len(lines) - most} more"] * (len(lines) > most)
