"""The page of the studio: two tabs over one `Studio`, whose every open window shows the same state."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import events, ui
from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.io.files import safe_name
from pacorl.io.images import open_image
from pacorl.studio.folder import Page, Recipe, Removed, opened
from pacorl.studio.models import JUDGE, Download, Offer, cached, fit_of, gib, judges, offers, with_loras
from pacorl.studio.work import Job, Studio, Training, lora_text
from pacorl.tiny.characters import EDITS, VALUES, character_prompts
from pacorl.types import TINY

STYLE = Path(__file__).with_name("style.css")
MOST_BYTES = 20 * 2**20
LAYOUTS = ("2x2", "1x2", "1x3", "2x3", "3x3", "1x4", "2x1", "3x1")
EXAMPLES = (
    "Four pictures of the same young dentist in light-blue scrubs, soft watercolour: explains brushing to a child; "
    "studies an X-ray; cleans a tooth; waves goodbye at the door",
    "Four pictures of a red fox with a green scarf, ink and wash: sleeps under a tree; crosses a stream; meets an owl; "
    "comes home in the snow",
)
SHEET = "from the side, walking\nfrom the front, full body\nfrom behind, looking back\nclose-up of the face, smiling"
FORM = {"sentence", "unfolded", "theme", "panels", "character", "sources", "candidates", "layout", "size", "seed"}
"""Fields of the draft that the form of a page shows."""
PRACTICE_STRENGTH = 0.5
"""The practice model learns single pictures and draws pages, which full strength spoils."""


class StudioPage:
    """One window on the studio."""

    def __init__(self, studio: Studio, download: Download) -> None:
        self.studio = studio
        self.download = download
        self.seen = studio.version  # all is drawn below
        self.opened = studio.draft.page
        self.character = next(iter(studio.folder.characters()), "")
        self.form_shown: dict[str, Any] = {}
        self.was_teaching = ""
        self.example = 0
        ui.add_css(STYLE)
        ui.page_title("pacorl studio")

        with ui.header().classes("bar"):
            ui.html("<h1>paco<b>rl</b></h1>", sanitize=False)
            with ui.tabs().props("no-caps inline-label aria-label=Sections") as tabs:
                pages = ui.tab("Pages")
                characters = ui.tab("Characters")
            ui.space()
            self.models_button()
        with ui.element("div").classes("desk-top"):
            self.status()
            with ui.tab_panels(tabs, value=pages, animated=False).classes("tabs"):
                with ui.tab_panel(pages):
                    self.pages_tab()
                with ui.tab_panel(characters):
                    self.characters_tab()
        self.toast()
        self.dialogs = ui.element("div")
        ui.timer(0.4, self.look)

    # --- what every window follows -----------------------------------------------------------------------------

    def look(self) -> None:
        """Show what has changed, here or in another window."""
        studio = self.studio
        if studio.version != self.seen:
            self.seen = studio.version
            self.strip.refresh()
            self.hero.refresh()
            if studio.draft.page != self.opened:
                self.opened = studio.draft.page
                # On a phone the result is below the form.
                ui.run_javascript("document.querySelector('.page')?.scrollIntoView({block: 'nearest'})")
            self.toast.refresh()
            self.models_button.refresh()
            self.character_view.refresh()
            if self.form_shown != studio.draft.model_dump(include=FORM):
                self.form.refresh()
        if studio.teacher.name or self.was_teaching:
            taught = repr(studio.teacher.trainings(self.character)) + studio.teacher.name
            if taught != self.was_teaching:
                self.was_teaching = taught
                self.training.refresh()
        self.status.refresh()

    @ui.refreshable_method
    def status(self) -> None:
        """The job that runs, its progress, its unfinished pictures, and its fault."""
        job = self.studio.job
        with ui.element("div").classes("status").props("role=status"):
            if not job.ended:
                with ui.row().classes("items-center"):
                    ui.spinner(size="sm").props("aria-hidden=true")
                    count = f", {min(100, 100 * job.done // job.total)} %" if job.total else ""
                    ui.label(f"{job.phase or job.name}{count}")
                    ui.button("Stop", on_click=self.stop).props("outline no-caps dense")
                with ui.row():
                    for image, caption in job.shown:
                        figure(image, caption, classes="small")
            elif job.error:
                ui.label(job.error).classes("fault")
            if self.download.runs:
                with ui.row().classes("items-center"):
                    ui.label(f"Downloading {self.download.name}: {gib(cached().get(self.download.name, 0))} so far")
                    ui.button("Stop the download", on_click=self.download.stop).props("outline no-caps dense")
            elif self.download.fault:
                ui.label(f"{self.download.name}: {self.download.fault}").classes("fault")

    def stop(self) -> None:
        self.studio.job.stopped = True

    @ui.refreshable_method
    def toast(self) -> None:
        """What was removed last, with its undo."""
        removed = self.studio.removed
        if removed:
            with ui.element("div").classes("toast").props("role=status"):
                ui.label(f"Removed {removed.what}.")
                ui.button("Undo", on_click=self.undo).props("flat no-caps dense")
                button_of("✕", "Close this message", self.close_toast)

    def undo(self) -> None:
        if self.studio.removed and attempt(partial(self.studio.folder.undo, self.studio.removed)):
            self.close_toast()

    def close_toast(self) -> None:
        self.removed(None)

    def removed(self, removed: Removed | None) -> None:
        self.studio.removed = removed
        self.studio.version += 1

    def dialog(self, name: str) -> ui.dialog:
        with self.dialogs:  # what opens a dialog may be drawn anew while it is open
            return ui.dialog(value=True).props(f'aria-label="{escaped(name)}"')

    def start(self, name: str, work: Callable[[Job], object]) -> None:
        attempt(partial(self.studio.submit, name, work))
        self.look()

    # --- pages -------------------------------------------------------------------------------------------------

    def pages_tab(self) -> None:
        with ui.element("div").classes("desk"):
            self.strip()
            with ui.element("div").classes("work"):
                self.form()
                self.hero()

    @ui.refreshable_method
    def strip(self) -> None:
        """The earlier pages, which are the output folder."""
        with ui.element("nav").classes("strip").props('aria-label="Earlier pages"'):
            drop_zone("Drop or choose pictures", self.dropped)
            for page in self.studio.folder.pages:
                recipe = page.recipes[0]
                name = recipe.theme or recipe.sentence or recipe.note or f"page {page.number}"
                with ui.element("div").classes("thumb" + " here" * (page.number == self.studio.draft.page)):
                    shown = picture_button(page.candidates[0], f"Open {name[:60]}", partial(self.open, page))
                    shown.props(f"aria-current={'true' if page.number == self.studio.draft.page else 'false'}")
                    button_of("✕", f"Remove {name[:60]}", partial(self.remove_page, page))

    def open(self, page: Page) -> None:
        self.studio.keep(page=page.number, candidate=0)
        self.look()

    def remove_page(self, page: Page) -> None:
        self.removed(self.studio.folder.remove(f"page {page.number}", page.folder))
        self.look()

    async def dropped(self, event: events.MultiUploadEventArguments) -> None:
        """Open dropped pictures: a page of this studio by its recipe, or pictures of any program."""
        files = [(file.name, await file.read()) for file in event.files]
        with suppress_and_say():
            pictures = [(opened(content, name), name) for name, content in files]
            recipe = Recipe.of(files[0][1]) if len(files) == 1 else None
            if recipe:
                page = self.studio.folder.add_page([(pictures[0][0], texts_of(files[0][1]), recipe)])
                self.open(page)
                self.restore(recipe)
            elif len(pictures) > 1:
                self.studio.add_pictures(pictures)
            else:
                self.ask_about(*pictures[0])
        self.strip.refresh()

    def ask_about(self, image: Image, name: str) -> None:
        """Ask what one picture of another program is."""
        with self.dialog("One picture") as dialog, ui.card():
            heading("One picture")
            figure(image, name, classes="small")
            layout = ui.select(list(LAYOUTS), value="2x2", label="Its panels, rows x columns").classes("wide")

            def as_page() -> None:
                if attempt(partial(self.studio.add_pictures, [(image, name)], layout.value)):
                    dialog.close()

            def as_source() -> None:
                self.change(image)
                dialog.close()

            with ui.row():
                ui.button("Open it as a page", on_click=as_page).props("no-caps")
                ui.button("Change it by words", on_click=as_source).props("outline no-caps")

    @ui.refreshable_method
    def form(self) -> None:
        """One box; a sentence unfolds into panels that can be edited."""
        studio = self.studio
        draft = studio.draft
        self.form_shown = draft.model_dump(include=FORM)
        with ui.element("section").classes("card form").props('aria-label="What to draw"'):
            label = "What should change?" if draft.sources else "What should the pictures show?"
            with ui.row().classes("sources"):
                for digest in draft.sources:
                    with ui.element("div").classes("thumb"):
                        ui.element("img").props(
                            f'src="{address(studio.folder.source(digest))}" alt="The picture to change"'
                        )
                        button_of("✕", "Do not change this picture", partial(self.drop_source, digest))
            box = ui.textarea(label, value=draft.sentence, on_change=lambda e: self.typed(sentence=e.value or ""))
            box.props("autogrow outlined input-style=min-height:3em").classes("wide").on(
                "keydown.ctrl.enter", self.draw
            )
            if draft.panels and not draft.sources:
                shared = ui.input(
                    "In all of them", value=draft.theme, on_change=lambda e: self.typed(theme=e.value or "")
                )
                shared.props("outlined dense").classes("wide")
                with ui.element("div").classes("panels"):
                    for index, text in enumerate(draft.panels):
                        field = ui.input(f"Panel {index + 1}", value=text, on_change=partial(self.panel_typed, index))
                        field.props("outlined dense")
            with ui.row().classes("items-center"):
                ui.button("Draw", on_click=self.draw).props("no-caps")
                if not draft.sources:
                    ui.button("Show the panels", on_click=self.unfold).props("outline no-caps")
                    ui.button("An example", on_click=self.show_example).props("flat no-caps")
                names = studio.folder.characters()
                if names and not draft.sources:
                    who = ui.select(
                        {"": "nobody in particular"} | {name: plain(name) for name in names}, label="Who is in it"
                    )
                    who.set_value(draft.character if draft.character in names else "")
                    who.on_value_change(lambda e: self.typed(character=e.value or "")).props("dense outlined")
                    who.classes("pick")
            with ui.expansion("More").classes("more"), ui.row():
                self.number("Pictures to choose from", "candidates", draft.candidates, 1, 50)
                self.number("Seed; empty for a new one each time", "seed", draft.seed, 0, 2**31)
                ui.input("Height x width", value=draft.size, on_change=lambda e: self.typed(size=e.value or "")).props(
                    "dense outlined"
                )

    def number(self, label: str, name: str, value: int | None, least: int, most: int) -> None:
        def change(event: events.ValueChangeEventArguments[Any]) -> None:
            number = None if event.value in (None, "") else int(event.value)
            if number is not None or name == "seed":
                attempt(partial(self.typed, **{name: number}))

        ui.number(label, value=value, min=least, max=most, precision=0, on_change=change).props("dense outlined")

    def typed(self, **changes: Any) -> None:
        """Keep what was typed, without drawing this window's form anew."""
        self.studio.keep(**changes)
        self.form_shown |= changes

    def panel_typed(self, index: int, event: events.ValueChangeEventArguments[Any]) -> None:
        panels = list(self.studio.draft.panels)
        panels[index] = event.value or ""
        self.typed(panels=panels)

    def unfold(self) -> None:
        with suppress_and_say():
            if note := self.studio.unfold():
                ui.notify(note, timeout=10_000, multi_line=True)
        self.look()

    def show_example(self) -> None:
        studio = self.studio
        sentence = EXAMPLES[self.example % len(EXAMPLES)]
        if studio.names.model == TINY:
            prompt = character_prompts("test", 8, seed=1)[self.example % 8]
            panels = [text.removeprefix(f"{prompt.theme}, ").replace(", ", " with ") for text in prompt.panels]
            sentence = f"Four pictures of {prompt.theme}: {'; '.join(panels)}"
        self.example += 1
        studio.keep(sentence=sentence, sources=[], character="")
        self.unfold()

    def draw(self) -> None:
        studio = self.studio
        with suppress_and_say(shorten=studio.names.model == TINY):
            if not studio.draft.sources:
                studio.unfold()
            studio.prompt()  # its faults are said at once
            self.start("Drawing", studio.draw)
        self.look()

    def change(self, image: Image) -> None:
        """Hand a picture, which is one panel and no page, to the editor."""
        digest = self.studio.folder.add_source(image)
        self.studio.keep(sources=[digest], sentence="")
        self.look()
        ui.notify("Say above what should change in this picture.")

    def drop_source(self, digest: str) -> None:
        self.studio.keep(sources=[other for other in self.studio.draft.sources if other != digest])
        self.look()

    def restore(self, recipe: Recipe) -> None:
        """Fill in a page's recipe, and ask about models that differ."""
        with suppress_and_say():
            differing = self.studio.restore(recipe)
            self.look()
            if differing:
                self.ask_models(recipe, differing)

    def ask_models(self, recipe: Recipe, differing: Sequence[str]) -> None:
        known = {offer.name for offer in offers(self.studio.names) if offer.is_here} | {self.studio.names.model}
        loras = {*self.studio.teacher.all_loras().values(), *self.studio.names.strengths}
        with self.dialog("Drawn in another way") as dialog, ui.card():
            heading("Drawn in another way")
            ui.label(f"This page was {', '.join(differing)}. Now: {drawn_by(self.studio)}.")

            def take() -> None:
                names = replace(with_loras(self.studio.names, recipe.loras), model=recipe.model, kind="")
                if attempt(partial(self.studio.choose, names)):
                    dialog.close()

            with ui.row():
                # A dropped file may name anything; what is not here already is not loaded.
                if recipe.model in known and loras >= {*recipe.loras}:
                    ui.button("Draw as it was drawn", on_click=take).props("no-caps")
                else:
                    ui.label("Its models are not all on this machine.")
                ui.button("Keep the models of now", on_click=dialog.close).props("outline no-caps")

    @ui.refreshable_method
    def hero(self) -> None:
        """The page that is open: the picture with its verbs, its candidates, its check and its tries."""
        page = self.studio.folder.page(self.studio.draft.page)
        if page is None:
            with ui.element("section").classes("empty").props('aria-label="Nothing is open"'):
                ui.label(
                    "Your pages appear here. Write a sentence, or drop pictures of any program: which does not fit?"
                )
                ui.label("For a character of your own, begin under Characters.")
            return
        number = min(self.studio.draft.candidate, len(page.candidates) - 1)
        recipe = page.recipes[number]
        with ui.element("section").classes("page").props('aria-label="The page that is open"'):
            self.picture(page, number)
            self.actions(page, number)
            if number == 0 and page.verdict:
                for words in page.verdict.lines:
                    ui.label(words).classes("verdict" + (" good" if page.verdict.passed else " bad"))
            if not recipe.prompt and recipe.grid.count > 1:
                self.wording(page, recipe)
            if len(page.candidates) > 1:
                with ui.element("div").classes("candidates").props('role=group aria-label="All of them, best first"'):
                    for index, other in enumerate(page.candidates):
                        shown = picture_button(other, standing(page.recipes[index], 0), partial(self.choose, index))
                        shown.props(f"aria-pressed={'true' if index == number else 'false'}")
            if recipe.tries:
                heading("Every try")
                with ui.row():
                    for line, image in zip(recipe.tries, page.tries, strict=False):
                        figure(image, f"Panel {line.panel + 1}: {line.verdict}", classes="small")
            if recipe.matrix or recipe.parts:
                with ui.expansion("Why?"):
                    self.why(recipe)

    def actions(self, page: Page, number: int) -> None:
        recipe = page.recipes[number]
        with ui.row().classes("items-center"):
            ui.label(standing(recipe, len(page.candidates))).classes("standing")
            if recipe.grid.count > 1:
                ui.button("Check and repair", on_click=partial(self.check, page, number)).props("no-caps")
            save = partial(ui.download, page.candidates[number], f"{stem_of(recipe, page)}.png")
            ui.button("Save", on_click=save).props("outline no-caps")
            if recipe.prompt:
                ui.button("Fill in its words", on_click=partial(self.restore, recipe)).props("flat no-caps")

    def picture(self, page: Page, number: int) -> None:
        recipe, path = page.recipes[number], page.candidates[number]
        odd = page.verdict.odd if page.verdict and number == 0 else None
        with ui.element("div").classes("hero"):
            ui.element("img").props(
                f'src="{address(path)}" alt="{escaped(recipe.theme or recipe.sentence or recipe.note)}"'
            )
            if page.before:
                ui.element("img").props(f'src="{address(page.before)}" alt="Before"').classes("before")
            grid = f"grid-template: repeat({recipe.grid.rows}, 1fr) / repeat({recipe.grid.cols}, 1fr)"
            with ui.element("div").classes("verbs").style(grid):
                for index in range(recipe.grid.count):
                    with ui.element("div").classes("odd" if index == odd else ""):
                        panel = f"panel {index + 1}" if recipe.grid.count > 1 else "this picture"
                        button_of(
                            "Keep",
                            f"Keep {panel} as a picture of a character",
                            partial(self.keep_panel, page, number, index),
                        )
                        if recipe.grid.count > 1 and recipe.prompt:
                            button_of("Redraw", f"Draw {panel} again", partial(self.redraw, page, number, index))
                        button_of("Change", f"Change {panel} by words", partial(self.change_panel, page, number, index))
            if page.before:
                ui.element("input").props(
                    'type=range min=0 max=100 value=0 aria-label="Compare with the picture before"'
                ).classes("wipe").on(
                    "input", js_handler="(e) => e.target.parentElement.style.setProperty('--cut', e.target.value + '%')"
                )

    def wording(self, page: Page, recipe: Recipe) -> None:
        """Ask for the words of panels that another program drew, without which none is drawn again."""
        with ui.expansion("Say what the panels show, to have the one that does not fit drawn again"):
            texts = [ui.input(f"Panel {index + 1}", value=text) for index, text in enumerate(recipe.panels)]
            theme = ui.input("In all of them", value=recipe.theme)

            def write() -> None:
                panels = [field.value or "" for field in texts]
                changed = recipe.model_copy(update={"panels": panels, "theme": theme.value or ""})
                image = open_image(page.candidates[0])
                new = self.studio.folder.add_page([(image, texts_of(page.candidates[0]), changed)])
                self.open(new)

            ui.button("Use these words", on_click=write).props("outline no-caps")

    def why(self, recipe: Recipe) -> None:
        if recipe.judge:
            ui.label(f"Judged by {shown_name(recipe.judge)}. 1: the two belong together.")
        for part, score in recipe.parts.items():
            ui.label(f"{part}: {'no answer' if score is None else f'{score:.2f}'}")
        if recipe.matrix:
            with ui.element("table").classes("matrix"):
                for row, scores in enumerate([None, *recipe.matrix]):
                    with ui.element("tr"):
                        for column in range(len(recipe.matrix) + 1):
                            text = f"panel {row or column}" if row == 0 or column == 0 else cell(scores[column - 1])  # type: ignore[index]
                            text = "" if row == column == 0 else text
                            ui.html(text, tag="th" if text.startswith("panel") else "td", sanitize=False)

    def choose(self, index: int) -> None:
        self.studio.keep(candidate=index)
        self.look()

    def check(self, page: Page, number: int) -> None:
        self.start("Checking", lambda job: self.studio.check(job, page, number))

    def redraw(self, page: Page, number: int, panel: int) -> None:
        self.start("Drawing a panel again", lambda job: self.studio.redraw(job, page, number, panel))

    def panel_of(self, page: Page, number: int, panel: int) -> Image:
        recipe = page.recipes[number]
        return split(open_image(page.candidates[number]), recipe.grid)[panel]

    def change_panel(self, page: Page, number: int, panel: int) -> None:
        self.change(self.panel_of(page, number, panel))

    def keep_panel(self, page: Page, number: int, panel: int) -> None:
        """Make a panel a picture of a character."""
        recipe = page.recipes[number]
        caption = caption_of(recipe.panels[panel] if panel < len(recipe.panels) else "")
        image = self.panel_of(page, number, panel)
        names = self.studio.folder.characters()
        if not names:
            ui.notify("There is no character yet; make one under Characters.")
            return
        with self.dialog("A picture of whom?") as dialog, ui.card():
            heading("A picture of whom?")
            for name in names:

                def keep(name: str = name) -> None:
                    with suppress_and_say():
                        self.studio.folder.add_picture(name, image, caption)
                        self.studio.version += 1
                        ui.notify(f"Kept as a picture of {plain(name)}.")
                        dialog.close()

                ui.button(plain(name), on_click=keep).props("outline no-caps")

    # --- characters --------------------------------------------------------------------------------------------

    def characters_tab(self) -> None:
        self.character_view()

    @ui.refreshable_method
    def character_view(self) -> None:
        studio = self.studio
        names = studio.folder.characters()
        if self.character not in names:
            self.character = next(iter(names), "")
        with ui.row().classes("items-center chips").props('role=group aria-label="Your characters"'):
            for name in names:
                pressed = "true" if name == self.character else "false"
                chip = ui.button(plain(name), on_click=partial(self.show_character, name))
                chip.props(f"no-caps aria-pressed={pressed} {'' if name == self.character else 'outline'}")
            ui.button("A new character", on_click=self.ask_character).props("flat no-caps")
        if not self.character:
            with ui.element("section").classes("empty").props('aria-label="No character yet"'):
                ui.label("Draw one character the same in every picture: five to twenty pictures of it are enough.")
                ui.button("A new character", on_click=self.ask_character).props("no-caps")
            return
        with ui.element("section").classes("card").props('aria-label="Pictures"'):
            heading("Pictures")
            with suppress_and_say():
                words = ui.textarea("What it looks like", value=studio.folder.description(self.character))
                words.props("autogrow outlined").classes("wide").on("blur", lambda: self.describe(words.value))
            with ui.element("div").classes("pictures"):
                for index, (path, caption) in enumerate(studio.folder.pictures(self.character)):
                    with ui.element("div").classes("picture"):
                        ui.element("img").props(f'src="{address(path)}" alt="{escaped(caption) or "A picture of it"}"')
                        line = ui.input("What it shows", value=caption).props("dense outlined")
                        line.on("blur", partial(self.write_caption, path, line))
                        with ui.row():
                            if index:
                                button_of("First", f"Make picture {index + 1} the first", partial(self.first, path))
                            button_of("✕", f"Remove picture {index + 1}", partial(self.remove_picture, path))
                drop_zone("Drop or choose pictures", self.add_pictures)
        self.sheet()
        with ui.element("section").classes("card").props('aria-label="Teach it"'):
            heading("Teach it")
            self.training()
        with ui.row():
            remove = partial(self.remove_character, self.character)
            ui.button(f"Remove {plain(self.character)}", on_click=remove).props("flat no-caps")

    def show_character(self, name: str) -> None:
        self.character = name
        self.character_view.refresh()

    def ask_character(self) -> None:
        with self.dialog("A new character") as dialog, ui.card():
            heading("A new character")
            name = ui.input("Name").classes("wide")
            words = ui.textarea("What it looks like").classes("wide")
            if self.studio.names.model == TINY:
                ui.label(
                    "The practice model draws heroes of its own small world, such as “red round hero, crown, night”."
                )

            def make() -> None:
                with suppress_and_say():
                    self.character = self.studio.folder.new_character(name.value or "", words.value or "")
                    self.studio.version += 1
                    dialog.close()
                    self.look()

            ui.button("Make it", on_click=make).props("no-caps")

    def describe(self, words: str) -> None:
        if words.strip() != self.studio.folder.description(self.character):
            attempt(partial(self.studio.folder.describe, self.character, words))

    def write_caption(self, path: Path, line: ui.input) -> None:
        attempt(partial(self.studio.folder.caption, path, line.value or ""))

    def first(self, path: Path) -> None:
        self.studio.folder.make_first(self.character, path)
        self.character_view.refresh()

    def remove_picture(self, path: Path) -> None:
        self.removed(self.studio.folder.remove("a picture", path, path.with_suffix(".txt")))
        self.look()

    def remove_character(self, name: str) -> None:
        self.removed(self.studio.folder.remove(plain(name), self.studio.folder.path / "characters" / safe_name(name)))
        self.look()

    async def add_pictures(self, event: events.MultiUploadEventArguments) -> None:
        with suppress_and_say():
            images = [opened(await file.read(), file.name) for file in event.files]
            for image in images:
                self.studio.folder.add_picture(self.character, image)
        self.studio.version += 1
        self.look()

    def sheet(self) -> None:
        """More pictures of a character, by an editor, the best of each line first."""
        studio = self.studio
        with ui.element("section").classes("card").props('aria-label="More pictures of it"'):
            heading("More pictures of it")
            default = SHEET
            if studio.editor == TINY:
                default = "\n".join(
                    EDITS[name].format(VALUES[name][-1]) for name in EDITS if name in ("palette", "prop")
                )
            lines = ui.textarea("A line for each picture", value=studio.draft.sheet or default)
            lines.props("autogrow outlined").classes("wide").on("blur", lambda: studio.keep(sheet=lines.value or ""))

            def draw() -> None:
                texts = [line.strip() for line in (lines.value or "").splitlines() if line.strip()]
                name = self.character
                self.start("Drawing the sheet", lambda job: studio.draw_sheet(job, name, texts))

            with ui.row():
                ui.button("Draw them", on_click=draw).props("no-caps")
            for page in studio.folder.pages:
                if page.recipes[0].note != f"sheet of {self.character}":
                    continue
                with ui.element("div").classes("line"):
                    ui.label(f"{page.recipes[0].sentence} – best first").classes("soft")
                    button_of("✕", "Remove this line", partial(self.remove_page, page))
                    with ui.element("div").classes("pictures"):
                        for path, recipe in zip(page.candidates, page.recipes, strict=True):
                            with ui.element("div").classes("picture"):
                                figure(path, standing(recipe, 0))
                                button_of(
                                    "Keep",
                                    "Keep it as a picture of the character",
                                    partial(self.keep_drawn, path, recipe),
                                )

    def keep_drawn(self, path: Path, recipe: Recipe) -> None:
        with suppress_and_say():
            self.studio.folder.add_picture(self.character, open_image(path), caption_of(recipe.sentence))
        self.studio.version += 1
        self.look()

    @ui.refreshable_method
    def training(self) -> None:
        """The newest training of the character, with the pictures of the LoRA that is used."""
        studio = self.studio
        trainings: list[Training] = []
        with suppress_and_say():
            trainings = studio.teacher.trainings(self.character)
        last = trainings[-1] if trainings else None
        if last and studio.teacher.name == last.name:
            with ui.row().classes("items-center"):
                ui.label(f"Learning: {last.step} of {last.steps} steps.")
                ui.button("Stop; it can go on later", on_click=self.stop_teaching).props("outline no-caps")
        else:
            ui.label("From three pictures on. The studio draws nothing else meanwhile.").classes("soft")
            with ui.row().classes("items-center"):
                steps = ui.number("Steps; empty for the usual", value=studio.draft.steps, min=1, precision=0)
                steps.props("dense outlined").classes("pick")
                ui.button("Teach it", on_click=lambda: self.teach(steps.value)).props("no-caps")
                if last and not last.finished:
                    resume = partial(self.teach, None, last.name)
                    ui.button(f"Go on from step {last.step}", on_click=resume).props("outline no-caps")
        if last and last.error:
            ui.label(last.error).classes("fault")
        if last and last.losses:
            ui.label(f"Best after {last.best_step} of {last.step} steps, measured on a picture that it does not see.")
        if last and last.samples:
            ui.label("Left without it, right with what it has learned.").classes("soft")
            with ui.element("div").classes("gallery"):
                for text, before, after in last.samples:
                    with ui.element("div").classes("pair"):
                        figure(before, "")
                        figure(after, "")
                        ui.label(text).classes("soft")
        if last and last.lora:
            lora = last.lora
            with ui.row():
                ui.button("Use it for pages", on_click=partial(self.use, last, lora)).props("no-caps")
                file = lora / "pytorch_lora_weights.safetensors"
                save = partial(ui.download, file, f"{self.character}.safetensors")
                ui.button("Save for ComfyUI", on_click=save).props("outline no-caps")

    def teach(self, steps: float | None, resume: str = "") -> None:
        with suppress_and_say():
            self.studio.teach(self.character, steps=int(steps) if steps else None, resume=resume)
        self.look()

    async def stop_teaching(self) -> None:
        await asyncio.to_thread(self.studio.teacher.stop)
        self.look()

    def use(self, training: Training, lora: Path) -> None:
        """Draw pages with a character's LoRA, in the place of its earlier ones."""
        studio = self.studio
        mine = {str(other.lora) for other in studio.teacher.trainings(training.character)}
        loras = {source: strength for source, strength in studio.names.strengths.items() if source not in mine}
        loras[str(lora)] = PRACTICE_STRENGTH if studio.names.model == TINY else 1.0
        if attempt(partial(studio.choose, with_loras(studio.names, loras))):
            studio.keep(character=training.character)
            ui.notify(f"Pages are drawn with {lora_text({str(lora): loras[str(lora)]})} now.")

    # --- models ------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def models_button(self) -> None:
        ui.button(f"Drawn by {drawn_by(self.studio)}", on_click=self.ask_for_models).props("flat no-caps").classes("by")

    def ask_for_models(self) -> None:
        """Choose what draws, what changes pictures, what judges, and the LoRAs."""
        studio, names = self.studio, self.studio.names
        offered = offers(names)
        with self.dialog("Models") as dialog, ui.card().classes("models"):
            heading("Models")
            draws = ui.select(
                {offer.name: shown_name(offer.name) for offer in offered if offer.is_here and offer.sets}, label="Draws"
            )
            draws.set_value(names.model if names.model in draws.options else None)
            editors = {offer.name: shown_name(offer.name) for offer in offered if offer.is_here and offer.edits}
            edits = ui.select(
                {"": "the one that draws, or none"} | editors, label="Changes pictures", value=names.editor
            )
            judge = ui.select({name: shown_name(name) for name in judges(names)}, label="Judges", value=names.judge)
            for choice in (draws, edits, judge):
                choice.classes("wide")
            strengths = {}
            known = {source: name for name, source in studio.teacher.all_loras().items()}
            for source in dict.fromkeys([*known, *names.strengths]):
                label = f"Strength of {known.get(source, source)}; 0 for off"
                strengths[source] = ui.number(label, value=names.strengths.get(source, 0), min=-2, max=2, step=0.05)
                strengths[source].classes("wide")

            def take() -> None:
                loras = {source: float(field.value) for source, field in strengths.items() if field.value}
                model = draws.value or names.model
                chosen = with_loras(names, loras)
                chosen = replace(chosen, model=model, kind="" if model != names.model else names.kind)
                chosen = replace(chosen, editor=edits.value, judge=judge.value)
                if chosen.model != TINY and chosen.judge == TINY:
                    ui.notify("The practice judge knows pictures of the practice model alone; choose another judge.")
                elif attempt(partial(studio.choose, chosen)):
                    dialog.close()

            with ui.row():
                ui.button("Use these", on_click=take).props("no-caps")
                ui.button("Close", on_click=dialog.close).props("outline no-caps")
            heading("More models", level=3)
            for offer in [offer for offer in offered if offer.name != TINY]:
                with ui.element("div").classes("offer"):
                    ui.label(offer.name)
                    does = " and ".join(["draws"] * offer.sets + ["changes pictures"] * offer.edits)
                    ui.label(f"{does}; licence {offer.licence or 'as its page says'}").classes("soft")
                    told = ui.label("")
                    told.set_visibility(False)
                    button_of("Does it fit?", f"Does {offer.name} fit?", partial(self.tell_fit, offer, told))
                    if not offer.is_here:
                        button_of("Download", f"Download {offer.name}", partial(self.ask_download, offer))
            if JUDGE not in cached():
                published = Offer(JUDGE, "", False, False, False, False, "apache-2.0")
                button_of(f"Download the judge {JUDGE}", "", partial(self.ask_download, published))

    async def tell_fit(self, offer: Offer, told: ui.label) -> None:
        """Plan a model on this machine, on the worker's thread: a plan beside a load would break both."""
        judge = self.studio.names.judge if self.studio.names.judge != TINY else JUDGE
        found: list[str] = []

        def plan(job: Job) -> None:
            job.enter(f"Planning {offer.name}")
            found.append(fit_of(offer.name, offer.kind, judge).text)

        self.start("Planning", plan)
        job = self.studio.job
        while not job.ended:
            await asyncio.sleep(0.2)
        told.set_text(found[0] if found else job.error)
        told.set_visibility(True)

    def ask_download(self, offer: Offer) -> None:
        with self.dialog(f"Download {offer.name}") as dialog, ui.card():
            heading(f"Download {offer.name}")
            agreed = ui.checkbox(f"I have read its licence ({offer.licence or 'see its page'}) and accept it")
            with ui.link(target=f"https://huggingface.co/{offer.name}", new_tab=True):
                ui.label(f"huggingface.co/{offer.name}")
            token = None
            if offer.gated:
                ui.label(
                    "It is for people who accepted its licence there: paste an access token, which is kept nowhere."
                )
                token = ui.input("Access token", password=True).classes("wide")

            def fetch() -> None:
                if not agreed.value:
                    ui.notify("Accept its licence first.")
                elif attempt(partial(self.download.start, offer.name, token=token.value if token else "")):
                    dialog.close()

            ui.button("Download", on_click=fetch).props("no-caps")


# --- small things ------------------------------------------------------------------------------------------------


class suppress_and_say(suppress):  # noqa: N801 - a context manager, as `suppress` is
    """Show a fault of the input or the disk to the person, and go on."""

    def __init__(self, *, shorten: bool = False) -> None:
        super().__init__(ValueError, OSError, RuntimeError)
        self.shorten = shorten

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        hidden = bool(super().__exit__(kind, error, trace))
        if hidden and error:
            message = str(error)
            if self.shorten:  # the practice model lists all of its words
                message = message.partition(";")[0] + ". Choose another model above for words of your own."
            ui.notify(message, type="warning", timeout=10_000, multi_line=True)
        return hidden


def attempt(act: Callable[[], object]) -> bool:
    """Do something, say its fault if it has one, and return whether it was done."""
    with suppress_and_say():
        act()
        return True
    return False


def heading(text: str, *, level: int = 2) -> None:
    ui.label(text).props(f"role=heading aria-level={level}").classes(f"h{level}")


def figure(image: Image | Path, caption: str, *, classes: str = "") -> None:
    with ui.element("figure").classes(classes):
        if isinstance(image, Path):
            ui.element("img").props(f'src="{address(image)}" alt="{escaped(caption)}"')
        else:
            ui.image(image).props(f'alt="{escaped(caption)}"')
        if caption:
            with ui.element("figcaption"):
                ui.label(caption)


def button_of(text: str, label: str, act: Callable[[], object]) -> ui.button:
    button = ui.button(text, on_click=act).props("flat dense no-caps")
    return button.props(f'aria-label="{escaped(label)}"') if label else button


def drop_zone(label: str, take: Callable[[events.MultiUploadEventArguments], Any]) -> None:
    """A button that chooses files, and on which files are dropped. The uploader behind it has no name for readers."""
    options: dict[str, Any] = {"multiple": True, "auto_upload": True, "max_file_size": MOST_BYTES}
    upload = ui.upload(on_multi_upload=take, **options).props('accept=".png,.jpg,.jpeg,.webp"').classes("hidden")
    zone = ui.button(label).props("flat no-caps").classes("drop")
    zone.on("click", js_handler=f"(e) => runMethod({upload.id}, 'pickFiles', [e])")
    zone.on("dragover", js_handler="(e) => e.preventDefault()")
    added = f"runMethod({upload.id}, 'addFiles', [[...e.dataTransfer.files]])"
    zone.on("drop", js_handler=f"(e) => {{ e.preventDefault(); {added}; }}")


def picture_button(path: Path, label: str, act: Callable[[], object]) -> ui.button:
    with ui.button(on_click=act).props(f'flat no-caps aria-label="{escaped(label)}"').classes("shot") as button:
        ui.element("img").props(f'src="{address(path)}" alt=""')
        ui.label(label.removeprefix("Open "))
    return button


def address(path: Path) -> str:
    """Return the address of an image of the folder, which changes with its content."""
    root = next(parent for parent in path.parents if (parent / "key").is_file())
    return f"/file/{quote(path.relative_to(root).as_posix())}?{path.stat().st_mtime_ns if path.is_file() else 0}"


def escaped(text: str) -> str:
    """Quote a text within `props`, whose values stand between double quotes."""
    return text.replace("\\", "").replace('"', "”").replace("\n", " ")


def plain(name: str) -> str:
    return name.replace("_", " ")


def shown_name(model: str) -> str:
    return "the practice model" if model == TINY else model


def drawn_by(studio: Studio) -> str:
    loras = lora_text(studio.names.strengths)
    return shown_name(studio.names.model) + (f" + {loras}" if loras else "")


def standing(recipe: Recipe, count: int) -> str:
    """Say how a candidate was ranked, and that a judge does not tell near scores apart."""
    if recipe.score is None:
        return recipe.note or "not judged"
    text = f"{recipe.score:.2f} of 1"
    if count > 1:
        text += f", number {recipe.rank} of {count}"
    if recipe.tied > 1:
        text += f" – one of {recipe.tied} that are equally good" if count else ", a tie"
    return text


def cell(score: float | None) -> str:
    return "–" if score is None else f"{score:.2f}"


def stem_of(recipe: Recipe, page: Page) -> str:
    return re.sub(r"[^\w-]+", "-", recipe.theme or recipe.sentence or "page")[:40].strip("-") + f"-{page.number}"


def caption_of(line: str) -> str:
    """Turn an instruction into what is shown: "Put a boat beside the hero." → "a boat beside the hero"."""
    shown = re.sub(
        r"^(change|make|turn) .*? (to|into) |^(put|add|draw|give (it|her|him|them|the \w+)) ", "", line, flags=re.I
    )
    return shown.strip().rstrip(".")


def texts_of(png: Path | bytes) -> dict[str, str]:
    """Read the texts of a PNG but the recipe, which is written anew."""
    from pacorl.io.images import png_texts
    from pacorl.studio.folder import RECIPE

    return {key: text for key, text in png_texts(png).items() if key != RECIPE}
