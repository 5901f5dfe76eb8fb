"""The annotation page in a real Chromium: by keys, on a phone, with a server that goes away, and one who settles."""

from __future__ import annotations

from typing import Any

import pytest
from browsers import PATIENCE, playwright
from dataset_folder import AnnotationServer
from ports import free_port

from pacorl.dataset.answer_log import AnswerLog

pytestmark = [pytest.mark.slow, pytest.mark.browser]
ALONE = ("--annotators", "ann", "--no-controls")


def opened(browser: Any, link: str, **options: Any) -> Any:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(link)
    playwright.expect(page.locator("#pool .card").first).to_be_visible(timeout=PATIENCE)
    return page


def test_ranked_by_keys_tied_undone_and_kept_over_a_reload(dataset, browser):
    folder = dataset(2, 3)
    with AnnotationServer(folder, *ALONE, port=free_port()) as links:
        page = opened(browser, links["ann"])
        assert "#" not in page.url
        page.keyboard.press("b")
        page.keyboard.press("=")
        page.keyboard.press("a")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#count")).to_contain_text("1 of")
        page.reload()
        playwright.expect(page.locator("#count")).to_contain_text("1 of")
        page.keyboard.press("Control+z")
        playwright.expect(page.locator("#count")).to_contain_text("0 of")
        playwright.expect(page.locator("#slots .filled").first).to_be_visible()
        (undone,) = AnswerLog(folder).undone["ann"].values()
        assert len(undone.order[0]) == 2
        page.keyboard.press("c")  # begins anew
        playwright.expect(page.locator("#slots .filled")).to_have_count(1)
        for key in ("s", "Enter", "2", "Enter"):  # a reason must be given
            page.keyboard.press(key)
        playwright.expect(page.locator("#count")).to_contain_text("1 of")
    assert [event.reason for event in AnswerLog(folder).of("ann")] == ["An image is broken or missing"]


def test_what_is_saved_while_the_server_is_away_is_there_once(dataset, browser):
    folder, port = dataset(2, 3), free_port()
    server = AnnotationServer(folder, *ALONE, port=port)
    page = opened(browser, server.__enter__()["ann"])
    # A ranking of images that never came could not be saved.
    for image in page.locator("#pool img").all():
        playwright.expect(image).to_have_js_property("complete", True)
    server.kill()
    count = page.locator("#pool .card").count()
    for letter in "abcdefghi"[:count]:
        page.keyboard.press(letter)
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#saved")).to_contain_text("does not answer")
    server.__enter__()
    playwright.expect(page.locator("#count")).to_contain_text("1 of", timeout=PATIENCE)
    server.__exit__()
    assert len(AnswerLog(folder).of("ann")) == 1


def test_on_a_phone_nothing_lies_over_a_candidate(dataset, browser):
    with AnnotationServer(dataset(2, 3), *ALONE, port=free_port()) as links:
        page = opened(browser, links["ann"], viewport={"width": 360, "height": 667}, has_touch=True)
        hit = """
            (card) => {
                card.scrollIntoView({ block: 'nearest' });
                const box = card.getBoundingClientRect();
                const points = [[.5, .5], [.2, .2], [.8, .8], [.2, .8], [.8, .2]];
                return points.every(([x, y]) => card.contains(
                    document.elementFromPoint(box.x + x * box.width, box.y + y * box.height)));
            }"""
        assert page.locator("#pool .card").first.evaluate(
            "(card) => card.getBoundingClientRect().bottom <= innerHeight"
        )
        for card in page.locator("#pool .card").all():
            assert card.evaluate(hit)
        rows = page.locator("nav button:visible").evaluate_all("(all) => new Set(all.map((one) => one.offsetTop)).size")
        assert rows == 1
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        while page.locator("#pool .card").count():
            page.locator("#pool .card .pick").first.tap()
        playwright.expect(page.locator("#submit")).to_be_enabled()
        page.locator("#submit").tap()
        playwright.expect(page.locator("#count")).to_contain_text("1 of")
