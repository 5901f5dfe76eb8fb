"""The page of the studio: by a simulated user without a browser, and once in a real Chromium by keys."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from browsers import PATIENCE, playwright
from fastapi.testclient import TestClient
from PIL import Image
from starlette.websockets import WebSocketDisconnect

from pacorl.io.images import png_bytes
from pacorl.studio.folder import Recipe
from pacorl.studio.page import StudioPage
from pacorl.studio.work import Studio
from pacorl.types import TINY

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)


@pytest.fixture
def studio(tmp_path):
    studio = Studio(tmp_path / "studio")
    yield studio
    studio.close()


def visit(studio: Studio, story: Callable[[Any], Awaitable[None]]) -> None:
    """Open the page as a simulated user, and do what a story says. A failure may leave a task that never ends."""
    from nicegui.testing import user_simulation

    async def simulate() -> None:
        async with user_simulation(root=lambda: StudioPage(studio) and None) as user:
            await user.open("/")
            await story(user)

    def end(*_: object) -> None:
        raise TimeoutError("the story, or what it left behind, takes too long")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(180)
    try:
        asyncio.run(simulate())
    finally:
        signal.alarm(0)


RECIPE = Recipe(theme="a fox", layout="1x2", prompt="a fox", model=TINY, Software="pacorl 1")
RECIPE = RECIPE.updated(panels=["runs", "sleeps"], seed=7, tied=2)


def add_page(studio: Studio) -> None:
    drawn = [(Image.new("RGB", (16, 8), (tens, 0, 0)), RECIPE.updated(score=tens / 100)) for tens in (90, 80)]
    studio.keep(page=studio.folder.add_page(drawn), drawing=0)


def test_a_sentence_unfolds_into_panels_that_are_kept_as_they_are_typed(studio):
    studio.keep(words="")

    async def story(user):
        user.find("What should the pictures show?").type("Three pictures of a fox: runs; sleeps; eats")
        user.find("Show the panels").click()
        await user.should_see("a fox\nruns\nsleeps\neats", retries=20)
        user.find("What should the pictures show?").type("\nhides")
        press(user, "Draw")  # the practice model knows no fox, and says so at once
        await user.should_see("'fox'", retries=20)

    visit(studio, story)
    studio.save()
    assert studio.folder.read_draft().words == "a fox\nruns\nsleeps\neats\nhides"


def test_pages_are_shown_ranked_removed_brought_back_and_fill_the_form_in(studio):

    add_page(studio)

    async def story(user):
        await user.should_see("0.90 together, a tie of 2", retries=20)
        press(user, "0.80 together, a tie of 2")
        assert studio.draft.drawing == 1
        press(user, "Remove a fox")
        await user.should_see("Removed a fox", retries=20)
        await user.should_see("Your pages appear here", retries=20)
        assert studio.folder.pages == []
        user.find("Undo").click()
        await user.should_see("0.90 together", retries=20)
        user.find("Fill in its words").click()
        await user.should_see("a fox\nruns\nsleeps", retries=20)
        assert (studio.draft.words, studio.draft.seed) == ("a fox\nruns\nsleeps", 7)

    visit(studio, story)


def test_dropped_pictures_become_a_page_with_its_recipe_and_what_is_none_is_named(studio):
    dropped = (RECIPE.texts, {"prompt": "{}"}, {**RECIPE.texts, "place": "1"})  # a page, of ComfyUI, a panel of a page

    async def story(user):
        for texts in dropped:
            await drop(user, {"fox.png": png_bytes(Image.new("RGB", (16, 8)), texts)})
        assert [page[0].recipe.theme for page in reversed(studio.folder.pages)] == ["a fox", "", ""]
        studio.folder.remove("all", studio.folder.path / "pages")
        await drop(user, {"a.png": png_bytes(Image.new("RGB", (8, 8))), "b.png": b"no image"})
        await user.should_see("b.png", retries=20)
        assert studio.folder.pages == []
        await drop(user, {"c.png": png_bytes(Image.new("RGB", (8, 8))), "d.png": png_bytes(Image.new("RGB", (8, 8)))})
        await user.should_see("The practice model and the practice judge know only", retries=20)
        await user.should_not_see("Check and repair", retries=20)
        studio.names = replace(studio.names, judge="http://127.0.0.1:8000")
        await drop(user, {f"{name}.png": png_bytes(Image.new("RGB", (8, 8))) for name in "abcde"})
        await user.should_see("a.png, b.png, c.png, d.png, e.png", retries=20)
        await user.should_see("Check and repair", retries=20)
        assert studio.folder.pages[0][0].recipe.layout == "1x5"
        await drop(user, {"comic.png": png_bytes(Image.new("RGB", (16, 16)))})
        await user.should_not_see("Check and repair", retries=20)
        user.find("Rows x columns").elements.pop().set_value("2x2")
        await user.should_see("Check and repair", retries=20)

    visit(studio, story)
    assert studio.folder.pages[0][0].recipe.layout == "2x2"


def press(user: Any, name: str) -> None:
    """Press the button of an accessible name, which may go on with a date."""
    from nicegui import ui

    interaction = user.find(kind=ui.button)
    names = {button: button.props.get("aria-label") or button.text for button in interaction.elements}
    (interaction.elements,) = [{button} for button, own in names.items() if own == name or own.startswith(f"{name},")]
    interaction.click()


async def drop(user: Any, files: dict[str, bytes]) -> None:
    """Drop files on the first zone of a page."""
    from nicegui import ui
    from nicegui.elements.upload_files import SmallFileUpload

    zone = min(user.find(kind=ui.upload).elements, key=lambda element: element.id)
    await zone.handle_uploads([SmallFileUpload(name, "image/png", content) for name, content in files.items()])
    await asyncio.sleep(0.5)


def test_a_character_is_made_kept_captioned_and_removed_by_one_rule(studio):

    add_page(studio)

    async def story(user):
        user.find("Characters").click()
        user.find("Name").type("Milo the hat")
        user.find("What it looks like").type("a red hero with a crown")
        user.find("Make it").click()
        await user.should_see("From three pictures on.", retries=20)
        user.find("Pages").click()
        await user.should_see("Check and repair", retries=20)
        press(user, "Keep panel 2 as a picture of Milo the hat")
        await user.should_see("Kept as a picture of Milo the hat.", retries=20)
        user.find("Characters").click()
        await user.should_see("What it shows", retries=20)
        assert [caption for _, caption in studio.folder.pictures("Milo_the_hat")] == ["sleeps"]
        press(user, "Remove picture 1 of Milo the hat")
        await user.should_see("Removed picture 1 of Milo the hat.", retries=20)
        assert studio.folder.pictures("Milo_the_hat") == []
        user.find("Undo").click()
        await user.should_see("What it shows", retries=20)
        user.find("Remove Milo the hat").click()
        await user.should_see("Removed Milo the hat.", retries=20)
        await user.should_see("A new character", retries=20)
        user.find("Undo").click()
        await asyncio.sleep(1)

    visit(studio, story)
    assert studio.folder.characters() == ["Milo_the_hat"] == [studio.draft.character]


def test_each_new_character_is_opened_and_a_refused_one_stays_as_it_is_typed(studio):
    async def story(user):
        user.find("Characters").click()
        for name, refused, reason in (("Grünling", "G/n", "cannot name"), ("Nora", " ", "cannot name")):
            for typed, shown in ((refused, reason), (name, "Pictures")):
                user.find("Name").clear().type(typed)
                user.find("What it looks like").clear().type("a hero")
                press(user, "Make it")
                await user.should_see(shown, retries=20)
            assert studio.draft.character == name
            user.find("What it looks like").clear().type("a red hero").trigger("blur")
            studio.keep(character="")
            await user.should_see("A new character", retries=20)
            await user.should_not_see("a red hero", retries=20)

    visit(studio, story)
    assert [studio.folder.character(name).text for name in ("Grünling", "Nora")] == ["a red hero"] * 2


def test_nothing_is_read_without_the_link_and_the_socket_asks_for_it_too(studio):
    from nicegui import core
    from nicegui.testing.general import nicegui_reset_globals

    from pacorl.studio.server import make_app

    add_page(studio)
    core.app.middleware_stack = None  # of simulated users in this process
    own = {"cookie": f"pacorl_studio_8767={studio.folder.key}; pacorl_studio_80={studio.folder.key}"}
    picture = studio.folder.pages[0][0].path.relative_to(studio.folder.path)
    with nicegui_reset_globals(), TestClient(make_app(studio), base_url="http://127.0.0.1:8767") as client:
        for path in ("/", f"/file/{picture}", "/_nicegui_ws/socket.io/?EIO=4&transport=polling"):
            headers = {401: {"cookie": "pacorl_studio_8767=wrong"}, 200: own, 421: own | {"host": "evil.example"}}
            assert [client.get(path, headers=each).status_code for each in headers.values()] == [*headers]
            assert client.get(path).status_code == 401
        assert client.get("/file/%2E%2E/outside.png", headers=own).status_code == 404
        socket = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        host = {"host": "127.0.0.1:8767"}  # the test client's own is another for websockets
        for each in (host, own | host | {"origin": "http://evil.example"}, own | {"host": "evil.example"}):
            with pytest.raises(WebSocketDisconnect), client.websocket_connect(socket, headers=each):
                pass


def test_a_job_that_cannot_be_stopped_does_not_hold_the_studio(tmp_path, monkeypatch):
    from pacorl.studio import server

    never = threading.Event()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(server, "make_app", lambda studio: studio.submit(never.wait))
    monkeypatch.setattr(server, "run", lambda *_: None)
    monkeypatch.setattr(server.os, "_exit", lambda code: never.set())
    server.serve(server.StudioModels(), folder=tmp_path / "studio", port=0)
    assert never.is_set()


@pytest.mark.slow
@pytest.mark.browser
def test_a_page_is_drawn_by_keys_and_outlasts_a_reload_and_a_restart(browser, tmp_path):
    command = [sys.executable, "-m", "pacorl", "studio", "--port", "0", "--folder", str(tmp_path / "studio")]

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        return process, process.stdout.readline().strip().removeprefix("studio: ")

    process, link = start()
    context = browser.new_context(viewport={"width": 1320, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    requests: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.goto(link)
    words = page.get_by_label("What should the pictures show?")
    page.get_by_role("button", name="Draw", exact=True).press("Enter")
    playwright.expect(page.locator(".hero img").first).to_be_visible(timeout=PATIENCE)
    playwright.expect(page.locator(".candidates button")).to_have_count(4)
    page.get_by_label("Draw panel 4 again").press("Enter")
    playwright.expect(page.get_by_role("navigation").get_by_label("Open ")).to_have_count(2, timeout=PATIENCE)
    playwright.expect(page.get_by_label("Draw panel 4 again")).to_be_focused()
    page.locator(".strip .shot").last.press("Enter")
    page.reload()
    playwright.expect(page.locator(".candidates button")).to_have_count(4)
    assert page.url.endswith("/")  # no address keeps the token

    # Another start has the same link.
    process.terminate()
    process.communicate(timeout=30)
    process, again = start()
    assert again.partition("#")[2] == link.partition("#")[2]
    page.goto(again)
    playwright.expect(page.locator(".candidates button")).to_have_count(4)
    playwright.expect(words).to_have_value(re.compile("^a white hero in town at night\n"))
    process.terminate()
    process.communicate(timeout=30)
    context.close()
    assert all(url.startswith(("http://127.0.0.1:", "data:", "blob:")) for url in requests)
    assert [fault for fault in faults if "ERR_CONNECTION" not in fault and "socket" not in fault.lower()] == []
