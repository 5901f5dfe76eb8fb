"""The page of the studio: two tabs over one `Studio`, whose every open window shows the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import events, ui
from PIL.Image import Image

from pacorl.character_training.pictures import LEAST
from pacorl.io.images import open_image, recipe_of
from pacorl.report.figures import pair_matrix_svg
from pacorl.studio.folder import Drawing, Recipe
from pacorl.studio.models import JUDGE, is_here, offers, shown_name
from pacorl.studio.teaching import newest_training
from pacorl.studio.work import Studio

STYLE = Path(__file__).with_name("style.css")
MOST_BYTES = 20 * 2**20
MOST_PIXELS = 25_000_000
LAYOUTS = ["1x1", "2x2", "1x2", "1x3", "2x3", "3x3", "1x4", "2x1", "3x1"]
SHEET = "Let the hero be jumping.\nPut the hero at the beach.\nPut a boat beside the hero.\nShow the scene at night."

Files = Sequence[tuple[str, bytes]]
"""Dropped files: name and content."""


class StudioPage:
    """One window on the studio."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.folder = studio.folder
        self.draft = studio.draft
        self.seen = studio.version  # all is drawn below
        self.new = {"name": "", "description": ""}
        """The form of a new character, which a refresh of the page does not empty."""
        ui.add_css(STYLE)
        with ui.header().classes("bar"):
            ui.html("<h1>paco<b>rl</b></h1>", sanitize=False)
            with ui.tabs().props("no-caps inline-label aria-label=Sections") as tabs:
                ui.tab("Pages")
                ui.tab("Characters")
            ui.space()
            models = self.button("", self.ask_for_models, look="flat")
            models.bind_text_from(studio, "names", backward=lambda names: f"Drawn by {shown_name(names.model)}")
        with tag("div", "desk-top"):
            self.status()
            with ui.tab_panels(tabs, animated=False).classes("tabs").bind_value(self.draft, "tab"):
                with ui.tab_panel("Pages"), tag("div", "desk"):
                    self.strip()
                    with tag("div", "work"):
                        self.form()
                        self.hero()
                with ui.tab_panel("Characters"):
                    self.characters()
        self.toast()
        self.dialogs = tag("div")
        ui.timer(0.4, self.look)

    def look(self) -> None:
        """Refresh the page after a change in this or another window."""
        # Fields are bound to the draft, which changes without an event of ours.
        self.studio.save()
        if self.studio.version != self.seen:
            self.seen = self.studio.version
            for region in (self.strip, self.subject, self.hero, self.characters):
                region.refresh()

    def act(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Change something, or show its fault, and show the change in every window."""
        attempt(function, *arguments, **options)
        self.studio.version += 1
        self.look()

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
        made = ui.button(text, on_click=lambda: self.act(act, *arguments, **options)).props(f"no-caps {look}")
        if name:
            made.props["aria-label"] = name
        return made

    def cross(self, name: str, act: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Build the ✕ button, which removes the card that contains it."""
        self.button("✕", act, *arguments, name=name, look="flat dense", **options).classes("cross")

    def picture(self, path: Path, alt: str = "") -> None:
        """Show an image of the folder; the pixels of a file never change."""
        tag("img", src=f"/file/{quote(path.relative_to(self.folder.path).as_posix())}", alt=alt)

    def shot(self, drawing: Drawing, caption: str, name: str, /, **changes: Any) -> ui.button:
        """Build a drawing's thumbnail, which opens it."""
        with self.button("", self.studio.keep, name=name, look="flat", **changes).classes("shot") as made:
            self.picture(drawing.path)
            ui.label(caption)
        return made

    def drop_zone(self, take: Callable[[Files], object]) -> None:
        """Build a button for choosing or dropping files; the uploader behind it has no accessible name."""

        async def handle(event: events.MultiUploadEventArguments) -> None:
            upload.reset()  # or the same picture could not be dropped again
            self.act(take, [(file.name, await file.read()) for file in event.files])

        options: dict[str, Any] = {"multiple": True, "auto_upload": True, "max_file_size": MOST_BYTES}
        upload = ui.upload(on_multi_upload=handle, **options).props('accept=".png,.jpg,.jpeg,.webp"').classes("hidden")
        zone = ui.button("Drop or choose pictures").props("flat no-caps").classes("drop")
        zone.on("click", js_handler=f"(e) => runMethod({upload.id}, 'pickFiles', [e])")
        zone.on("dragover", js_handler="(e) => e.preventDefault()")
        added = f"runMethod({upload.id}, 'addFiles', [[...e.dataTransfer.files]])"
        zone.on("drop", js_handler=f"(e) => {{ e.preventDefault(); {added}; }}")

    def status(self) -> None:
        """The job that runs, and the fault of the last one."""
        with tag("div", "status", role="status"):
            with ui.row().bind_visibility_from(self.studio, "job", backward=lambda job: not job.ended):
                ui.spinner(size="sm").props("aria-hidden=true")
                ui.label().bind_text_from(self.studio, "job", backward=lambda job: job.phase)
                self.button("Stop", lambda: setattr(self.studio.job, "stopped", True))
            ui.label().classes("fault").bind_text_from(self.studio, "job", backward=lambda job: job.error)

    def toast(self) -> None:
        """The last removal, with its undo."""
        with tag("div", "toast", role="status").bind_visibility_from(self.folder, "removed", backward=bool):
            ui.label().bind_text_from(
                self.folder, "removed", backward=lambda last: f"Removed {last[0]}." if last else ""
            )
            self.button("Undo", self.folder.undo, look="flat dense")

    # --- pages -------------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def strip(self) -> None:
        """The earlier pages, which are the output folder."""
        with tag("nav", "strip", aria_label="Earlier pages"):
            self.drop_zone(self.dropped)
            for page in self.folder.pages:
                first, folder = page[0], page[0].path.parent
                name = first.recipe.name[:60]
                is_open = folder.name == self.draft.page
                with tag("div", "thumb" + " here" * is_open):
                    shown = self.shot(first, name, f"Open {name}", page=folder.name, drawing=0)
                    shown.props["aria-current"] = str(is_open).lower()
                    self.cross(f"Remove {name}", self.folder.remove, name, folder)

    def dropped(self, files: Files) -> None:
        """Open dropped pictures as a page; a single one with the recipe that it has."""
        texts = recipe_of(files[0][1]) if len(files) == 1 else {}
        # A panel has the recipe of its page.
        self.studio.add_pictures([(opened(*file), file[0]) for file in files], {} if "place" in texts else texts)

    def form(self) -> None:
        """One box; a sentence unfolds into panels that can be edited."""
        with tag("section", "card"):
            self.box = text_field("What should the pictures show?", multiline=True).bind_value(self.draft, "words")
            self.box.on("keydown.ctrl.enter", lambda: self.act(self.draw))
            with ui.row():
                self.button("Draw", self.draw, look="")
                self.button("Show the panels", self.studio.unfold)
            self.subject()

    @ui.refreshable_method
    def subject(self) -> None:
        """The form of the words, the pictures that are changed by them, and who is in it."""
        form = "Write a sentence; or what all of them show, and then a line for each."
        if self.draft.sources:
            form = "Write what should change in this, a line for each new picture."
        ui.label(form).classes("soft")
        with ui.row():
            for name in self.draft.sources:
                with tag("div", "thumb small"):
                    self.picture(self.folder.path / name, "A picture to change")
                    self.cross("Change no picture", self.studio.change, [], self.draft.page_words)
        self.person("Who is in it", "nobody in particular")

    def person(self, label: str, nobody: str) -> None:
        """Choose a character."""
        people = {name: plain(name) for name in self.folder.characters()}
        if self.draft.character not in people:
            self.draft.character = ""
        if people:
            # Not bound: a select without a character's name would reset a draft that has just got it.
            who = ui.select({"": nobody} | people, label=label, value=self.draft.character)
            who.props("dense outlined").classes("pick")
            who.on_value_change(lambda event: self.act(self.studio.keep, character=event.value))

    def draw(self) -> None:
        if not self.draft.sources:
            self.studio.unfold()
        # Faults of the words are said at once, and not when the models have loaded.
        self.studio.prompts()
        self.studio.submit(self.studio.draw)

    @ui.refreshable_method
    def hero(self) -> None:
        """The page that is open: the picture with its verbs, its check, and the other drawings."""
        page = self.folder.page(self.draft.page)
        if not page:
            with tag("section", "empty", aria_label="Nothing is open"):
                ui.label("Your pages appear here. Write a sentence, or drop pictures of any program.")
                ui.label("For a character of your own, begin under Characters.")
            return
        drawing = page[min(self.draft.drawing, len(page) - 1)]
        recipe = drawing.recipe
        with tag("section", "page", aria_label="The page that is open"):
            self.panels(drawing)
            ui.label(standing(recipe)).classes("standing")
            with ui.row():
                if recipe.grid.count > 1:
                    self.button("Check and repair", self.studio.submit, self.studio.check, drawing=drawing, look="")
                self.button("Save", ui.download, drawing.path, f"{self.draft.page}.png")
                if recipe.prompt:
                    self.button("Fill in its words", self.studio.restore, recipe, look="flat")
                else:
                    shape = ui.select(sorted({*LAYOUTS, recipe.layout}), value=recipe.layout, label="Rows x columns")
                    shape.props("outlined dense").classes("pick")
                    shape.on_value_change(lambda event: self.act(drawing.rewrite, layout=event.value))
            # The verdict has the words of `pacorl check`.
            with tag("div", "verdict" if recipe.odd is None else "verdict bad"):
                for line in recipe.checked:
                    ui.label(line)
            if recipe.matrix:
                with ui.expansion("Why?"):
                    ui.label(f"Judged by {shown_name(recipe.judge, 'judge')}; 1 is the best.")
                    ui.html(pair_matrix_svg(recipe.matrix), sanitize=False)
            # Candidates and the tries of a repair are one row of drawings.
            with tag("div", "candidates", role="group", aria_label="All of them, best first"):
                for index, other in enumerate(page if len(page) > 1 else ()):
                    name = standing(other.recipe)
                    self.shot(other, name, name, drawing=index).props["aria-pressed"] = str(other is drawing).lower()

    def panels(self, drawing: Drawing) -> None:
        """The picture, with the verbs of each panel on it."""
        recipe, character, look = drawing.recipe, self.draft.character, "flat dense"
        count = recipe.grid.count
        with tag("div", "hero"):
            self.picture(drawing.path, recipe.name)
            grid = f"grid-template: repeat({recipe.grid.rows}, 1fr) / repeat({recipe.grid.cols}, 1fr)"
            with tag("div", "verbs").style(grid):
                for panel in range(count):
                    it = f"panel {panel + 1}" if count > 1 else "this picture"
                    with tag("div", "odd" if panel == recipe.odd else ""):
                        if character:
                            name = f"Keep {it} as a picture of {plain(character)}"
                            self.button("Keep", self.keep, drawing, panel, name=name, look=look)
                        if recipe.panels and count > 1:
                            redraw = partial(self.studio.redraw, drawing=drawing, panel=panel)
                            self.button("Redraw", self.studio.submit, redraw, name=f"Draw {it} again", look=look)
                        # Offered for each model: the form says which one changes pictures.
                        name = f"Change {it} by words"
                        self.button("Change", self.change_panel, drawing, panel, name=name, look=look)

    def change_panel(self, drawing: Drawing, panel: int) -> None:
        """Hand one panel, never the whole page, to the editor."""
        source = self.folder.add_source(drawing.panels[panel])
        self.studio.change([source], "")
        # On a phone the box is above the view, or below the header that stays, from where a focus does not scroll it.
        box = f"getHtmlElement({self.box.id})"
        ui.run_javascript(f"{box}.focus(); {box}.scrollIntoView({{block: 'center'}})")

    def keep(self, drawing: Drawing, panel: int) -> None:
        """Add a panel to the character's pictures; a drawn panel's text becomes the caption."""
        recipe = drawing.recipe
        caption = recipe.panels[panel] if recipe.panels else ""
        self.folder.add_picture(self.draft.character, drawing.panels[panel], caption)
        ui.notify(f"Kept as a picture of {plain(self.draft.character)}.")

    # --- characters --------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def characters(self) -> None:
        self.person("Your characters", "a new one")
        name = self.draft.character
        if not name:
            self.new_character()
            return
        with card("Pictures"):
            ui.label(self.folder.character(name, least=0).text)
            with tag("div", "pictures"):
                for index, (path, caption) in enumerate(self.folder.pictures(name), 1):
                    with tag("div", "picture thumb"):
                        self.picture(path, caption or "A picture of it")
                        shows = text_field("What it shows", caption)
                        shows.on_value_change(lambda event, path=path: attempt(self.folder.caption, path, event.value))
                        self.cross(f"Remove picture {index}", self.folder.remove, "a picture", path)
                self.drop_zone(self.add_pictures)
        with card("More pictures of it"):
            ui.label("Drawn from its pictures by words, a line for each; the best come first, and you keep some.")
            self.button("Draw a sheet", self.start_sheet)
        self.teaching(name)
        self.button(
            f"Remove {plain(name)}", self.folder.remove, plain(name), self.folder.character_folder(name), look="flat"
        )

    def start_sheet(self) -> None:
        """Fill in the form to draw more pictures of a character from its own."""
        images = self.folder.character(self.draft.character).images
        sources = [path.relative_to(self.folder.path).as_posix() for path in images]
        most = max(1, self.studio.spec(edits=True).policy.max_sources)
        self.studio.change(sources[:most], SHEET)
        self.studio.keep(tab="Pages")

    def new_character(self) -> None:
        with card("A new character"):
            ui.label("Five to twenty pictures of one character are enough to draw it the same everywhere.")
            text_field("Name").bind_value(self.new, "name")
            text_field("What it looks like", multiline=True).bind_value(self.new, "description")
            self.button("Make it", self.make_character, look="")

    def make_character(self) -> None:
        self.studio.keep(character=self.folder.new_character(**self.new))
        self.new.update(name="", description="")

    def add_pictures(self, files: Files) -> None:
        for image in [opened(*file) for file in files]:
            self.folder.add_picture(self.draft.character, image)

    def teaching(self, name: str) -> None:
        """The newest training of the character: its latest pictures, and at the end its LoRA."""
        last = newest_training(self.studio.loras(name))
        is_stopped = last is not None and not last.is_finished
        with card("Teach it"):
            ui.label("From three pictures on. The studio draws nothing else meanwhile.").classes("soft")
            text = "Go on teaching it" if is_stopped else "Teach it"
            teach = self.button(text, self.studio.submit, self.studio.teach, character=name, look="")
            teach.set_enabled(len(self.folder.pictures(name)) >= LEAST)
            if last and last.samples:
                ui.label("At the left without what it learned, at the right with it.").classes("soft")
                with tag("div", "pictures pairs"):
                    for before, after in last.samples:
                        with tag("div", "pair"):
                            self.picture(before, "Without what it learned")
                            self.picture(after, "With it")
            if last and last.is_finished:
                ui.label(f"Pages of {plain(name)} are drawn with it now.")
                self.button("Save for ComfyUI", ui.download, last.lora, f"{name}.safetensors")

    # --- models ------------------------------------------------------------------------------------------------------

    def ask_for_models(self) -> None:
        """Open the dialog of models, with their abilities and whether they fit this machine."""
        # The dialog stays when parts of the page are drawn anew.
        with self.dialogs, ui.dialog(value=True) as dialog, ui.card(), tag("div", "dialog"):
            dialog.on("hide", dialog.delete).props["aria-label"] = "Models"
            heading("Models")
            ui.label(f"Judged by {shown_name(self.studio.names.judge, 'judge')}.")
            self.button("What fits this machine?", self.studio.submit, self.studio.measure, look="")
            for name, about in offers().items():
                with tag("div", "offer"):
                    ui.label(f"{shown_name(name)} {about}")
                    ui.label().classes("soft").bind_text_from(self.studio.fits, name)
                    if not is_here(name):
                        self.download(name).on_click(dialog.close)
                    elif name != JUDGE:
                        self.button("Use", self.use, name, name=f"Use {shown_name(name)}", look="").on_click(
                            dialog.close
                        )
            file = text_field("A file of ComfyUI, or a folder: its path")
            self.button("Use this", lambda: self.use(file.value.strip()), look="").on_click(dialog.close)
            self.button("Close", dialog.close, look="flat")

    def use(self, name: str) -> None:
        self.studio.submit(self.studio.use, name=name)

    def download(self, name: str) -> ui.button:
        """Download a model, after its licence was accepted."""
        with ui.expansion(f"Download {name}"):
            ui.link(f"huggingface.co/{name}", f"https://huggingface.co/{name}", new_tab=True)
            agreed = ui.checkbox("I have read its licence there, and accept it")
            token = ui.input("Access token, where the page asks for one", password=True).classes("wide")
            ui.label("The token is kept nowhere.").classes("soft")

            def fetch() -> None:
                self.studio.submit(self.studio.download, name=name, token=token.value or "")

            return self.button("Download", fetch, look="").bind_enabled_from(agreed, "value")


# --- parts of the page -----------------------------------------------------------------------------------------------


def attempt(function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Call a function, or show its fault of the input or the disk."""
    try:
        function(*arguments, **options)
    except (ValueError, OSError) as error:
        ui.notify(str(error), type="warning", timeout=10_000, multi_line=True)


def tag(name: str, classes: str = "", **attributes: Any) -> ui.element:
    """Build an HTML element; underscores in names of attributes are hyphens."""
    made = ui.element(name).classes(classes)
    for attribute, value in attributes.items():
        made.props[attribute.replace("_", "-")] = value
    return made


def text_field(label: str, value: str = "", *, multiline: bool = False) -> ui.input | ui.textarea:
    field = ui.textarea(label, value=value).props("autogrow") if multiline else ui.input(label, value=value)
    return field.props("outlined dense debounce=200").classes("wide")


def heading(text: str) -> None:
    ui.label(text).props("role=heading aria-level=2").classes("h2")


@contextmanager
def card(name: str) -> Iterator[None]:
    with tag("section", "card", aria_label=name):
        heading(name)
        yield


# --- words -----------------------------------------------------------------------------------------------------------


def opened(name: str, content: bytes) -> Image:
    """Open a dropped picture. Raises ImageError if it is none, or has too many pixels."""
    return open_image(content, name=name, max_pixels=MOST_PIXELS)


def plain(name: str) -> str:
    return name.replace("_", " ")


def standing(recipe: Recipe) -> str:
    """Say how a drawing was judged, and that a judge does not tell near scores apart."""
    words = [recipe.note]
    if recipe.score is not None:
        words.append(f"{recipe.score:.2f} of 1")
    if recipe.tied > 1:
        words.append(f"one of {recipe.tied} that are equally good")
    return ", ".join(filter(None, words)) or "not judged"
