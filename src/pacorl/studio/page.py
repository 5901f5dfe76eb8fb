"""The page of the studio: two tabs over one `Studio`, whose every open window shows the same state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import events, ui
from PIL.Image import Image

from pacorl.io.images import open_image, recipe_of
from pacorl.report.html import render
from pacorl.studio.folder import Drawing, plain
from pacorl.studio.models import JUDGE, PRACTICE_ONLY, is_here, offers, shown_name
from pacorl.studio.work import PRACTICE_STRENGTH, Studio
from pacorl.types import TINY

STYLE = Path(__file__).with_name("style.css")
FOCUS = Path(__file__).with_name("focus.js").read_text(encoding="utf-8")
MOST_BYTES = 20 * 2**20
MOST_PIXELS = 25_000_000
ACCEPTED = ".png,.jpg,.jpeg,.webp,.gif,.bmp,.tif,.tiff"
REJECTED = "A picture is a PNG, JPEG, WebP, GIF, BMP or TIFF of at most 20 MB. Left out: "
NAMES = "(entries) => emit(entries.map((entry) => entry.file.name).join(', '))"
LAYOUTS = [f"{rows}x{columns}" for rows in range(1, 5) for columns in range(1, 5)]
DROP = (
    '<q-btn flat no-caps label="Drop or choose pictures" @click="props.pickFiles" />'
    '<q-uploader-add-trigger class="hidden" />'
)
"""Quasar's own button has no accessible name."""

ui.button.default_props("no-caps")
ui.input.default_props("outlined dense").default_classes("wide")
ui.textarea.default_props("outlined dense autogrow").default_classes("wide")
ui.select.default_props("outlined dense").default_classes("pick")

Files = Sequence[tuple[str, bytes]]
"""Dropped files: name and content."""


class StudioPage:
    """One window on the studio."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.folder = studio.folder
        self.draft = studio.draft
        self.seen = (studio.version, studio.phase)  # all is drawn below
        ui.add_css(STYLE)
        ui.add_body_html(f"<script>{FOCUS}</script>")
        # The bar: sections, and the models in use.
        with ui.header().classes("bar"):
            ui.html("<h1>paco<b>rl</b></h1>", sanitize=False)
            with ui.tabs().props("no-caps inline-label aria-label=Sections") as tabs:
                ui.tab("Pages")
                ui.tab("Characters")
            ui.space()
            models = self.button("", self.ask_for_models, look="flat")
            models.bind_text_from(studio, "names", backward=lambda names: f"Drawn by {shown_name(names.model)}")
        # Below it the status, then the section that is open.
        with tag("div", "desk-top"):
            self.status()
            with ui.tab_panels(tabs, animated=False).classes("tabs").bind_value(self.draft, "tab"):
                with ui.tab_panel("Pages"), tag("div", "desk"):
                    self.strip()
                    with tag("div", "work"):
                        with tag("section", "card"):
                            ui.textarea("What should the pictures show?").bind_value(self.draft, "words")
                            ui.label("A sentence; or what all of them show, and then a line for each.").classes("soft")
                            with ui.row():
                                self.button("Draw", studio.submit, studio.draw, look="")
                                self.button("Show the panels", studio.unfold)
                            self.person("Who is in it", "nobody in particular")
                        self.hero()
                with ui.tab_panel("Characters"):
                    self.characters()
        # Dialogs stay when parts of the page are drawn anew.
        self.dialogs = tag("div")
        ui.timer(0.4, self.look)

    def look(self) -> None:
        """Refresh the page after a change in this or another window."""
        # Fields are bound to the draft, which changes without an event of ours.
        self.studio.save()
        state = (self.studio.version, self.studio.phase)  # with the phase the files of a job change
        if state != self.seen:
            self.seen = state
            for region in (self.strip, self.person, self.hero, self.characters):
                region.refresh()

    def act(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Change something, and show the change in every window."""
        self.attempt(function, *arguments, **options)
        self.studio.version += 1
        self.look()

    def attempt(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Call a function, or show its fault of the input or the disk."""
        self.studio.fault = ""
        try:
            function(*arguments, **options)
        except (ValueError, OSError) as error:
            self.studio.fault = str(error)

    def status(self) -> None:
        """Show the running job, the fault of the last one, and the undo of the last removal."""
        with tag("div", "status", role="status"):
            with shown_while(self.studio, "phase"):
                self.button("Stop", self.studio.stop)
            shown_while(self.studio, "fault")  # every action clears it
            with shown_while(self.folder, "removal"):
                self.button("Undo", self.studio.undo)

    # --- elements ----------------------------------------------------------------------------------------------------

    def button(
        self,
        text: str,
        act: Callable[..., object],
        *arguments: Any,
        name: str = "",
        look: str = "outline",
        **options: Any,
    ) -> ui.button:
        """Build a button for an action; `name` is its accessible name, by default its text."""
        made = ui.button(text, on_click=lambda: self.act(act, *arguments, **options)).props(look)
        if name:
            made.props["aria-label"] = name
        return made

    def remove(self, what: str, path: Path) -> None:
        """Build the ✕ button of a file or folder, in the corner of its card."""
        self.button("✕", self.folder.remove, what, path, name=f"Remove {what}", look="flat dense").classes("cross")

    def html(self, template: str, **contents: Any) -> None:
        """Show one of the report's templates."""
        ui.html(render(template, url=self.url, **contents), sanitize=False)

    def picture(self, path: Path, alt: str = "") -> None:
        """Show an image of the folder; the pixels of a file never change."""
        tag("img", src=self.url(path), alt=alt)

    def url(self, path: Path) -> str:
        # A training rewrites its last pictures by those of its best LoRA: a browser must not show the former.
        return f"/file/{quote(path.relative_to(self.folder.path).as_posix())}?{path.stat().st_mtime_ns}"

    def shot(self, path: Path, caption: str, name: str, /, *, shown: bool, **changes: Any) -> None:
        """Build a drawing's thumbnail, which opens it."""
        with self.button("", self.studio.keep, name=name, look="flat", **changes).classes("shot") as made:
            made.props["aria-current"] = str(shown).lower()
            self.picture(path)
            ui.label(caption)

    def drop_zone(self, take: Callable[[Files], object]) -> None:
        """Build a zone for dropping files, with a button for choosing them."""

        async def handle(event: events.MultiUploadEventArguments) -> None:
            upload.reset()  # or the same picture could not be dropped again
            self.act(take, [(file.name, await file.read()) for file in event.files])

        upload = ui.upload(multiple=True, auto_upload=True, max_file_size=MOST_BYTES, on_multi_upload=handle)
        # The server reads fields of one name as one file, and pictures of two folders may have one name.
        upload.props(f'accept="{ACCEPTED}" :field-name="() => Math.random()"')
        # A message of its own: the pictures that are taken beside them clear the status.
        upload.on(
            "rejected", lambda event: ui.notify(REJECTED + event.args, timeout=0, close_button=True), js_handler=NAMES
        )
        upload.classes("drop").add_slot("header", DROP)

    # --- pages -------------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def strip(self) -> None:
        """Show the earlier pages, read from the output folder."""
        with tag("nav", "strip", aria_label="Earlier pages"):
            self.drop_zone(self.dropped)
            for page in self.folder.pages:
                path = page[0].path
                name = path.parent.name
                # The time tells pages of the same words apart.
                changed = datetime.fromtimestamp(path.stat().st_mtime)
                title = f"{page[0].recipe.name[:60]}, {changed:%d %b, %H:%M:%S}"
                with tag("div", "thumb"):
                    self.shot(path, title, f"Open {title}", shown=name == self.draft.page, page=name, drawing=0)
                    self.remove(title, path.parent)

    def dropped(self, files: Files) -> None:
        """Open dropped pictures as a page; a single one with the recipe that it has."""
        texts = recipe_of(files[0][1]) if len(files) == 1 else {}
        # A panel has the recipe of its page.
        self.studio.add_pictures([(opened(*file), file[0]) for file in files], {} if "place" in texts else texts)

    @ui.refreshable_method
    def person(self, label: str, nobody: str) -> None:
        """Choose a character."""
        people = {name: plain(name) for name in self.folder.characters()}
        if self.draft.character not in people:
            self.draft.character = ""
        if people:
            # Not bound: a select without a character's name would reset a draft that has just got it.
            who = ui.select({"": nobody} | people, label=label, value=self.draft.character)
            who.on_value_change(lambda event: self.act(self.studio.keep, character=event.value))

    @ui.refreshable_method
    def hero(self) -> None:
        """Show the open page: the picture with its verbs, its check, and the other drawings."""
        page = self.folder.page(self.draft.page)
        if not page:
            with tag("section", "empty", aria_label="Nothing is open"):
                ui.label(
                    "Your pages appear here. Write a sentence, or drop pictures of any program. "
                    "For a character of your own, begin under Characters."
                )
            return
        # Files may have been removed since this one was opened.
        drawing = page[min(self.draft.drawing, len(page) - 1)]
        recipe = drawing.recipe
        with tag("section", "page", aria_label="The page that is open"):
            self.panels(drawing)
            ui.label(recipe.standing).classes("standing")
            with ui.row():
                can_judge = self.studio.names.judge != TINY or recipe.model == TINY
                if recipe.grid.count > 1 and can_judge:
                    self.button("Check and repair", self.studio.submit, self.studio.check, drawing, look="")
                self.button("Save", ui.download, drawing.path, f"{self.draft.page}.png")
                # A picture of another program has no words, and its layout may be wrong.
                if recipe.prompt:
                    self.button("Fill in its words", self.studio.restore, recipe, look="flat")
                else:
                    ui.select(
                        sorted({*LAYOUTS, recipe.layout}),
                        value=recipe.layout,
                        label="Rows x columns",
                        on_change=lambda event: self.act(drawing.rewrite, layout=event.value),
                    )
                    ui.label("To have panels drawn again, say in the form what each shows.").classes("soft")
                if not can_judge:
                    ui.label(PRACTICE_ONLY).classes("soft")
            self.html("verdict.html", drawing=drawing)
            if recipe.score is not None:
                with ui.expansion("Why?"):
                    judge = shown_name(recipe.judge, "judge")
                    self.html("why.html", drawing=drawing, judge=judge, practice=PRACTICE_ONLY)
            # Candidates and the tries of a repair are one row of drawings.
            with tag("div", "candidates", role="group", aria_label="All of them, best first"):
                for index, other in enumerate(page):
                    name = other.recipe.standing
                    self.shot(other.path, name, name, shown=other is drawing, drawing=index)

    def panels(self, drawing: Drawing) -> None:
        """Show the picture, with the verbs of each panel on it, or below it where there is no pointer."""
        recipe, grid, character = drawing.recipe, drawing.recipe.grid, self.draft.character
        look = "flat dense"
        cells = f"grid-template: repeat({grid.rows}, 1fr) / repeat({grid.cols}, 1fr)"
        with tag("div", "hero"):
            self.html("sheet.html", drawing=drawing, cells=cells)
            with tag("div", "cells verbs").style(cells):
                for panel in range(grid.count):
                    it = f"panel {panel + 1}"
                    with tag("div"):
                        ui.label(it.capitalize()).classes("whose")
                        if character:
                            name = f"Keep {it} as a picture of {plain(character)}"
                            self.button("Keep", self.keep, drawing, panel, name=name, look=look)
                        if recipe.panels and grid.count > 1:
                            name = f"Draw {it} again"
                            self.button(
                                "Redraw", self.studio.submit, self.studio.redraw, drawing, panel, name=name, look=look
                            )

    def keep(self, drawing: Drawing, panel: int) -> None:
        """Add a panel to the character's pictures; its words become the caption, but for the command of a change."""
        caption = drawing.recipe.panels[panel] if drawing.recipe.panels else ""
        self.folder.add_picture(self.draft.character, drawing.panels[panel], caption)
        ui.notify(f"Kept as a picture of {plain(self.draft.character)}.")

    # --- characters --------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def characters(self) -> None:
        self.person("Your characters", "a new one")
        name = self.draft.character
        if not name:
            with card("A new character"):
                ui.label("Five to twenty pictures of one character are enough to draw it the same everywhere.")
                ui.input("Name").bind_value(self.draft, "name")
                ui.textarea("What it looks like").bind_value(self.draft, "description").classes("line")
                self.button("Make it", self.studio.make_character, look="")
            return
        # Its pictures: references of drawings, and examples for teaching.
        with card("Pictures"):
            if self.studio.names.model == TINY:
                ui.label(PRACTICE_ONLY).classes("soft")
            looks = ui.textarea("What it looks like", value=self.folder.description(name)).classes("line")
            looks.on("blur", lambda: self.attempt(self.folder.describe, name, looks.value))
            with tag("div", "pictures"):
                for index, (path, caption) in enumerate(self.folder.pictures(name), 1):
                    with tag("div", "picture thumb"):
                        self.picture(path, caption or "A picture of it")
                        # Written when a person pauses.
                        shows = ui.textarea("What it shows", value=caption).props("debounce=200").classes("line")
                        shows.on_value_change(partial(self.caption, path))
                        self.remove(f"picture {index} of {plain(name)}", path)
                self.drop_zone(self.add_pictures)
        with card("More pictures of it"):
            ui.label("Drawn from its pictures. Of each line the best comes first, and you keep some.").classes("soft")
            ui.textarea("What should change? A line for each new one").bind_value(self.draft, "sheet")
            self.button("Draw a sheet", self.studio.submit, self.studio.sheet)
        self.teaching(name)
        # A job: its teaching must not run meanwhile.
        self.button(f"Remove {plain(name)}", self.studio.submit, self.folder.remove_character, name, look="flat")

    def add_pictures(self, files: Files) -> None:
        for image in [opened(*file) for file in files]:
            self.folder.add_picture(self.draft.character, image)

    def caption(self, picture: Path, event: events.ValueChangeEventArguments[str]) -> None:
        self.attempt(self.folder.caption, picture, event.value)

    def teaching(self, name: str) -> None:
        """Show the training of a character, its pictures, and its LoRA."""
        training = self.studio.training(name)
        with card("Teach it"):
            ui.label("From three pictures on. The studio draws nothing else meanwhile.").classes("soft")
            strength = PRACTICE_STRENGTH if self.studio.names.model == TINY else 1
            pictures = self.folder.pictures(name)
            self.html("gallery.html", pictures=pictures, training=training, name=name, strength=strength)
            if training.is_finished:
                with ui.row():
                    self.button("Save for ComfyUI", ui.download, training.lora, f"{name}.safetensors")
                    remove = (self.folder.remove, f"the teaching of {plain(name)}", training.run)
                    self.button("Remove it, to teach anew", *remove, look="flat")
            else:
                text = "Go on teaching it" if training.run.exists() else "Teach it"
                self.button(text, self.studio.submit, self.studio.teach, name, look="outline" * bool(self.studio.phase))
                ui.label("Once the teaching has ended, pages are drawn with it, and it can be saved.")

    # --- models ------------------------------------------------------------------------------------------------------

    def ask_for_models(self) -> None:
        """Open the dialog of models, with their abilities and licences."""
        studio = self.studio

        def use(name: str) -> None:
            dialog.close()  # its fault is shown behind the dialog
            studio.submit(studio.use, name, token.value)

        with self.dialogs, ui.dialog(value=True) as dialog, ui.card(), card("Models"):
            dialog.on("hide", dialog.delete).props["aria-label"] = "Models"
            ui.label(
                f"What is not here is downloaded first, with its judge, {JUDGE} (17 GB): by that you accept the "
                "licences on their pages. The token is kept nowhere."
            )
            self.button("Which of them fit this machine?", studio.submit, studio.plan_models)
            token = ui.input("Access token, where the page asks for one", password=True)
            for name, about in offers().items():
                with tag("div", "offer"):
                    ui.label(f"{shown_name(name)} {about}{', here' * is_here(name)}")
                    ui.label().bind_text_from(studio.fits, name)
                    if name != TINY:
                        ui.link(f"huggingface.co/{name}", f"https://huggingface.co/{name}", new_tab=True)
                    self.button("Use", use, name, name=f"Use {shown_name(name)}", look="")
            file = ui.input("A file of ComfyUI, or a folder: its path")
            self.button("Use this", lambda: use(file.value.strip()), look="")
            self.button("Close", dialog.close, look="flat")


# --- parts of the page -----------------------------------------------------------------------------------------------


def tag(name: str, classes: str = "", **attributes: Any) -> ui.element:
    """Build an HTML element; underscores in names of attributes are hyphens."""
    made = ui.element(name).classes(classes)
    for attribute, value in attributes.items():
        made.props[attribute.replace("_", "-")] = value
    return made


@contextmanager
def card(name: str) -> Iterator[None]:
    with tag("section", "card", aria_label=name):
        ui.label(name).props("role=heading aria-level=2").classes("h2")
        yield


def shown_while(owner: object, field: str) -> ui.row:
    """Build a row that begins with a text of `owner`, and is hidden while this is empty."""
    with ui.row(wrap=False).classes(field).bind_visibility_from(owner, field, backward=bool) as row:
        ui.label().bind_text_from(owner, field)
    return row


def opened(name: str, content: bytes) -> Image:
    """Open a dropped picture. Raises ImageError if it is none, or has too many pixels."""
    return open_image(content, name=name, max_pixels=MOST_PIXELS)
