"""The annotation page in a real Chromium: rank by keys and by dragging, reload, undo, skip, finish, export."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from dataset_folder import AnnotationServer, free_port

from pacorl.annotate.store import Store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

SCREENSHOTS = os.environ.get("PACORL_SCREENSHOTS", "")
"""A folder that receives images of the page, for people who work on its looks."""


@pytest.fixture
def served(dataset):
    folder = dataset(prompts=2, grids=2)  # 48 instances
    with AnnotationServer(
        folder, "--annotators", "ann", "--controls", "2", "--overlap", "0", port=free_port()
    ) as links:
        yield folder, links


@pytest.fixture
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def shot(page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


def count(page, done: int, total: int) -> None:
    playwright.expect(page.locator("#count")).to_have_text(f"{done} of {total}")


def names(page, place: str) -> list[str]:
    return page.locator(f"{place} .card .name").all_text_contents()


def test_rank_by_keys_and_drags_reload_undo_and_skip(served, browser):
    _, links = served
    requests, faults = [], []
    page = browser.new_context(viewport={"width": 1180, "height": 820}, has_touch=True).new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(links["ann"])
    playwright.expect(page.locator("#person")).to_have_text("ann")
    total = 50
    count(page, 0, total)
    shot(page, "fresh")

    # By keys: the second is best, so the first takes the last place by itself.
    page.keyboard.press("2")
    playwright.expect(page.locator("#submit")).to_be_enabled()
    assert names(page, "#slots") == ["2", "1"]
    page.keyboard.press("Enter")
    count(page, 1, total)

    # By dragging into the second place, then by a tap.
    page.locator("#pool .card").nth(0).drag_to(page.locator(".slot").nth(1))
    assert names(page, "#slots") == ["2", "1"]
    page.locator("#slots .card").nth(0).click()  # back into the pool
    assert names(page, "#pool") == ["2"]
    page.locator("#pool .card").nth(0).tap()
    shot(page, "ranked")
    page.locator("#submit").click()
    count(page, 2, total)

    # Come back later: everything is where it was.
    page.reload()
    count(page, 2, total)

    # Undo brings the last one back as it was ranked, and it can be changed.
    page.keyboard.press("Control+z")
    count(page, 1, total)
    assert names(page, "#slots") == ["2", "1"]
    page.locator("#slots .card").nth(0).drag_to(page.locator(".slot").nth(1))
    assert names(page, "#slots") == ["1", "2"]
    page.keyboard.press("Enter")
    count(page, 2, total)

    page.keyboard.press("s")
    page.locator(".reason").first.click()
    shot(page, "skip")
    page.locator("#skipNow").click()
    count(page, 3, total)

    page.locator("#pool .card .look").first.click()
    shot(page, "closer")
    assert faults == []
    assert all(url.startswith(("http://127.0.0.1:", "data:")) for url in requests)


def test_finish_and_export(served, browser):
    folder, links = served
    page, total = browser.new_page(), 50
    page.goto(links["ann"])
    count(page, 0, total)
    page.keyboard.press("s")
    page.locator(".reason").first.click()
    page.locator("#skipNow").click()
    count(page, 1, total)
    for done in range(1, total):
        page.keyboard.press("1")
        page.keyboard.press("Enter")
        count(page, done + 1, total)
    playwright.expect(page.locator("#message h1")).to_have_text("All done. Thank you!")
    shot(page, "done")

    admin = browser.new_context().new_page()
    admin.goto(links["admin"])
    playwright.expect(admin.locator("#ranked")).to_have_text("49")
    shot(admin, "admin")
    with admin.expect_download() as download:
        admin.locator("#export").click()
    rows = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    with Store(folder / "annotations.db") as store:
        assert len(rows) == 49 - len(store.answers(controls=True))
        assert [tuple(row["candidates"]) for row in rows] == [one.candidates for one in store.answers()]


def test_a_ranking_made_while_the_server_is_away_is_saved_when_it_returns(dataset, browser):
    folder, port = dataset(prompts=2, grids=2), free_port()
    server = AnnotationServer(folder, "--annotators", "ann", "--controls", "0", "--overlap", "0", port=port)
    page = browser.new_page()
    with server as links:
        page.goto(links["ann"])
        count(page, 0, 48)
        page.wait_for_load_state("networkidle")  # a candidate whose image is not there yet cannot be ranked
        server.kill()
        page.keyboard.press("1")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#saved")).to_have_text("Not saved yet")
    with AnnotationServer(folder, port=port):
        count(page, 1, 48)
        playwright.expect(page.locator("#submit")).to_be_disabled()
    with Store(folder / "annotations.db") as store:
        assert store.progress("ann")["ranked"] == 1


def test_a_missing_image_can_be_skipped(served, browser):
    folder, links = served
    for path in (folder / "images").rglob("*.png"):
        path.unlink()
    page = browser.new_page()
    page.goto(links["ann"])
    playwright.expect(page.locator(".card.missing").first).to_be_visible()
    page.keyboard.press("1")
    playwright.expect(page.locator("#submit")).to_be_disabled()
    shot(page, "missing")
    page.locator("#skip").click()
    page.locator("#reason").fill("gone")
    page.keyboard.press("Enter")
    count(page, 1, 50)


def test_on_a_tablet_and_on_a_phone_everything_fits(served, browser):
    _, links = served
    for name, width, height in (("tablet", 820, 1180), ("phone", 390, 844)):
        page = browser.new_context(viewport={"width": width, "height": height}, has_touch=True).new_page()
        page.goto(links["ann"])
        playwright.expect(page.locator("#pool .card").first).to_be_visible()
        shot(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_an_unknown_link_says_so(served, browser):
    _, links = served
    page = browser.new_page()
    page.goto(links["ann"].rpartition("/join/")[0] + "/")
    playwright.expect(page.locator("#message p")).to_contain_text("open the page by the link that you were sent")
