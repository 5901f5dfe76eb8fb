"""The annotation page in a real Chromium: rank by keys and by dragging, reload, undo, skip, finish, export."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from annotators import Client
from browsers import playwright
from dataset_folder import AnnotationServer, free_port

from pacorl.io.documents import read_jsonl, write_jsonl
from pacorl.studio.annotate.store import Store, shown_order

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SCREENSHOTS = os.environ.get("PACORL_SCREENSHOTS", "")
"""A folder that receives images of the page, for people who work on its looks."""


@pytest.fixture
def served(dataset):
    folder = dataset(prompts=2, grids=2)  # 48 instances
    with AnnotationServer(
        folder, "--annotators", "ann", "--controls", "2", "--overlap", "0", port=free_port()
    ) as links:
        yield folder, links


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
    assert names(page, "#slots") == ["B", "A"]
    page.keyboard.press("Enter")
    count(page, 1, total)

    # By dragging into the second place, then by a tap.
    page.locator("#pool .card").nth(0).drag_to(page.locator(".slot").nth(1))
    assert names(page, "#slots") == ["B", "A"]
    page.locator("#slots .card").nth(0).click()  # back into the pool
    assert names(page, "#pool") == ["B"]
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
    assert names(page, "#slots") == ["B", "A"]
    page.locator("#slots .card").nth(0).drag_to(page.locator(".slot").nth(1))
    assert names(page, "#slots") == ["A", "B"]
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


def test_nothing_moves_under_the_pointer_or_lies_on_an_image(dataset, browser):
    folder = dataset(prompts=2, grids=4)
    with AnnotationServer(folder, "--annotators", "ann", "--controls", "0", port=free_port()) as links:
        page = browser.new_page(viewport={"width": 1180, "height": 820})
        page.goto(links["ann"])
        playwright.expect(page.locator("#pool .card")).to_have_count(4)
        playwright.expect(page.locator("#against")).to_have_text(
            "Compare each with the reference on the left.", use_inner_text=True
        )
        playwright.expect(page.locator("#theme")).not_to_contain_text("grid layout")
        third, fourth = (page.locator(f".card[data-slot='{slot}']") for slot in (2, 3))
        before = [third.bounding_box(), fourth.bounding_box()]
        page.locator(".card[data-slot='1']").click()
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)  # the card under the pointer is raised for a moment
        assert names(page, "#slots") == ["B"]
        assert [third.bounding_box(), fourth.bounding_box()] == before
        overlaid = """() => [...document.querySelectorAll(".card")].flatMap((card) => {
          const image = card.querySelector("img").getBoundingClientRect();
          return [...card.querySelectorAll(".name, .look"), ...card.parentElement.querySelectorAll(":scope > .place")]
            .filter((part) => part.getBoundingClientRect().top < image.bottom - 1).map((part) => part.className);
        })"""
        assert page.evaluate(overlaid) == []
        assert page.evaluate("document.querySelectorAll('.card img').length") == 4
        shot(page, "places")


def focused(page) -> str:
    return page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")


def test_by_the_keyboard_alone(dataset, browser):
    """The focus is never lost: it goes on to what comes next, and stays on what was taken back or moved."""
    folder, port = dataset(prompts=2, grids=4), free_port()
    with AnnotationServer(folder, "--annotators", "ann", "--controls", "0", "--overlap", "0", port=port) as links:
        page = browser.new_page()
        page.goto(links["ann"])
        count(page, 0, 96)
        for _ in range(10):  # past the header, the reference and the criteria
            page.keyboard.press("Tab")
            if focused(page).startswith("Candidate A"):
                break
        press = page.keyboard.press
        press("Enter")
        assert focused(page) == "Candidate B, not ranked"
        press("ArrowRight")
        press(" ")
        assert (names(page, "#slots"), focused(page)) == (["A", "C"], "Candidate D, not ranked")
        press("Backspace")
        assert (names(page, "#slots"), focused(page)) == (["A"], "Candidate C, not ranked")
        press("d")
        assert focused(page) == "Candidate B, not ranked"
        press("Enter")
        assert (names(page, "#slots"), focused(page)) == (["A", "D", "B", "C"], "Save and next")
        page.locator(".card .pick").nth(1).focus()
        press("ArrowLeft")
        assert (names(page, "#slots"), focused(page)) == (["D", "A", "B", "C"], "Candidate D, 1st of 4")
        playwright.expect(page.locator("#news")).to_have_text("Candidate D is 1st. 0 left.")
        press("z")
        playwright.expect(page.locator("#closerName")).to_have_text("Candidate D")
        press("ArrowRight")
        playwright.expect(page.locator("#closerName")).to_have_text("Candidate A")
        press("Escape")
        assert focused(page) == "Candidate D, 1st of 4"
        page.locator("#submit").focus()
        press("Enter")
        count(page, 1, 96)
        assert focused(page) == "Candidate A, not ranked"
        press("Control+z")
        count(page, 0, 96)
        assert (names(page, "#slots"), focused(page)) == (["D", "A", "B", "C"], "Save and next")
    with Store(folder / "annotations.db") as store:
        assert store.answers() == []


def test_who_types_every_letter_saves_that_order(dataset, browser):
    """The page places the last one by itself; the letter of it, typed all the same, leaves it there."""
    folder, port = dataset(prompts=2, grids=4), free_port()
    with AnnotationServer(folder, "--annotators", "ann", "--controls", "0", "--overlap", "0", port=port) as links:
        page, sent = browser.new_page(), []
        page.on("request", lambda request: sent.append(request) if request.url.endswith("/api/rankings") else None)
        page.goto(links["ann"])
        count(page, 0, 96)
        for done, letters in enumerate(("abcd", "dcba"), 1):
            for letter in letters:
                page.keyboard.press(letter)
            assert names(page, "#slots") == list(letters.upper())
            page.keyboard.press("Enter")
            count(page, done, 96)
        # What a person placed is still taken back by its letter, the page's own by Backspace.
        for letter in ("a", "b", "c", "a"):
            page.keyboard.press(letter)
        assert names(page, "#pool") == ["A"]
        page.keyboard.press("Backspace")
        assert sorted(names(page, "#pool")) == ["A", "D"]
    assert [request.post_data_json["order"] for request in sent] == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_ties_by_the_key_and_by_the_button(dataset, browser):
    folder, port = dataset(prompts=2, grids=4), free_port()
    with AnnotationServer(folder, "--annotators", "ann", "--controls", "0", "--overlap", "0", port=port) as links:
        page, sent = browser.new_context(viewport={"width": 375, "height": 800}, has_touch=True).new_page(), []
        page.on("request", lambda request: sent.append(request) if request.url.endswith("/api/rankings") else None)
        page.goto(links["ann"])
        count(page, 0, 96)
        playwright.expect(page.locator("#asked")).to_contain_text("the image may differ")
        playwright.expect(page.locator("#tie")).to_be_disabled()

        # A = B, then C; D is placed by itself.
        places = page.locator("#slots .place")
        for key in ("a", "=", "b", "c"):
            page.keyboard.press(key)
        assert places.all_text_contents() == ["1st", "= 1st", "3rd", "4th"]
        playwright.expect(page.locator("#news")).to_have_text("Candidate C is 3rd. 0 left.")
        page.keyboard.press("Enter")
        count(page, 1, 96)

        # Undo shows the tie again; a key on the ranked image unties it, and the last is tied.
        page.keyboard.press("Control+z")
        count(page, 0, 96)
        assert places.all_text_contents() == ["1st", "= 1st", "3rd", "4th"]
        page.locator("#slots .pick").nth(1).focus()
        page.keyboard.press("=")
        assert focused(page) == "Candidate B, 2nd of 4"
        page.locator("#submit").focus()
        page.keyboard.press("=")
        assert places.all_text_contents() == ["1st", "2nd", "3rd", "= 3rd"]
        page.keyboard.press("Enter")
        count(page, 1, 96)

        # By touch: all are equal. Taking one back ends its ties.
        for slot in (3, 2, 1):
            page.locator(f".card[data-slot='{slot}']").tap()
            page.locator("#tie").tap()
        assert places.all_text_contents() == ["1st", "= 1st", "= 1st", "= 1st"]
        shot(page, "ties")
        page.locator(".card[data-slot='2']").tap()
        assert places.all_text_contents() == ["1st", "2nd", "3rd", "= 3rd"]
        page.locator("#tie").tap()
        page.locator(".card[data-slot='2']").tap()
        page.locator("#submit").tap()
        count(page, 2, 96)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    orders = [request.post_data_json["order"] for request in sent]
    assert orders == [[[0, 1], 2, 3], [0, 1, [2, 3]], [[3, 2], [1, 0]]]


def test_a_long_theme_is_clamped_and_can_be_read_whole(dataset, browser):
    folder = dataset(prompts=2, grids=2)
    theme = "one hero who goes on and on through the town and back again, " * 12
    rows = [row | {"theme": theme} for row in read_jsonl(folder / "instances.jsonl")]
    write_jsonl(folder / "instances.jsonl", rows)
    with AnnotationServer(folder, "--annotators", "ann", "--controls", "0", port=free_port()) as links:
        page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
        page.goto(links["ann"])
        count(page, 0, 48)
        clamped = page.locator("#theme").bounding_box()["height"]
        assert page.locator("#pool .card").first.bounding_box()["y"] < 600  # above the fold
        page.locator("#more").focus()
        page.keyboard.press("Enter")
        assert page.locator("#theme").bounding_box()["height"] > 3 * clamped
        assert page.locator("#theme").text_content() == theme


def test_the_administrator_adds_somebody_on_the_page(served, browser):
    _, links = served
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    admin = context.new_page()
    admin.goto(links["admin"])
    admin.locator("#name").fill("cat")
    admin.keyboard.press("Enter")
    playwright.expect(admin.locator("#copy")).to_be_focused()
    admin.keyboard.press("Enter")
    playwright.expect(admin.locator("#copy")).to_have_text("Copied")
    playwright.expect(admin.locator("#people tr")).to_have_count(2)
    page = browser.new_context().new_page()
    page.goto(admin.evaluate("navigator.clipboard.readText()"))
    playwright.expect(page.locator("#person")).to_have_text("cat")
    # What is read again every three seconds leaves the keyboard where it is.
    admin.locator("#people button", has_text="New link").nth(1).focus()
    with admin.expect_response("**/api/admin"):
        pass
    admin.wait_for_timeout(100)
    assert focused(admin).startswith("New link for cat")
    admin.locator("#name").fill("ann")
    admin.keyboard.press("Enter")
    playwright.expect(admin.locator("#toast")).to_contain_text("'ann' is there already")


FAULTS = """() => {
  const faults = [], shown = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  for (const node of document.querySelectorAll("button, a[href], [role=button], summary"))
    if (node.parentElement.closest("button, a[href], [role=button]")) faults.push(`nested: ${node.outerHTML}`);
  for (const node of document.querySelectorAll("button, input, a[href], [tabindex]"))
    if (shown(node) && !(node.ariaLabel || node.textContent.trim() || node.labels?.length))
      faults.push(`no name: ${node.outerHTML}`);
  const rgba = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], a };
  };
  const over = (top, under) => top.rgb.map((one, i) => one * top.a + under[i] * (1 - top.a));
  const ground = (node) => {
    if (!node) return [255, 255, 255];
    const own = rgba(getComputedStyle(node).backgroundColor);
    if (own.a === 1) return own.rgb;
    // An image may have any colour; behind white letters white is the worst.
    return over(own, node.closest(".card") && own.a ? [255, 255, 255] : ground(node.parentElement));
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((one) => (one /= 255) <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b + .05;
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let read = 0;
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !shown(node) || node.closest(":disabled, script, .unseen")) continue;
    const under = ground(node), letters = light(over(rgba(getComputedStyle(node).color), under));
    const contrast = Math.max(letters / light(under), light(under) / letters);
    read++;
    if (contrast < 4.5) faults.push(`${contrast.toFixed(2)}: ${walk.currentNode.textContent.trim()}`);
  }
  if (document.documentElement.scrollWidth > innerWidth) faults.push("wider than the screen");
  return { faults, read };
}"""


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_and_press_everything(served, browser, width, scheme):
    """Contrast of at least 4.5 (WCAG 2.2, 1.4.3), a name for every control, none within another, nothing cut off."""
    _, links = served
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    page.goto(links["ann"])
    playwright.expect(page.locator("#pool .card").first).to_be_visible()
    states = {"fresh": "", "ranked": "a", "closer": "z", "skip": "s", "keys": "?"}
    for state, key in states.items():
        if key:
            page.keyboard.press(key)
        page.wait_for_timeout(300)  # transitions of colours
        seen = page.evaluate(FAULTS)
        assert (state, seen["faults"]) == (state, [])
        assert seen["read"] > 10
        shot(page, f"{state}-{width}-{scheme}")
        if page.locator("dialog[open]").count():
            page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    count(page, 1, 50)
    page.goto(links["admin"])
    playwright.expect(page.locator("#people tr")).to_have_count(1)
    page.locator("#name").fill(f"{scheme} {width}")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#link")).to_be_visible()
    assert page.evaluate(FAULTS)["faults"] == []
    shot(page, f"admin-{width}-{scheme}")


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_adjudicator_takes_over_an_order(dataset, browser, width, scheme):
    folder = dataset(prompts=2, grids=4)
    options = ("--annotators", "ann,ben", "--adjudicators", "eve", "--overlap", "1", "--controls", "0")
    with AnnotationServer(folder, *options, port=free_port()) as links:
        page, people = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page(), {}
        page.goto(links["eve"])
        playwright.expect(page.locator("#message h1")).to_have_text("Nothing to rank yet")
        for name in ("ann", "ben"):
            url, _, token = links[name].partition("/join#")
            people[name] = Client(url, token)
        first = people["ann"].task()["task"]
        with Store(folder / "annotations.db", read_only=True) as store:
            (shown,) = store.next_tasks("ann")
        for name, client in people.items():  # ben ranks the other way round
            slots = shown_order(name, shown.instance)
            order = sorted(range(4), key=lambda slot, slots=slots: slots[slot] * (-1 if name == "ben" else 1))
            client.rank(first["instance"], order)
        # The page asks again by itself, and a fit stands for some seconds.
        playwright.expect(page.locator("#count")).to_have_text("0 of 1", timeout=60_000)
        playwright.expect(page.locator("#opinions li")).to_have_count(3)
        assert page.evaluate(FAULTS)["faults"] == []
        shot(page, f"adjudicate-{width}-{scheme}")
        button = page.locator("#opinions button").nth(1)
        letters = button.text_content().split()
        if width == 1440:
            button.click()
        else:
            button.focus()
            page.keyboard.press("Enter")
        assert (names(page, "#slots"), focused(page)) == (letters, "Save and next")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#message p")).to_contain_text("You decided 1")
        admin = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        admin.goto(links["admin"])
        playwright.expect(admin.locator("#adjudicators td").nth(1)).to_have_text("1 of 1")
        assert admin.evaluate(FAULTS)["faults"] == []
        shot(admin, f"adjudicators-{width}-{scheme}")
    with Store(folder / "annotations.db") as store:
        (decision,) = (answer for answer in store.answers() if answer.adjudicated)
        assert decision.candidates == tuple(shown.instance.candidates[::-1])


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
    with Store(folder / "annotations.db") as store:
        controls = len(store.answers(controls=True))
    playwright.expect(admin.locator("#ranked")).to_have_text(str(49 - controls))
    playwright.expect(admin.locator("#controlsRanked")).to_have_text(str(controls))
    playwright.expect(admin.locator("#of")).to_have_text("of too few shared questions: 0 of 30")
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
    page.goto(links["ann"].rpartition("/join#")[0] + "/")
    playwright.expect(page.locator("#message p")).to_have_text("Open the page by the link that you were sent.")
    page.goto(links["ann"].rpartition("/join#")[0] + "/admin")
    playwright.expect(page.locator("#toast")).to_contain_text("This page needs the administrator's link")
    page.goto(links["admin"])
    playwright.expect(page.locator("#people tr")).to_have_count(1)
    page.goto(links["ann"].rpartition("/join#")[0] + "/")
    playwright.expect(page.locator("#message h1")).to_have_text("This is the administrator's link")
    playwright.expect(page.locator("#message p")).to_contain_text("People rank by their own links: open yours")


def test_after_an_undo_enter_saves_and_undoes_no_more(served, browser):
    folder, links = served
    page = browser.new_page()
    page.goto(links["ann"])
    count(page, 0, 50)
    for done in (1, 2):
        page.keyboard.press("a")
        page.keyboard.press("Enter")
        count(page, done, 50)
    page.locator("#undo").click()  # with the mouse, as with the keyboard
    count(page, 1, 50)
    playwright.expect(page.locator("#submit")).to_be_focused()
    page.keyboard.press("Enter")
    count(page, 2, 50)
    page.locator("#undo").focus()
    page.keyboard.press("Enter")
    count(page, 1, 50)
    playwright.expect(page.locator("#submit")).to_be_focused()
    page.keyboard.press("Enter")
    count(page, 2, 50)
    # Of a skip there is no order to show again: the first image has the focus.
    page.keyboard.press("s")
    page.locator(".reason").first.click()
    page.locator("#skipNow").click()
    count(page, 3, 50)
    page.locator("#undo").click()
    count(page, 2, 50)
    assert focused(page) == "Candidate A, not ranked"
    with Store(folder / "annotations.db", read_only=True) as store:
        kinds = [row["kind"] for row in store.audit()]
    assert kinds == ["rank", "rank", "undo", "rank", "undo", "rank", "skip", "undo"]


@pytest.mark.parametrize("width", [390, 1440])
def test_a_pause_is_said_and_keeps_the_ranking_that_it_met(served, browser, width):
    folder, links = served
    size = {"width": width, "height": 900}
    page, admin = (browser.new_context(viewport=size).new_page() for _ in range(2))
    page.goto(links["ann"])
    count(page, 0, 50)
    admin.goto(links["admin"])
    admin.get_by_role("button", name="Pause the work of ann").click()
    playwright.expect(admin.locator("#people td").first).to_have_text("ann (paused)")
    assert admin.evaluate(FAULTS)["faults"] == []
    shot(admin, f"paused-admin-{width}")
    page.keyboard.press("a")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#message h1")).to_have_text("A pause")
    playwright.expect(page.locator("#message p")).to_contain_text("The administrator has paused your work; nothing is")
    playwright.expect(page.locator("#message p")).to_contain_text("Your last ranking is kept in this browser")
    assert page.evaluate(FAULTS)["faults"] == []
    shot(page, f"paused-{width}")
    page.goto(links["ann"])  # the link opens the same page
    playwright.expect(page.locator("#message h1")).to_have_text("A pause")
    admin.get_by_role("button", name="Resume the work of ann").click()
    playwright.expect(admin.locator("#people td").first).to_have_text("ann")
    count(page, 1, 50)  # by itself
    playwright.expect(page.locator("#pool .card").first).to_be_visible()
    with Store(folder / "annotations.db", read_only=True) as store:
        assert [row["kind"] for row in store.audit()] == ["rank"]


def test_a_question_of_ones_own_stands_alone(dataset, browser):
    folder, port = dataset(prompts=2, grids=2), free_port()
    options = ("--annotators", "ann", "--controls", "0", "--question", "Which is prettier?")
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    with AnnotationServer(folder, *options, port=port) as links:
        page.goto(links["ann"])
        playwright.expect(page.locator("#question")).to_have_text("Which is prettier?")
        playwright.expect(page.locator("#sameness")).to_be_hidden()
        playwright.expect(page.locator("#criteria ul")).to_be_hidden()
        playwright.expect(page.locator("#criteria summary")).to_be_visible()
        playwright.expect(page.locator(".scale")).to_have_text("bestworst")
        assert "consistent" not in page.locator("main#work").inner_text()
        shot(page, "own-question")
        admin = browser.new_context().new_page()
        admin.goto(links["admin"])
        playwright.expect(admin.locator("q#question")).to_have_text("Which is prettier?")
    with AnnotationServer(folder, "--question", "", port=port):
        page.reload()
        own = "Which of these belong to the same set as the reference?"
        playwright.expect(page.locator("#question")).to_have_text(own)
        playwright.expect(page.locator("#sameness")).to_be_visible()
        playwright.expect(page.locator("#criteria ul")).to_be_visible()
        playwright.expect(page.locator(".scale")).to_have_text("most consistentleast consistent")


def test_a_followed_link_asks_first_and_no_address_keeps_the_token(served, browser, tmp_path):
    _, links = served
    token = links["ann"].partition("#")[2]
    elsewhere = tmp_path / "page.html"
    elsewhere.write_text(f'<a href="{links["ann"]}">Rank</a>')
    page = browser.new_context().new_page()
    requests = []
    page.on("request", lambda request: requests.append(request.url))

    page.goto(elsewhere.as_uri())
    page.locator("a").click()
    password = "This link is a password. It stays open in this browser."
    playwright.expect(page.get_by_role("status")).to_have_text(password)
    assert page.url.endswith("/join")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#person")).to_have_text("ann")
    assert urlsplit(page.url)[2:] == ("/", "", "")
    page.goto(links["admin"])
    playwright.expect(page.locator("#people tr").first).to_be_visible()
    assert urlsplit(page.url)[2:] == ("/admin", "", "")
    for url in requests:
        assert token not in url.partition("#")[0]


@pytest.mark.parametrize(
    ("ending", "sentence"),
    [
        ("", "This link is incomplete: open all of it, with the characters after the #."),
        ("#wrong", "This page does not open: this link is not known here; ask for a new one."),
    ],
)
def test_a_link_that_opens_nothing_says_why(served, browser, ending, sentence):
    _, links = served
    page = browser.new_context().new_page()
    page.goto(links["ann"].partition("#")[0] + ending)
    playwright.expect(page.get_by_role("status")).to_have_text(sentence)
    playwright.expect(page.locator("button")).to_be_hidden()

    # The whole link, pasted into the same tab, changes only the hash.
    page.goto(links["ann"])
    page.locator("button").click()
    playwright.expect(page.locator("#person")).to_have_text("ann")


def test_without_javascript_the_link_says_what_is_missing(served, browser):
    _, links = served
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(links["ann"])
    assert "This page needs JavaScript: allow it, then open your link again." in page.content()
