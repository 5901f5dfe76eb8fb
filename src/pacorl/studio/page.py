"""The page of the studio: two tabs over one `Studio`, whose every open window shows the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import events, ui
from PIL.Image import Image

from pacorl.io.images import open_image, recipe_of
from pacorl.report.figures import pair_matrix_svg
from pacorl.studio.folder import Drawing, Page, Recipe
from pacorl.studio.models import JUDGE, is_here, offers, shown_name
from pacorl.studio.teaching import newest_training
from pacorl.studio.work import Job, Studio
from pacorl.types import TINY

STYLE = Path(__file__).with_name("style.css")
MOST_BYTES = 20 * 2**20
MOST_PIXELS = 25_000_000
LAYOUTS = ["1x1", "2x2", "1x2", "1x3", "2x3", "3x3", "1x4", "2x1", "3x1"]
EXAMPLE = (
    "Four pictures of the same young dentist in light-blue scrubs, soft watercolour: explains brushing to a child; "
    "studies an X-ray; cleans a tooth; waves goodbye at the door"
)
TINY_EXAMPLE = (
    "Four pictures of a white hero in town at night: standing with house; waving with tree; waving with boat; "
    "waving with ball"
)
SHEET = (
    "The same character from the side\nThe same character from behind\nThe same character running\n"
    "The same character at night, by a lamp"
)
TINY_SHEET = (
    "Let the hero be jumping.\nPut the hero at the beach.\nPut a boat beside the hero.\nShow the scene at night."
)


class StudioPage:
    """One window on the studio."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.draft = studio.draft
        self.seen = studio.version  # all is drawn below
        ui.add_css(STYLE)
        ui.page_title("pacorl studio")
        with ui.header().classes("bar"):
            ui.html("<h1>paco<b>rl</b></h1>", sanitize=False)
            with ui.tabs().props("no-caps inline-label aria-label=Sections") as tabs:
                ui.tab("Pages")
                ui.tab("Characters")
            ui.space()
            self.models_button()
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
        """Show what has changed, here or in another window."""
        # Fields are bound to the draft, which changes without an event of ours.
        self.studio.save()
        if self.studio.version != self.seen:
            self.seen = self.studio.version
            for part in (self.models_button, self.strip, self.subject, self.hero, self.characters, self.toast):
                part.refresh()

    def change(self, act: Callable[[], object]) -> None:
        """Change something, or show its fault, and show the change in every window."""
        attempt(act)
        self.studio.version += 1
        self.look()

    @contextmanager
    def dialog(self, name: str) -> Iterator[ui.dialog]:
        """Open a dialog; it stays when the button that opened it is drawn anew."""
        with self.dialogs, ui.dialog(value=True) as dialog, ui.card(), tag("div", "dialog"):
            dialog.on("hide", dialog.delete).props["aria-label"] = name
            heading(name)
            yield dialog

    def start(self, work: Callable[[Job], object], dialog: ui.dialog | None = None) -> None:
        self.change(partial(self.studio.submit, work))
        if dialog:
            dialog.close()

    def remove(self, what: str, *paths: Path) -> None:
        self.change(partial(self.studio.folder.remove, what, *paths))

    def status(self) -> None:
        """The job that runs, and the fault of the last one."""
        with tag("div", "status", role="status"):
            with ui.row().bind_visibility_from(self.studio, "job", backward=lambda job: not job.ended):
                ui.spinner(size="sm").props("aria-hidden=true")
                ui.label().bind_text_from(self.studio, "job", backward=lambda job: job.phase)
                button("Stop", lambda: setattr(self.studio.job, "stopped", True))
            ui.label().classes("fault").bind_text_from(self.studio, "job", backward=lambda job: job.error)

    @ui.refreshable_method
    def toast(self) -> None:
        """The last removal, with its undo."""
        if self.studio.folder.removed:
            with tag("div", "toast", role="status"):
                ui.label(f"Removed {self.studio.folder.removed[0]}.")
                button("Undo", partial(self.change, self.studio.folder.undo), look="flat dense")

    # --- pages -------------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def strip(self) -> None:
        """The earlier pages, which are the output folder."""
        with tag("nav", "strip", aria_label="Earlier pages"):
            drop_zone(self.dropped)
            for page in self.studio.folder.pages:
                name = page.drawings[0].recipe.name[:60]
                is_open = page.folder.name == self.draft.page
                with tag("div", "thumb" + " here" * is_open):
                    shown = picture_button(page.drawings[0].path, name, partial(self.open, page), label=f"Open {name}")
                    shown.props["aria-current"] = str(is_open).lower()
                    cross(f"Remove {name}", partial(self.remove, name, page.folder))

    def open(self, page: Page, drawing: int = 0) -> None:
        self.change(partial(self.studio.keep, page=page.folder.name, drawing=drawing))

    async def dropped(self, event: events.MultiUploadEventArguments) -> None:
        """Open dropped pictures as a page; a single one with the recipe that it has."""
        with saying_faults():
            files = [(await file.read(), file.name) for file in event.files]
            texts = recipe_of(files[0][0]) if len(files) == 1 else {}
            texts = {} if "place" in texts else texts  # a panel has the recipe of its page
            Recipe.model_validate(texts)  # a damaged one is said before a page is written
            self.studio.add_pictures([(opened(content, name), name) for content, name in files], texts)

    def form(self) -> None:
        """One box; a sentence unfolds into panels that can be edited. Its fields are bound to the draft."""
        draft = self.draft
        with tag("section", "card", aria_label="What to draw"):
            box = text_field("What should the pictures show?", multiline=True).bind_value(draft, "sentence")
            asks = {True: "What should change? A line for each new picture", False: "What should the pictures show?"}
            box.bind_label_from(draft, "sources", backward=lambda sources: asks[bool(sources)])
            box.on("keydown.ctrl.enter", self.draw)
            with tag("div", "panels").bind_visibility_from(draft, "panels", backward=bool):
                text_field("In all of them").bind_value(draft, "theme")
                lines = text_field("A line for each panel", multiline=True)
                lines.bind_value(draft, "panels", forward=lines_of, backward="\n".join)
            with ui.row():
                button("Draw", self.draw, look="")
                with ui.row().bind_visibility_from(draft, "sources", backward=lambda sources: not sources):
                    button("Show the panels", partial(self.change, self.studio.unfold))
                    button("An example", self.show_example, look="flat")
            self.subject()

    @ui.refreshable_method
    def subject(self) -> None:
        """The pictures that are changed by the words, and who is in it."""
        with ui.row():
            for name in self.draft.sources:
                with tag("div", "thumb small"):
                    picture(self.studio.folder.path / name, "A picture to change")
                    cross("Change no picture", partial(self.change, partial(self.studio.keep, sources=[])))
        self.person("Who is in it", "nobody in particular")

    def person(self, label: str, nobody: str) -> None:
        """Choose a character."""
        people = {name: plain(name) for name in self.studio.folder.characters()}
        if people:
            self.draft.character = self.draft.character if self.draft.character in people else ""
            who = ui.select({"": nobody} | people, label=label).props("dense outlined").classes("pick")
            who.bind_value(self.draft, "character").on_value_change(lambda: self.change(self.studio.save))

    def show_example(self) -> None:
        self.studio.keep(sentence=TINY_EXAMPLE if self.studio.names.model == TINY else EXAMPLE)
        self.change(self.studio.unfold)

    def draw(self) -> None:
        with saying_faults():
            if not self.draft.sources:
                self.studio.unfold()
            # Faults of the words are said at once, and not when the models have loaded.
            self.studio.prompts()
            self.start(self.studio.draw)

    def restore(self, recipe: Recipe) -> None:
        """Fill in a page's recipe, and ask about models that differ."""
        differing: list[str] = []
        with saying_faults():
            differing = self.studio.restore(recipe)
        if not differing:
            return
        with self.dialog("Drawn in another way") as dialog:
            ui.label(f"This page was drawn with {', '.join(differing)}; now it would be another.")
            use = partial(self.studio.use, name=recipe.model, adapter=recipe.adapter)
            button("Take the models of then", partial(self.start, use, dialog), look="")
            button("Keep the models of now", dialog.close)

    @ui.refreshable_method
    def hero(self) -> None:
        """The page that is open: the picture with its verbs, its check, and the other drawings."""
        page = self.studio.folder.page(self.draft.page)
        if page is None:
            with tag("section", "empty", aria_label="Nothing is open"):
                ui.label("Your pages appear here. Write a sentence, or drop pictures of any program.")
                ui.label("For a character of your own, begin under Characters.")
            return
        drawing = page.drawings[min(self.draft.drawing, len(page.drawings) - 1)]
        recipe = drawing.recipe
        with tag("section", "page", aria_label="The page that is open"):
            self.picture(drawing)
            ui.label(standing(recipe)).classes("standing")
            with ui.row():
                if recipe.grid.count > 1:
                    button(
                        "Check and repair", partial(self.start, partial(self.studio.check, drawing=drawing)), look=""
                    )
                button("Save", partial(ui.download, drawing.path, f"{page.folder.name}.png"))
                if recipe.prompt:
                    button("Fill in its words", partial(self.restore, recipe), look="flat")
                else:
                    shape = ui.select(sorted({*LAYOUTS, recipe.layout}), value=recipe.layout, label="Rows x columns")
                    shape.props("outlined dense").classes("pick")
                    shape.on_value_change(lambda e: self.change(partial(drawing.rewrite, layout=e.value)))
            # The verdict has the words of `pacorl check`.
            with tag("div", "verdict" if recipe.odd is None else "verdict bad"):
                for line in recipe.checked:
                    ui.label(line)
            if not recipe.panels and recipe.grid.count > 1:
                ui.label("To have panels drawn again, show as many panels at the left, and say what they show.")
            if recipe.matrix or recipe.parts:
                with ui.expansion("Why?"):
                    why(recipe)
            # Candidates and the tries of a repair are one row of drawings.
            with tag("div", "candidates", role="group", aria_label="All of them, best first"):
                for index, other in enumerate(page.drawings if len(page.drawings) > 1 else ()):
                    shown = picture_button(other.path, standing(other.recipe), partial(self.open, page, index))
                    shown.props["aria-pressed"] = str(other is drawing).lower()

    def picture(self, drawing: Drawing) -> None:
        """The picture, with the verbs of each panel on it."""
        recipe, character = drawing.recipe, self.draft.character
        of_panels = recipe.grid.count > 1
        with tag("div", "hero"):
            picture(drawing.path, recipe.name)
            grid = f"grid-template: repeat({recipe.grid.rows}, 1fr) / repeat({recipe.grid.cols}, 1fr)"
            with tag("div", "verbs").style(grid):
                for panel in range(recipe.grid.count):
                    name = f"panel {panel + 1}" if of_panels else "this picture"
                    verbs: dict[str, tuple[str, Callable[[], object]]] = {}
                    if character:
                        keep = partial(self.keep, drawing, panel)
                        verbs["Keep"] = (f"Keep {name} as a picture of {plain(character)}", keep)
                    if recipe.panels and of_panels:
                        redraw = partial(self.start, partial(self.studio.redraw, drawing=drawing, panel=panel))
                        verbs["Redraw"] = (f"Draw {name} again", redraw)
                    # Offered for each model: the form says which one changes pictures.
                    verbs["Change"] = (f"Change {name} by words", partial(self.change_panel, drawing, panel))
                    with tag("div", "odd" if panel == recipe.odd else ""):
                        for verb, (label, act) in verbs.items():
                            button(verb, act, label=label, look="flat dense")

    def change_panel(self, drawing: Drawing, panel: int) -> None:
        """Hand one panel, never the whole page, to the editor."""
        source = self.studio.folder.add_source(drawing.panels[panel])
        self.change(partial(self.studio.keep, sources=[source], sentence="", theme="", panels=[]))

    def keep(self, drawing: Drawing, panel: int) -> None:
        """Make a panel one of the character's pictures, with what it shows as its caption."""
        character = self.draft.character
        with saying_faults():
            self.studio.folder.add_picture(character, drawing.panels[panel], drawing.recipe.captions[panel])
            notify(f"Kept as a picture of {plain(character)}.")
        self.studio.version += 1

    # --- characters --------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def characters(self) -> None:
        folder = self.studio.folder
        self.person("Your characters", "a new one")
        name = self.draft.character
        if not name:
            self.new_character()
            return
        with card("Pictures"), saying_faults():
            words = text_field("What it looks like", folder.character(name, least=0).text, multiline=True)
            words.on("blur", lambda: attempt(partial(folder.describe, name, words.value or "")))
            with tag("div", "pictures"):
                for index, (path, caption) in enumerate(folder.pictures(name), 1):
                    with tag("div", "picture thumb"):
                        picture(path, caption or "A picture of it")
                        shows = text_field("What it shows", caption)
                        shows.on_value_change(lambda e, path=path: attempt(partial(folder.caption, path, e.value)))
                        files = (path, path.with_suffix(".txt"))
                        cross(f"Remove picture {index}", partial(self.remove, "a picture", *files))
                drop_zone(partial(self.add_pictures, name))
        with card("More pictures of it"):
            ui.label("Drawn from its pictures by words, a line for each; the best come first, and you keep some.")
            button("Draw a sheet", partial(self.change, partial(self.start_sheet, name)))
        self.teaching(name)
        remove = partial(self.remove, plain(name), folder.character_folder(name))
        button(f"Remove {plain(name)}", remove, look="flat")

    def start_sheet(self, name: str) -> None:
        """Fill in the form that draws more pictures of a character, of its own ones."""
        paths = self.studio.folder.character(name).images
        sources = [str(path.resolve().relative_to(self.studio.folder.path.resolve())) for path in paths]
        most = max(1, self.studio.spec(edits=True).policy.max_sources)
        sentence = TINY_SHEET if self.studio.names.model == TINY else SHEET
        self.studio.keep(tab="Pages", sources=sources[:most], sentence=sentence, theme="", panels=[])

    def new_character(self) -> None:
        with card("A new character"):
            ui.label("Five to twenty pictures of one character are enough to draw it the same everywhere.")
            name = text_field("Name")
            looks = text_field("What it looks like", multiline=True)

            def make() -> None:
                self.draft.character = self.studio.folder.new_character(name.value, looks.value)

            button("Make it", partial(self.change, make), look="")

    async def add_pictures(self, name: str, event: events.MultiUploadEventArguments) -> None:
        with saying_faults():
            for image in [opened(await file.read(), file.name) for file in event.files]:
                self.studio.folder.add_picture(name, image)
        self.studio.version += 1

    def teaching(self, name: str) -> None:
        """The newest training of the character: its latest pictures, and at the end its LoRA."""
        last = newest_training(self.studio.loras(name))
        is_stopped = last is not None and not last.is_finished
        with card("Teach it"):
            ui.label("From three pictures on. The studio draws nothing else meanwhile.").classes("soft")
            teach = partial(self.start, partial(self.studio.teach, character=name))
            button("Go on teaching it" if is_stopped else "Teach it", teach, look="")
            if last and last.samples:
                ui.label("At the left without what it learned, at the right with it.").classes("soft")
                with tag("div", "pictures pairs"):
                    for text, before, after in last.samples:
                        with tag("figure", "pair"):
                            picture(before, f"Without: {text}")
                            picture(after, f"With: {text}")
                            ui.label(text)
            if last and last.is_finished:
                ui.label(f"Pages of {plain(name)} are drawn with it now.")
                button("Save for ComfyUI", partial(ui.download, last.lora, f"{name}.safetensors"))

    # --- models ------------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def models_button(self) -> None:
        button(f"Drawn by {shown_name(self.studio.names.model)}", self.ask_for_models, look="flat")

    def ask_for_models(self) -> None:
        """Choose a model, by what it does and whether it fits this machine."""
        with self.dialog("Models") as dialog:
            ui.label(f"Judged by {shown_name(self.studio.names.judge, 'judge')}.")
            button("What fits this machine?", partial(self.start, self.studio.measure), look="")
            for name, about in offers().items():
                with tag("div", "offer"):
                    ui.label(shown_name(name))
                    ui.label().bind_text_from(self.studio.fits, name)
                    ui.label(about).classes("soft")
                    if not is_here(name):
                        self.download(name, dialog)
                    elif name != JUDGE:
                        use = partial(self.start, partial(self.studio.use, name=name), dialog)
                        button("Use", use, label=f"Use {shown_name(name)}", look="")
            file = text_field("A file of ComfyUI, or a folder: its path")
            button("Use this", lambda: self.start(partial(self.studio.use, name=file.value.strip()), dialog), look="")
            button("Close", dialog.close, look="flat")

    def download(self, name: str, dialog: ui.dialog) -> None:
        """Download a model, after its licence was accepted."""
        with ui.expansion(f"Download {name}"):
            ui.link(f"huggingface.co/{name}", f"https://huggingface.co/{name}", new_tab=True)
            agreed = ui.checkbox("I have read its licence there, and accept it")
            token = ui.input("Access token, where the page asks for one", password=True).classes("wide")
            ui.label("The token is kept nowhere.").classes("soft")

            def fetch() -> None:
                self.start(partial(self.studio.download, name=name, token=token.value or ""), dialog)

            button("Download", fetch, look="").bind_enabled_from(agreed, "value")


# --- parts of the page -----------------------------------------------------------------------------------------------


@contextmanager
def saying_faults() -> Iterator[None]:
    """Show a fault of the input or the disk to the person, and go on."""
    try:
        yield
    except (ValueError, OSError) as error:
        notify(str(error), type="warning")


def attempt(act: Callable[[], object]) -> None:
    with saying_faults():
        act()


def notify(text: str, **options: Any) -> None:
    ui.notify(text, timeout=10_000, multi_line=True, **options)


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


def button(text: str, act: Callable[[], object], *, label: str = "", look: str = "outline") -> ui.button:
    made = ui.button(text, on_click=act).props(f"no-caps {look}")
    if label:
        made.props["aria-label"] = label
    return made


def cross(label: str, act: Callable[[], object]) -> None:
    """The button that removes the thing that it lies on."""
    button("✕", act, label=label, look="flat dense").classes("cross")


def picture(path: Path, alt: str = "") -> None:
    """Show an image of the folder; the pixels of a file never change."""
    root = next(parent for parent in path.parents if (parent / "key").is_file())
    tag("img", src=f"/file/{quote(path.relative_to(root).as_posix())}", alt=alt)


def picture_button(path: Path, caption: str, act: Callable[[], object], *, label: str = "") -> ui.button:
    with button("", act, label=label or caption, look="flat").classes("shot") as made:
        picture(path)
        ui.label(caption)
    return made


def drop_zone(take: Callable[[events.MultiUploadEventArguments], Any]) -> None:
    """A button that chooses files, and on which files are dropped. The uploader behind it has no name for readers."""

    async def handle(event: events.MultiUploadEventArguments) -> None:
        upload.reset()  # or the same picture could not be dropped again
        await take(event)

    options: dict[str, Any] = {"multiple": True, "auto_upload": True, "max_file_size": MOST_BYTES}
    upload = ui.upload(on_multi_upload=handle, **options).props('accept=".png,.jpg,.jpeg,.webp"').classes("hidden")
    zone = ui.button("Drop or choose pictures").props("flat no-caps").classes("drop")
    zone.on("click", js_handler=f"(e) => runMethod({upload.id}, 'pickFiles', [e])")
    zone.on("dragover", js_handler="(e) => e.preventDefault()")
    added = f"runMethod({upload.id}, 'addFiles', [[...e.dataTransfer.files]])"
    zone.on("drop", js_handler=f"(e) => {{ e.preventDefault(); {added}; }}")


def why(recipe: Recipe) -> None:
    """The judge's scores of a drawing, by pairs of panels or by question."""
    ui.label(f"Judged by {shown_name(recipe.judge, 'judge')}; 1 is the best.")
    for question, score in recipe.parts.items():
        ui.label(f"{question}: {'–' if score is None else f'{score:.2f}'}")
    ui.html(pair_matrix_svg(recipe.matrix), sanitize=False)


# --- words -----------------------------------------------------------------------------------------------------------


def opened(content: bytes, name: str) -> Image:
    """Open a dropped picture. Raises ImageError if it is none, or has too many pixels."""
    return open_image(content, name=name, max_pixels=MOST_PIXELS)


def lines_of(text: str | None) -> list[str]:
    return text.split("\n") if text else []


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
