"""The studio in a real Chromium: make, rank, compare by the slider, cancel, upload, judge; by hand and by keys."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from statistics import median

import pytest
from browsers import PATIENCE, playwright
from PIL import Image

from pacorl.io.images import png_bytes
from pacorl.models.adapters import adapter_state, add_lora
from pacorl.tiny.characters import Panel, draw

pytestmark = [pytest.mark.slow, pytest.mark.browser]
COMMAND = "from pacorl.cli import app; app()"
SCREENSHOTS = os.environ.get("PACORL_SCREENSHOTS", "")
"""A folder that receives images of the page, for people who work on its looks and for the docs."""
ADAPTER = os.environ.get("PACORL_SCREENSHOT_ADAPTER", "")
"""A trained adapter to be shown in these images; a random one otherwise."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A LoRA that changes images."""
    if ADAPTER:
        return Path(ADAPTER)
    import torch

    from pacorl.models.lora import save_lora
    from pacorl.models.policies.flux import FLUX, LORA_TARGETS

    transformer = FLUX.from_pretrained("tiny").transformer
    add_lora(transformer, rank=2, alpha=4, targets=LORA_TARGETS)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(value.shape, generator=generator) * 0.05 for name, value in adapter_state(transformer).items()
    }
    folder = tmp_path_factory.mktemp("adapter")
    save_lora(folder, state, rank=2, alpha=4, targets=LORA_TARGETS)
    return folder


@pytest.fixture(scope="module")
def link(adapter, tmp_path_factory):
    """`pacorl studio` as a process of its own, on any free port."""
    history = str(tmp_path_factory.mktemp("history"))
    command = [sys.executable, "-c", COMMAND, "studio", "--port", "0", "--adapter", str(adapter), "--history", history]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("studio: http://127.0.0.1:"), line
    assert "each start prints a new one" in process.stdout.readline()
    assert process.stdout.readline() == "Ctrl+C ends the studio; what you made stays.\n"
    yield line.removeprefix("studio: ").strip()
    process.terminate()
    process.wait(30)
    process.stdout.close()


@pytest.fixture
def page(browser, link):
    """A page whose every request and fault is looked at in the end."""
    context = browser.new_context(viewport={"width": 1320, "height": 900})
    page, requests, faults = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.goto(link)
    playwright.expect(page.locator("#theme")).not_to_have_value("")
    yield page
    assert faults == []
    assert requests
    assert all(url.startswith("http://127.0.0.1:") for url in requests), requests
    context.close()


def shot(page, name: str) -> None:
    if SCREENSHOTS:
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


def scores(page) -> list[float]:
    return [float(text) for text in page.locator("#ranks .card b").all_text_contents()]


def made(page) -> None:
    playwright.expect(page.locator("#ranks .card")).to_have_count(4, timeout=PATIENCE)
    playwright.expect(page.locator("#progress")).to_be_hidden(timeout=PATIENCE)


def png(panel: Panel, size: int = 64) -> bytes:
    """A picture as the practice model saves it, which alone the practice judge judges."""
    return png_bytes(draw(panel, size), {"Software": "pacorl 0.1.0", "model": "tiny"})


def test_candidates_are_made_ranked_and_compared(page):
    shot(page, "studio-fresh")
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#progress")).to_be_visible()
    playwright.expect(page.locator("#phase")).to_contain_text("Generating", timeout=PATIENCE)
    shot(page, "studio-progress")
    made(page)
    assert scores(page) == sorted(scores(page), reverse=True)
    playwright.expect(page.locator("#matrix td")).to_have_count(12)
    shot(page, "studio-made")

    # The winner is shown whole.
    playwright.expect(page.locator("#wipe")).to_be_hidden()
    whole = page.locator("#right").get_attribute("src")
    assert page.locator("#ranks .card img").first.get_attribute("src") == whole

    # The slider, by keys: the base on the left of it, the adapter on the right, both of one seed.
    page.get_by_label("Compare with").select_option("without LoRA, same seed")
    playwright.expect(page.locator("#wipe")).to_be_visible()
    left, right = (page.locator(f"#{side}").get_attribute("src") for side in ("left", "right"))
    assert left.replace("/base-", "/adapter-") == right
    page.locator("#wipe").focus()
    before = page.locator("#left").evaluate("element => getComputedStyle(element).clipPath")
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    assert page.locator("#wipe").input_value() == "60"
    assert page.locator("#left").evaluate("element => getComputedStyle(element).clipPath") != before
    # … and by the mouse.
    box = page.locator("#compareBox").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
    assert float(page.locator("#wipe").input_value()) == pytest.approx(25, abs=2)

    # The second candidate by its number, against the first.
    page.locator("body").click(position={"x": 4, "y": 400})
    page.keyboard.press("2")
    playwright.expect(page.locator("#ranks .card").nth(1)).to_have_attribute("aria-selected", "true")
    page.get_by_label("Compare with").select_option("number 1")
    playwright.expect(page.locator("#leftTag")).to_contain_text("number 1")
    with page.expect_download() as download:
        page.locator("#download").click()
    with Image.open(download.value.path()) as saved:
        assert saved.info["seed"] == page.locator("#seedLine").text_content().split()[1].rstrip(",")
        assert "hero" in saved.info["prompt"]

    with page.expect_download() as download:
        page.locator("#export").click()
    exported = zipfile.ZipFile(download.value.path()).namelist()
    assert exported == ["image.png", "base.png", *(f"panel-{number}.png" for number in range(1, 5)), "recipe.json"]

    # Coming back loses nothing.
    page.reload()
    made(page)


def test_earlier_sets_are_found_again_by_keys_alone(page):
    page.keyboard.press("h")
    card = page.locator("#sets li").first
    playwright.expect(card).to_be_visible()
    shot(page, "studio-history")
    card.locator("a").focus()
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#made")).to_be_visible()
    assert "#set-" in page.url
    page.locator("#ranks .card").first.focus()
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#ranks .card").nth(1)).to_be_focused()
    with page.expect_response("**/api/history"):
        page.keyboard.press("h")
    playwright.expect(page.locator("#history")).to_be_visible()
    # A favourite is found, and so are words of a prompt.
    card.locator(".star").press("Enter")
    playwright.expect(card.locator(".star")).to_have_text("★")
    playwright.expect(card.locator(".star")).to_be_focused()
    page.locator("#onlyFavourites").check()
    playwright.expect(page.locator("#sets li")).to_have_count(1)
    page.locator("#search").fill("words of nobody")
    playwright.expect(page.locator("#sets li")).to_have_count(0)
    page.locator("#search").fill("")
    page.locator("#onlyFavourites").uncheck()
    count, away = page.locator("#sets li").count(), page.locator("#sets li button").last
    away.press("Enter")
    playwright.expect(away).to_have_text("For good?")
    away.press("Enter")
    playwright.expect(page.locator("#sets li")).to_have_count(count - 1)


def test_a_storyboard_is_refused_in_one_line_and_modes_are_chosen_by_keys(page):
    playwright.expect(page.locator("#ready")).to_have_text("ready", timeout=PATIENCE)
    page.locator("input[value=set]").focus()
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#instruction")).to_be_visible()
    playwright.expect(page.locator("#cannot")).to_be_hidden()
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#formError")).to_contain_text("there is no picture to start from")
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("#generate")).to_be_enabled()
    page.locator("#scenes textarea").first.fill("{villain}, waving, flag")
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#formError")).to_contain_text("names 'villain', who is none of hero")
    shot(page, "studio-storyboard")
    page.locator("input[value=set]").check()
    page.locator("#settings summary").click()
    page.locator("#candidates").fill("51")
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#formError")).to_contain_text("less than or equal to 50")


def test_what_the_tiny_generator_does_not_know_is_said_and_examples_help(page):
    page.locator("#theme").fill("a blue dragon with a crown at night")
    page.locator("#generate").click()
    playwright.expect(page.locator("#formError")).to_contain_text("'dragon'")
    shot(page, "studio-refused")
    page.locator("#words summary").click()
    # Words of a person's own are replaced at the second press only, of the key too.
    page.locator("#tabMake").focus()
    page.keyboard.press("e")
    playwright.expect(page.locator("#example")).to_have_text("Replace your words?")
    assert "dragon" in page.locator("#theme").input_value()
    page.keyboard.press("e")
    playwright.expect(page.locator("#formError")).to_be_hidden()
    playwright.expect(page.locator("#example")).to_have_text("New example")
    assert "dragon" not in page.locator("#theme").input_value()


def test_a_job_can_be_cancelled(page):
    page.locator("#settings summary").click()
    page.locator("#candidates").fill("50")
    page.locator("#steps").fill("200")
    page.locator("#generate").click()
    playwright.expect(page.locator("#percent")).to_contain_text("%", timeout=PATIENCE)
    page.locator("#cancel").click()
    playwright.expect(page.locator("#progress")).to_be_hidden(timeout=PATIENCE)
    playwright.expect(page.locator("#generate")).to_be_enabled()
    playwright.expect(page.locator("#formError")).to_be_hidden()


def test_uploads_are_judged_and_no_images_are_refused_by_name(page):
    page.keyboard.press("j")
    hero = Panel("red", "round", "crown", "night", "waving", "flag")
    other = Panel("blue", "tall", "cap", "day", "standing", "tree")
    files = [
        {"name": "first.png", "mimeType": "image/png", "buffer": png(hero)},
        {
            "name": "second.png",
            "mimeType": "image/png",
            "buffer": png(Panel("red", "round", "crown", "night", "jumping", "boat")),
        },
        {"name": "stranger.png", "mimeType": "image/png", "buffer": png(other)},
        {"name": "letter.png", "mimeType": "image/png", "buffer": b"Dear Sir or Madam,"},
    ]
    page.locator("#files").set_input_files(files)
    playwright.expect(page.locator("#uploads li")).to_have_count(3)
    playwright.expect(page.locator("#uploadErrors li")).to_have_text(["letter.png: not a PNG, JPEG or WebP image"])
    page.locator("#criteria").fill(
        "The hero wears the same hat in all images.\nThe hero has the same colour in all images."
    )
    page.locator("#judgeNow").click()
    playwright.expect(page.locator("#judged")).to_be_visible(timeout=PATIENCE)
    playwright.expect(page.locator("#judgeStrip .odd figcaption")).to_contain_text("stranger.png")
    cells = [float(text) for text in page.locator("#judgeMatrix td").all_text_contents()]
    assert cells[0] > 0.5 > max(cells[1], cells[3])
    shot(page, "studio-judged")
    page.locator("#uploads button").first.click()
    playwright.expect(page.locator("#uploads li")).to_have_count(2)


def test_judge_waits_for_every_upload(page):
    page.keyboard.press("j")
    held = []

    def hold(route):
        held.append(route)

    page.route("**/api/uploads?name=second*", hold)
    files = [
        {
            "name": f"{name}.png",
            "mimeType": "image/png",
            "buffer": png(Panel("red", "round", "crown", "night", how, "flag")),
        }
        for name, how in (("first", "waving"), ("second", "jumping"))
    ]
    before = page.locator("#uploads li").count()
    page.locator("#files").set_input_files(files)
    playwright.expect(page.locator("#uploads li")).to_have_count(before + 1)
    playwright.expect(page.locator("#arriving")).to_have_text(
        "1 more image is on the way; Judge waits for all of them."
    )
    playwright.expect(page.locator("#judgeNow")).to_be_disabled()
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#judgeProgress")).to_be_hidden()

    held[0].continue_()
    playwright.expect(page.locator("#uploads li")).to_have_count(before + 2)
    playwright.expect(page.locator("#arriving")).to_be_hidden()
    playwright.expect(page.locator("#judgeNow")).to_be_enabled()


def test_a_set_is_checked_and_its_odd_one_out_is_redrawn_by_keys(browser, link):
    page = browser.new_context(viewport={"width": 1320, "height": 900}).new_page()
    page.goto(link)
    playwright.expect(page.locator("#theme")).not_to_have_value("")
    page.keyboard.press("j")
    scenes = [("waving", "flag"), ("jumping", "boat"), ("standing", "tree"), ("waving", "lamp")]
    panels = [Panel("red", "round", "crown", "night", pose, prop) for pose, prop in scenes]
    shown = [*panels[:3], Panel("red", "round", "cap", "night", "waving", "lamp")]
    page.locator("#files").set_input_files(
        [
            {"name": f"{number}.png", "mimeType": "image/png", "buffer": png(panel)}
            for number, panel in enumerate(shown, 1)
        ]
    )
    playwright.expect(page.locator("#uploads li")).to_have_count(4)

    # Without a calibration the threshold is 0.5, and the verdict is text.
    page.locator("#checkNow").focus()
    page.keyboard.press("Enter")
    captions = page.locator("#checkStrip figcaption")
    playwright.expect(captions).to_have_count(4, timeout=PATIENCE)
    playwright.expect(captions.nth(0)).to_contain_text("belongs: 0.")
    playwright.expect(captions.nth(3)).to_contain_text("fits least: 0.")
    playwright.expect(page.locator("#checkVerdict")).to_contain_text("4.png fits the others least (0.")
    playwright.expect(page.locator("#checkWords")).to_contain_text("1 of 4 is below 0.5.")
    playwright.expect(page.locator("#checkWords")).to_contain_text("The least score is a rule of thumb")
    playwright.expect(page.locator("#checkWords")).to_contain_text("The mean of all pairs is 0.")
    playwright.expect(page.locator("#checkMatrix td")).to_have_count(12)
    playwright.expect(page.locator("#tryBox")).to_be_hidden()
    playwright.expect(page.locator("#repairedLinks")).to_be_hidden()

    # A repair needs a text for each image; it shows every try, and Esc stops it.
    page.locator("#repairNow").focus()
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#judgeError")).to_contain_text("0 lines describe 4 images")
    page.locator("#judgeTexts").fill("\n".join(panel.text for panel in panels))
    page.locator("#tries").fill("20")
    page.locator("#least").fill("0.9")
    page.locator("#repairNow").focus()
    page.keyboard.press("Enter")
    tries = page.locator("#tryStrip figcaption")
    playwright.expect(tries.first).to_contain_text("Try 1 4.png: ", timeout=PATIENCE)
    playwright.expect(page.locator("#judgePhase")).to_contain_text("of 20")
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#judgeProgress")).to_be_hidden(timeout=PATIENCE)
    playwright.expect(tries.first).to_be_visible()
    playwright.expect(page.locator("#repairNow")).to_be_enabled()
    assert tries.count() < 20
    shot(page, "studio-repaired")


def test_a_made_set_is_checked_in_one_step(page):
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#underWay")).to_be_visible()
    made(page)
    playwright.expect(page.locator("#underWay")).to_be_hidden()
    theme = page.locator("#theme").input_value()
    cells = [float(text) for text in page.locator("#matrix td").all_text_contents()]

    # A panel becomes a picture of a new character, with its line.
    page.locator("#keepName").fill("banana king")
    page.get_by_role("button", name="Keep panel 2").press("Enter")
    playwright.expect(page.locator("#toast")).to_contain_text("Panel 2 is picture 1 of banana king.")
    playwright.expect(page.locator("#keepWho")).to_have_value("banana_king")
    shot(page, "studio-kept")

    # Undo deletes the picture, and the character that has no other.
    page.get_by_role("button", name="Undo").click()
    playwright.expect(page.locator("#toast")).to_have_text("banana king is as it was before.")
    playwright.expect(page.locator("#keepWho")).to_have_value("")
    playwright.expect(page.locator("#keepWho option")).to_have_count(1)

    # Panels of a set become pictures of its own character; of a set without one, of the character of the last Keep.
    page.locator("#keepName").fill("banana king")
    page.get_by_role("button", name="Keep panel 1").click()
    playwright.expect(page.locator("#keepWho")).to_have_value("banana_king")
    again = "character => showSet({ result: { ...shown, asked: { ...shown.asked, character } } })"
    for character in ("", "banana_king"):
        page.evaluate(again, character)
        playwright.expect(page.locator("#keepWho")).to_have_value("banana_king")

    # The name of a character that is there is no fault: the panel becomes a picture of it.
    page.locator("#keepWho").select_option("")
    page.locator("#keepName").fill("banana king")
    page.get_by_role("button", name="Keep panel 3").click()
    playwright.expect(page.locator("#toast")).to_contain_text("Panel 3 is picture 2 of banana king.")
    page.get_by_role("button", name="Close this message").click()
    playwright.expect(page.locator("#toast")).to_be_hidden()

    # The check asks the question of the ranking, so its scores are the medians of the table above.
    page.locator("#checkMade").click()
    captions = page.locator("#checkStrip figcaption")
    playwright.expect(captions).to_have_count(4, timeout=PATIENCE)
    medians = [f"{median(cells[3 * panel : 3 * panel + 3]):.2f}" for panel in range(4)]
    assert [text.rpartition(" ")[2] for text in captions.all_text_contents()] == medians
    playwright.expect(captions.nth(1)).to_contain_text("Panel 2 ")
    assert page.locator("#judgeTheme").input_value() == theme
    assert len(page.locator("#judgeTexts").input_value().split("\n")) == 4
    assert page.locator("#judgeLayout").input_value() == "2x2"


def test_one_panel_is_drawn_again_beside_its_picture(page):
    page.locator("#settings summary").click()
    page.locator("#candidates").fill("1")
    page.keyboard.press("Control+Enter")
    playwright.expect(page.locator("#ranks .card")).to_have_count(1, timeout=PATIENCE)
    playwright.expect(page.locator("#progress")).to_be_hidden(timeout=PATIENCE)
    former = page.locator("#right").get_attribute("src")
    page.get_by_role("button", name="Draw panel 3 again").press("Enter")
    note = page.locator("#keptLine")
    playwright.expect(note).to_contain_text("Panel 3 was drawn again. The page has 0.", timeout=PATIENCE)
    assert page.locator("#right").get_attribute("src") != former
    page.locator("#against").select_option("source-1")
    playwright.expect(page.locator("#leftTag")).to_have_text("the page before")
    playwright.expect(page.locator("#seedLine")).to_contain_text("Redrawn")
    shot(page, "studio-redrawn")


def test_a_repaired_page_is_saved_whole(page):
    """The server's answer is written down here: what is looked at is the page."""
    panels = [{"image": f"panel {number}", "passed": True, "score": 0.9} for number in (1, 2)]
    tries = [{"try": 1, "panel": 2, "image": "try-1", "accepted": True, "verdict": "0.90 of 1, better, kept"}]
    result = {"verdict": ["All 2 belong together."], "panels": panels, "tries": tries, "images": ["0", "try-1"]}
    result |= {"odd": None, "questions": {"theme": ""}, "calibrated": False, "note": "", "kept": "000007"}
    result |= {"mean": 0.9, "matrix": [[None, 0.9], [0.9, None]], "least": 0.5}
    page.keyboard.press("j")
    page.evaluate("job => showCheck(job)", {"id": "9", "status": "done", "result": result})
    save = page.get_by_role("link", name="Save the repaired page")
    playwright.expect(save).to_have_attribute("href", "/images/9/page.png")
    playwright.expect(page.locator("#exportRepaired")).to_have_attribute("href", "/sets/000007/0.zip")
    playwright.expect(page.locator("#lookAtRepaired")).to_have_attribute("href", "#set-000007")
    playwright.expect(page.locator("#tryStrip figcaption")).to_have_text("Try 1 panel 2: 0.90 of 1, better, kept")


@pytest.mark.parametrize("look", [("phone", 390, 844, "light"), ("dark", 1320, 900, "dark")], ids=lambda look: look[0])
def test_everything_fits_on_a_phone_and_in_the_dark(browser, link, look):
    name, width, height, scheme = look
    page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
    with page.expect_response("**/api/characters"):  # whose list moves what is below it
        page.goto(link)
    playwright.expect(page.locator("#theme")).not_to_have_value("")
    page.locator("#generate").click()  # another browser's sets are not shown here
    playwright.expect(page.locator("#ranks .card").first).to_be_visible(timeout=PATIENCE)
    shot(page, f"studio-{name}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#tabJudge").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shot(page, f"studio-{name}-judged")


def test_a_tab_has_an_address_and_the_form_outlasts_a_reload(page):
    page.locator("#sentence").fill("Four images of a fox: it runs, it sleeps, it eats, it waves")
    page.locator("#writePanels").click()
    error = page.locator("#formError")
    playwright.expect(error).to_contain_text("“What all panels share” has unknown words, 'fox'; the practice model has")
    page.locator("#settings summary").click()
    page.locator("#candidates").fill("2")
    page.locator("#tabCharacter").click()
    page.locator("#tabHistory").click()
    page.go_back()
    playwright.expect(page.locator("#character")).to_be_visible()
    page.go_back()
    playwright.expect(page.locator("#make")).to_be_visible()
    page.go_forward()
    page.reload()
    playwright.expect(page.locator("#character")).to_be_visible()
    assert page.url.endswith("#character")
    playwright.expect(page.locator("#theme")).to_have_value("a fox")
    assert page.locator("#panels textarea").last.input_value() == "a fox, it waves"
    assert page.locator("#candidates").input_value() == "2"

    # Words of the person still, as the button asks.
    page.locator("#tabMake").click()
    page.locator("#example").click()
    playwright.expect(page.locator("#example")).to_have_text("Replace your words?")


def test_a_phone_has_one_row_of_a_header_and_scrolls_to_the_picture(browser, link):
    context = browser.new_context(viewport={"width": 390, "height": 740})
    page = context.new_page()
    page.goto(link)
    playwright.expect(page.locator("#theme")).not_to_have_value("")
    page.locator("#generate").click()
    made(page)
    header = page.locator("header").bounding_box()
    assert header["height"] < 70
    picture = page.locator("#compareBox").bounding_box()
    assert header["height"] <= picture["y"] < 200
    page.locator("#tabModels").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator("#tabModels").bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= 390
    context.close()


def test_the_header_says_that_the_studio_has_stopped_and_help_opens_at_its_top(browser, link):
    context = browser.new_context(viewport={"width": 1320, "height": 500})
    page = context.new_page()
    page.goto(link)
    playwright.expect(page.locator("#ready")).to_have_text("ready", timeout=PATIENCE)
    page.locator("#help").click()
    playwright.expect(page.locator("#keys h2").first).to_be_focused()
    assert page.locator("#keys").evaluate("dialog => dialog.scrollTop") == 0
    page.keyboard.press("Escape")
    page.route("**/api/**", lambda route: route.abort())
    playwright.expect(page.locator("#ready")).to_have_text("not connected")
    page.unroute("**/api/**")
    playwright.expect(page.locator("#ready")).to_have_text("ready")
    context.close()


def test_the_practice_model_says_what_it_cannot_draw_and_only_kept_pictures_are_saved(page):
    """The pictures' scores are written down here: what is looked at is the page."""
    pictures = [{"file": file, "caption": "", "version": "1"} for file in ("01.png", "02.png")]
    fox = {"name": "fox", "description": "a fox", "note": "", "loras": [], "pictures": pictures}
    page.route(
        "**/api/characters", lambda route: route.fulfill(json=[fox | {"least": 3, "steps": 200, "training": None}])
    )
    page.keyboard.press("c")
    playwright.expect(page.locator("#sheetWorld")).to_contain_text("can only draw heroes of its own world")
    show = """score => {
      const one = { picture: 0, image: "base-7", score };
      sheet = { id: "000009", images: "/sets/000009", theme: "fox", asked: { scenes: ["it runs"] }, candidates: [one] };
      drawSheet();
    }"""
    page.evaluate(show, 0.0)
    note, save = page.locator("#sheetNote"), page.locator("#saveSheet")
    playwright.expect(note).to_contain_text("for art of your own load a model under Models")
    playwright.expect(save).to_have_attribute("href", "/sheets/of/fox.png")
    page.locator("#sheetPictures input").check()
    playwright.expect(save).to_have_attribute("href", "/sheets/000009.png?image=base-7")
    page.evaluate(show, 0.9)
    playwright.expect(note).to_be_hidden()
    page.evaluate("state.editor = 'a/real-one'")
    page.evaluate(show, 0.0)
    playwright.expect(note).to_contain_text("make another picture the first one")
    playwright.expect(page.locator("#sheetWorld")).to_be_hidden()


def test_without_the_link_nothing_is_shown(browser, link):
    page = browser.new_context().new_page()
    page.goto(link.rpartition("/join#")[0] + "/")
    playwright.expect(page.locator("#toast")).to_contain_text("open the page by the link that the command printed")


def test_a_link_on_another_page_asks_first_and_leaves_the_address(browser, link, tmp_path):
    elsewhere = tmp_path / "page.html"
    elsewhere.write_text(f'<a href="{link}">Studio</a>')
    page = browser.new_context().new_page()
    page.goto(elsewhere.as_uri())
    page.locator("a").click()
    playwright.expect(page.locator("#open")).to_be_visible()
    assert page.url == link.partition("#")[0]
    page.locator("#open").click()
    playwright.expect(page.locator("#theme")).not_to_have_value("")
    assert page.url == link.partition("join#")[0]


def test_a_person_signs_out_of_this_browser_and_the_link_opens_it_again(page, link):
    page.locator("#help").click()
    page.locator("#leave").click()
    playwright.expect(page.locator("#toast")).to_contain_text("open the page by the link that the command printed")
    page.goto(link)
    playwright.expect(page.locator("#theme")).not_to_have_value("")


@pytest.fixture
def teaching(browser, tmp_path):
    """A page of a studio that has no LoRA yet."""
    command = [sys.executable, "-c", COMMAND, "studio", "--port", "0", "--history", str(tmp_path / "sets")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(process.stdout.readline().removeprefix("studio: ").strip())
    playwright.expect(page.locator("#theme")).not_to_have_value("")  # the page behind the link
    yield page
    context.close()
    process.terminate()
    process.wait(30)
    process.stdout.close()


def drop_hero(page, scenes) -> None:
    """Make the character hero of pictures."""
    shown = [Panel("red", "round", "crown", "night", pose, prop) for pose, prop in scenes]
    page.locator("#personFiles").set_input_files(
        [{"name": f"{i}.png", "mimeType": "image/png", "buffer": png(panel)} for i, panel in enumerate(shown)]
    )
    playwright.expect(page.locator("#dropped li")).to_have_count(len(shown), timeout=PATIENCE)
    page.locator("#personWords").fill("red round hero, crown, night")
    page.locator("#personName").fill("hero")
    page.locator("#personName").press("Enter")
    playwright.expect(page.locator("#personPictures img")).to_have_count(len(shown), timeout=PATIENCE)


def test_captions_typed_one_after_the_other_are_all_kept(teaching):
    """At the pace of a person, who goes to the next box while the one before is saved."""
    page = teaching
    page.keyboard.press("c")
    drop_hero(page, [("waving", "flag"), ("jumping", "boat"), ("standing", "tree"), ("waving", "lamp")])
    theme, boxes = page.locator("#theme").input_value(), page.locator("#personPictures textarea")
    texts = [
        "waving before home, the flag on top",
        "jumps to the boat, front view of the face",
        "here more of the moonlit tree, for the eyes",
        "holds the lamp other to the face, at home",
    ]
    boxes.first.focus()
    page.keyboard.type(texts[0], delay=80)
    for key in ("Tab", "Tab"):  # across the button that removes the next picture
        page.keyboard.press(key)
    page.keyboard.type(texts[1], delay=80)
    boxes.nth(2).click()
    page.keyboard.type(texts[2], delay=80)
    boxes.nth(3).click()
    page.keyboard.type(texts[3], delay=80)

    # Teaching waits for the last one.
    sent = []
    page.on("request", lambda request: sent.append((request.url.rpartition("/")[2], request.post_data or "")))
    page.route("**/train", lambda route: route.fulfill(status=409, json={"error": "not now"}))
    page.locator("#train").click()
    playwright.expect(page.locator("#trainError")).to_have_text("not now")
    names = [name for name, _ in sent if name in ("hero", "train")]
    assert names in (["hero", "train"], ["train"])
    kept = page.evaluate("fetch('/api/characters').then((answer) => answer.json())")[0]["pictures"]
    assert [picture["caption"] for picture in kept] == texts
    assert [box.input_value() for box in boxes.all()] == texts
    playwright.expect(page.locator("#character")).to_be_visible()
    assert page.locator("#theme").input_value() == theme

    # A box that vanishes while a person types leaves no shortcuts behind.
    boxes.last.focus()
    page.evaluate("document.activeElement.closest('li').remove()")
    page.keyboard.type("home", delay=80)
    playwright.expect(page.locator("#character")).to_be_visible()
    page.mouse.click(4, 400)
    page.keyboard.press("h")
    playwright.expect(page.locator("#history")).to_be_visible()


def test_another_picture_becomes_the_first_one(teaching):
    page = teaching
    page.keyboard.press("c")
    drop_hero(page, [("waving", "flag"), ("jumping", "boat")])
    boxes = page.locator("#personPictures textarea")
    boxes.last.fill("jumping, boat")
    page.get_by_role("button", name="Make picture 2 the first").press("Enter")
    playwright.expect(boxes.first).to_have_value("jumping, boat")
    playwright.expect(boxes.first).to_be_focused()
    assert boxes.last.input_value() == ""


SHEET_OF = [("waving", "flag"), ("jumping", "boat"), ("standing", "tree"), ("waving", "lamp"), ("jumping", "house")]


def test_a_character_is_drawn_by_keys(teaching):
    """The illustrator's task, first part: five pictures and a sheet."""
    page = teaching
    playwright.expect(page.locator("#theme")).not_to_have_value("", timeout=PATIENCE)
    shot(page, "studio-first")
    page.locator("#startCharacter").press("Enter")
    page.locator("#personWords").fill("red round hero, crown, night")
    page.locator("#savePerson").press("Enter")
    playwright.expect(page.locator("#personError")).to_have_text("give the character a name, such as hero")
    drop_hero(page, SHEET_OF)
    playwright.expect(page.locator("#savePerson")).to_be_disabled()

    # The sheet, of which one picture is drawn again, and two are kept. The first picture is a night with a flag.
    lines = [field.input_value() for field in page.locator("#sheetScenes textarea").all()]
    assert lines[:2] == ["Change the scene to sunset.", "Put a boat beside the hero."]
    page.locator("#personPictures textarea").first.fill("waving, boat")
    expected = ["Change the scene to sunset.", "Put a tree beside the hero."]
    playwright.expect(page.locator("#sheetScenes textarea").nth(1)).to_have_value(expected[1])
    page.locator("#sheetWords summary").press("Enter")
    page.get_by_role("button", name="Paint the hero blue.").press("Enter")
    playwright.expect(page.locator("#sheetScenes textarea").last).to_have_value("Paint the hero blue.")
    page.get_by_role("button", name="Remove this picture").last.press("Enter")
    page.locator("#sheetCandidates").fill("2")
    page.locator("#drawSheet").press("Enter")
    playwright.expect(page.locator("#sheetPictures > li")).to_have_count(4, timeout=2 * PATIENCE)
    second = page.locator("#sheetPictures > li").nth(1)
    second.get_by_role("button", name="Picture 2 again").press("Enter")
    playwright.expect(second.locator(".thumb")).to_have_count(4, timeout=PATIENCE)
    second.locator(".thumb").last.press("Enter")
    playwright.expect(second.locator(".thumb").last).to_have_attribute("aria-pressed", "true")
    for number, box in enumerate(page.locator("#sheetPictures input").all()):
        box.set_checked(number < 2)
    with page.expect_download() as download:
        page.locator("#saveSheet").click()
    with Image.open(download.value.path()) as saved:
        assert saved.size == (3 * 64, 64)  # the original and the two kept drawings at its size
    page.locator("#keepSheet").press("Enter")
    playwright.expect(page.locator("#personPictures img")).to_have_count(7, timeout=PATIENCE)
    captions = [box.input_value() for box in page.locator("#personPictures textarea").all()]
    assert captions[5:] == expected
    with page.expect_download() as download:
        page.locator("#saveSheet").click()
    with Image.open(download.value.path()) as saved:
        assert saved.size == (7 * 64, 64)  # no drawing is marked now, so its own pictures

    # One card of the history, whose pictures are counted.
    page.locator("#tabHistory").click()
    playwright.expect(page.locator("#sets li")).to_have_count(1, timeout=PATIENCE)
    page.locator("#sets a").click()
    playwright.expect(page.locator("#ranks .place")).to_have_text([str(number) for number in range(1, 11)])
    playwright.expect(page.locator("#scoreWords")).to_have_text("kept and followed")
    page.reload()
    page.keyboard.press("c")
    playwright.expect(page.locator("#personPictures img")).to_have_count(7, timeout=PATIENCE)
    playwright.expect(page.locator("#sheetPictures > li")).to_have_count(4, timeout=PATIENCE)
    shot(page, "studio-character")


def test_a_character_is_taught_and_used_by_keys(teaching):
    """Second part: a LoRA, stopped and gone on with; its gallery; a page of four panels; another LoRA in its place."""
    page = teaching
    playwright.expect(page.locator("#ready")).to_have_text("ready", timeout=PATIENCE)
    page.keyboard.press("c")
    drop_hero(page, SHEET_OF)
    page.locator("#trainSteps").fill("40")  # more than are done before it is stopped
    page.locator("#train").press("Enter")
    playwright.expect(page.locator("#train")).to_have_text("Teaching …")
    playwright.expect(page.locator("#ready")).to_have_text("teaching hero", timeout=PATIENCE)
    playwright.expect(page.locator("#generate")).to_be_disabled()
    playwright.expect(page.locator("#busy")).to_contain_text("hero is being taught, and has the machine")
    playwright.expect(page.locator("#trainHint")).to_contain_text("5 of 5 pictures have no words under them")
    playwright.expect(page.locator("#drawSheet")).to_be_disabled()
    playwright.expect(page.locator("#trainPhase")).to_contain_text("Learning", timeout=2 * PATIENCE)
    playwright.expect(page.locator("#trainPhase")).to_contain_text("left", timeout=PATIENCE)
    page.locator("#stopTraining").press("Enter")
    playwright.expect(page.locator("#resumeTraining")).to_be_visible(timeout=PATIENCE)
    playwright.expect(page.locator("#trainPhase")).to_contain_text("Stopped: step ")
    assert page.locator("#trainPhase").text_content() != "Stopped: step 0 of 40"
    playwright.expect(page.locator("#trainSteps")).to_have_attribute("placeholder", re.compile("200, about .* minute"))
    page.locator("#resumeTraining").press("Enter")
    playwright.expect(page.locator("#trainPhase")).to_have_text("Learned: step 40 of 40", timeout=3 * PATIENCE)
    playwright.expect(page.locator("#useLora")).to_be_visible()  # hidden while it learns, with the pictures of before
    playwright.expect(page.locator("#galleryPictures img")).to_have_count(16)
    playwright.expect(page.locator("#galleryNote")).to_contain_text("Left: the model as it was.")
    page.locator("#galleryPictures button").last.press("Enter")
    playwright.expect(page.locator("#largeImage img")).to_be_visible()
    playwright.expect(page.locator("#largeTitle")).to_contain_text("with hero: ")
    page.keyboard.press("Escape")
    page.locator("#useLora").press("Enter")
    playwright.expect(page.locator("#models")).to_contain_text("+ hero 0.50", timeout=PATIENCE)
    playwright.expect(page.locator("#theme")).to_have_value("red round hero, crown, night")
    page.keyboard.press("Control+Enter")
    made(page)
    page.keyboard.press("o")
    playwright.expect(page.locator("#loras li")).to_contain_text("loras/hero", timeout=PATIENCE)

    # Taught anew, the character has its new LoRA alone.
    page.keyboard.press("c")
    page.locator("#train").press("Enter")
    playwright.expect(page.locator("#useLora")).to_be_hidden(timeout=PATIENCE)
    playwright.expect(page.locator("#trainPhase")).to_have_text("Learned: step 40 of 40", timeout=3 * PATIENCE)
    page.locator("#useLora").press("Enter")
    playwright.expect(page.locator("#toast")).to_have_text("hero-2 is used in place of hero.", timeout=PATIENCE)
    playwright.expect(page.locator("#models")).to_have_text("drawn by the practice models + hero-2 0.50")
    playwright.expect(page.locator("#lorasOn")).to_have_text("hero-2 0.50; all of them times this")


def test_models_are_chosen_and_a_licence_is_accepted_before_a_download(page):
    page.keyboard.press("o")
    playwright.expect(page.locator("#loras li")).to_have_count(1, timeout=PATIENCE)
    first = page.locator("#offers li").first
    playwright.expect(first).to_contain_text("FLUX.2-klein-base-4Bstart here")
    playwright.expect(first).to_contain_text("learns your character on a card of 12 GB")
    playwright.expect(first).to_contain_text("smallest card 8 GB, 40 GB to hold it whole")
    playwright.expect(page.locator("#offers .start")).to_have_count(1)
    page.locator("#offers button").first.press("Enter")
    playwright.expect(page.locator("#startDownload")).to_be_disabled()
    page.locator("#accepted").check()
    playwright.expect(page.locator("#startDownload")).to_be_enabled()
    shot(page, "studio-licence")
    page.keyboard.press("Escape")
    page.locator("#checkMemory").press("Enter")
    playwright.expect(page.locator("#fit")).to_have_text("The practice models fit every machine.", timeout=PATIENCE)
    shot(page, "studio-models")
