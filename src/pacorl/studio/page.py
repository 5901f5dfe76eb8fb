"""The page of the studio: two tabs over one `Studio`, whose every open window shows the same state."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nicegui import events, ui
from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.io.images import open_image
from pacorl.studio.folder import Page, Recipe
from pacorl.studio.models import JUDGE, Offer, fit_of, offers, shown_name
from pacorl.studio.teaching import lora_name, trainings
from pacorl.studio.work import Job, Studio, lora_text
from pacorl.types import TINY

STYLE = Path(__file__).with_name("style.css")
MOST_BYTES = 20 * 2**20
MOST_PIXELS = 25_000_000
LAYOUTS = ("1x1", "2x2", "1x2", "1x3", "2x3", "3x3", "1x4", "2x1", "3x1")
EXAMPLE = (
    "Four pictures of the same young dentist in light-blue scrubs, soft watercolour: explains brushing to a child; "
    "studies an X-ray; cleans a tooth; waves goodbye at the door"
)
SHEET = "from the side, walking\nfrom the front, full body\nfrom behind, looking back\nclose-up of the face, smiling"
TINY_EXAMPLE = (
    "Four pictures of a purple hero in town at night: standing with house; waving with tree; waving with boat; "
    "waving with ball"
)
TINY_SHEET = "Show the scene at sunset.\nPut a boat beside the hero."
PRACTICE_STRENGTH = 0.5
"""The practice model learns single pictures and draws pages, which full strength spoils."""


class StudioPage:
    """One window on the studio."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.draft = studio.draft
        self.seen = studio.version  # all is drawn below
        self.progress: object = None
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
        studio, job = self.studio, self.studio.job
        studio.save()
        if studio.version != self.seen:
            self.seen = studio.version
            parts = (self.strip, self.subject, self.hero, self.toast, self.models_button, self.characters)
            for part in parts:
                part.refresh()
        progress = (job.name, job.phase, job.done, len(job.shown), job.ended)
        if progress != self.progress:
            self.progress = progress
            self.status.refresh()

    @ui.refreshable_method
    def status(self) -> None:
        """The job that runs, its progress, its unfinished pictures, and its fault."""
        job = self.studio.job
        with tag("div", "status", role="status"):
            if not job.ended:
                with row():
                    ui.spinner(size="sm").props("aria-hidden=true")
                    count = f", {min(100, 100 * job.done // job.total)} %" if job.total else ""
                    ui.label(f"{job.phase or job.name}{count}")
                    button("Stop", partial(setattr, job, "stopped", True))
                with row():
                    for image, caption in job.shown:
                        figure(image, caption, classes="small")
            elif job.error:
                ui.label(job.error).classes("fault")

    @ui.refreshable_method
    def toast(self) -> None:
        """What was removed last, with its undo."""
        removed = self.studio.folder.removed
        if removed:
            with tag("div", "toast", role="status"):
                ui.label(f"Removed {removed[0]}.")
                button("Undo", partial(self.change, self.studio.folder.undo), look="flat dense")

    def change(self, act: Callable[[], object], dialog: ui.dialog | None = None) -> None:
        """Change something, show it in every window, and close the dialog that asked for it."""
        if attempt(act) and dialog:
            dialog.close()
        self.studio.version += 1
        self.look()

    def remove(self, what: str, *paths: Path) -> None:
        self.change(partial(self.studio.folder.remove, what, *paths))

    def start(self, name: str, work: Callable[[Job], object]) -> None:
        attempt(partial(self.studio.submit, name, work))
        self.look()

    @contextmanager
    def dialog(self, name: str) -> Iterator[ui.dialog]:
        """Open a dialog; it stays when what opened it is drawn anew."""
        with self.dialogs, ui.dialog(value=True) as dialog, ui.card(), tag("div", "dialog"):
            dialog.props["aria-label"] = name
            heading(name)
            yield dialog

    # --- pages -------------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def strip(self) -> None:
        """The earlier pages, which are the output folder."""
        with tag("nav", "strip", aria_label="Earlier pages"):
            drop_zone(self.dropped)
            for page in self.studio.folder.pages:
                name = page.recipes[0].name[:60]
                is_open = page.number == self.draft.page
                with tag("div", "thumb" + " here" * is_open):
                    shown = picture_button(page.candidates[0], name, partial(self.open, page), label=f"Open {name}")
                    shown.props["aria-current"] = str(is_open).lower()
                    cross(f"Remove {name}", partial(self.remove, f"page {page.number}", page.folder))

    def open(self, page: Page, candidate: int = 0) -> None:
        self.studio.keep(page=page.number, candidate=candidate)
        self.look()

    async def dropped(self, event: events.MultiUploadEventArguments) -> None:
        """Open dropped pictures: a page of this studio by its recipe, or pictures of any program."""
        with saying_faults():
            files = [(await file.read(), file.name) for file in event.files]
            pictures = [(opened(content, name), name) for content, name in files]
            recipe = Recipe.of(files[0][0]) if len(files) == 1 else None
            if recipe:
                self.open(self.studio.folder.add_page([(pictures[0][0], recipe)]))
                self.restore(recipe)
            else:
                self.studio.add_pictures(pictures)
        self.look()

    def form(self) -> None:
        """One box; a sentence unfolds into panels that can be edited. Its fields are bound to the draft."""
        draft = self.draft
        with card("What to draw").classes("form"):
            box = text_field("What should the pictures show?", multiline=True).bind_value(draft, "sentence")
            asks = {True: "What should change?", False: "What should the pictures show?"}
            box.bind_label_from(draft, "sources", backward=lambda sources: asks[bool(sources)])
            box.on("keydown.ctrl.enter", self.draw)
            with tag("div", "panels").bind_visibility_from(draft, "panels", backward=bool):
                text_field("In all of them").bind_value(draft, "theme")
                lines = text_field("A line for each panel", multiline=True)
                lines.bind_value(draft, "panels", forward=lambda text: (text or "").split("\n"), backward="\n".join)
            with row():
                button("Draw", self.draw, look="")
                button("Show the panels", self.unfold)
                button("An example", self.show_example, look="flat")
            self.subject()
            with ui.expansion("More"), row():
                many = number("Pictures to choose from", least=1, most=50)
                many.bind_value(draft, "candidates", forward=lambda value: min(50, max(1, int(value or 4))))
                seed = number("Variation; empty for a new one", most=2**31)
                seed.bind_value(draft, "seed", forward=lambda value: None if value is None else abs(int(value)))

    @ui.refreshable_method
    def subject(self) -> None:
        """Who is in a new page, or the picture that is changed by the words."""
        studio, draft = self.studio, self.draft
        for digest in draft.sources:
            with tag("div", "thumb source"):
                picture(studio.folder.source(digest), "The picture to change")
                cross("Do not change this picture", partial(studio.keep, sources=[]))
        people = {name: plain(name) for name in studio.folder.characters()}
        if people and not draft.sources:
            draft.character = draft.character if draft.character in people else ""
            who = ui.select({"": "nobody in particular"} | people, label="Who is in it").props("dense outlined")
            who.bind_value(draft, "character")

    def unfold(self) -> None:
        with saying_faults():
            if note := self.studio.unfold():
                notify(note)
        self.look()

    def show_example(self) -> None:
        sentence = TINY_EXAMPLE if self.studio.names.model == TINY else EXAMPLE
        self.studio.keep(sentence=sentence, sources=[], character="")
        self.unfold()

    def draw(self) -> None:
        studio = self.studio
        with saying_faults(shorten=studio.names.model == TINY):
            if not self.draft.sources:
                studio.unfold()
            studio.prompt()  # its faults are said at once
            studio.submit("Drawing", studio.draw)
        self.look()

    def restore(self, recipe: Recipe) -> None:
        """Fill in a page's recipe, and ask about models that differ."""
        studio = self.studio
        differing: list[str] = []
        with saying_faults():
            differing = studio.restore(recipe)
        self.look()
        if not differing:
            return
        with self.dialog("Drawn in another way") as dialog, row():
            ui.label(f"This page was {', '.join(differing)}. Now: {drawn_by(studio)}.")
            # A dropped file may name anything; what is not here already is not loaded.
            loras = {*recipe.loras} <= {*studio.lora_sources(), *studio.names.strengths}
            if loras and recipe.model in {offer.name for offer in offers() if offer.is_here}:
                names = replace(studio.names, model=recipe.model, kind="", adapter="", loras=recipe.loras)
                button("Draw as it was drawn", partial(self.change, partial(studio.choose, names), dialog), look="")
            else:
                ui.label("Its models are not all on this machine.")
            button("Keep the models of now", dialog.close)

    @ui.refreshable_method
    def hero(self) -> None:
        """The page that is open: the picture with its verbs, its candidates, its check and its tries."""
        page = self.studio.folder.page(self.draft.page)
        if page is None:
            with tag("section", "empty", aria_label="Nothing is open"):
                ui.label("Your pages appear here. Write a sentence, or drop pictures of any program.")
                ui.label("For a character of your own, begin under Characters.")
            return
        candidate = min(self.draft.candidate, len(page.candidates) - 1)
        recipe = page.recipes[candidate]
        with tag("section", "page", aria_label="The page that is open"):
            self.picture(page, candidate)
            with row():
                ui.label(standing(recipe, len(page.candidates))).classes("standing")
                if recipe.grid.count > 1:
                    check = partial(self.studio.check, page=page, candidate=candidate)
                    button("Check and repair", partial(self.start, "Checking", check), look="")
                stem = re.sub(r"[^\w-]+", "-", recipe.name)[:40].strip("-")
                button("Save", partial(ui.download, page.candidates[candidate], f"{stem}-{page.number}.png"))
                if recipe.prompt:
                    button("Fill in its words", partial(self.restore, recipe), look="flat")
                else:
                    shape = ui.select(list(LAYOUTS), value=recipe.layout, label="Rows x columns")
                    shape.props("outlined dense").classes("pick")
                    shape.on_value_change(lambda e: self.change(partial(self.studio.cut, page, str(e.value))))
            with tag("div", "verdict" if recipe.odd is None else "verdict bad"):
                for words in recipe.verdict:
                    ui.label(words)
            if not any(recipe.panels) and recipe.grid.count > 1:
                ui.label("To have panels drawn again, show as many panels at the left, and say what they show.")
            self.others(page, candidate)

    def others(self, page: Page, candidate: int) -> None:
        """The candidates of a page, the tries of its repair, and the judge's scores."""
        recipe = page.recipes[candidate]
        if len(page.candidates) > 1:
            with tag("div", "candidates", role="group", aria_label="All of them, best first"):
                for index, path in enumerate(page.candidates):
                    shown = picture_button(path, standing(page.recipes[index], 0), partial(self.open, page, index))
                    shown.props["aria-pressed"] = str(index == candidate).lower()
        if page.tries:
            heading("Every try")
            with row():
                for words, path in zip(recipe.tries, page.tries, strict=False):
                    figure(path, words, classes="small")
        if recipe.matrix or recipe.parts:
            with ui.expansion("Why?"):
                why(recipe)

    def picture(self, page: Page, candidate: int) -> None:
        """The picture, with the verbs of each panel on it, and a slider over the picture before it."""
        recipe = page.recipes[candidate]
        with tag("div", "hero"):
            picture(page.candidates[candidate], recipe.name)
            if page.before:
                picture(page.before, "Before").classes("before")
            grid = f"grid-template: repeat({recipe.grid.rows}, 1fr) / repeat({recipe.grid.cols}, 1fr)"
            with tag("div", "verbs").style(grid):
                for index in range(recipe.grid.count):
                    name = f"panel {index + 1}" if recipe.grid.count > 1 else "this picture"
                    of_panel: Any = {"page": page, "candidate": candidate, "panel": index}
                    redraw = partial(self.studio.redraw, **of_panel)
                    verbs = {
                        "Keep": (f"Keep {name} as a picture of a character", partial(self.keep_panel, **of_panel)),
                        "Redraw": (f"Draw {name} again", partial(self.start, "Drawing a panel again", redraw)),
                        "Change": (f"Change {name} by words", partial(self.change_panel, **of_panel)),
                    }
                    if recipe.grid.count == 1 or not recipe.prompt:
                        del verbs["Redraw"]
                    with tag("div", "odd" if index == recipe.odd else ""):
                        for verb, (label, act) in verbs.items():
                            button(verb, act, label=label, look="flat dense")
            if page.before:
                label = "Compare with the picture before"
                slider = tag("input", "wipe", type="range", min=0, max=100, value=0, aria_label=label)
                cut = "(e) => e.target.parentElement.style.setProperty('--cut', e.target.value + '%')"
                slider.on("input", js_handler=cut)

    def change_panel(self, page: Page, candidate: int, panel: int) -> None:
        """Hand one panel, never the whole page, to the editor."""
        image = split(open_image(page.candidates[candidate]), page.recipes[candidate].grid)[panel]
        self.studio.keep(sources=[self.studio.folder.add_source(image)], sentence="", panels=[])
        notify("Say what should change in this picture.")
        self.look()

    def keep_panel(self, page: Page, candidate: int, panel: int) -> None:
        names = self.studio.folder.characters()
        if not names:
            notify("There is no character yet; make one under Characters.")
            return
        recipe = page.recipes[candidate]
        image = split(open_image(page.candidates[candidate]), recipe.grid)[panel]
        with self.dialog("A picture of whom?") as dialog:
            for name in names:
                button(plain(name), partial(self.keep_picture, name, image, recipe.panels[panel], dialog))

    def keep_picture(self, name: str, image: Image | Path, line: str, dialog: ui.dialog | None = None) -> None:
        """Make a drawn picture one of a character's, with what it shows as its caption."""
        image = open_image(image) if isinstance(image, Path) else image
        self.change(partial(self.studio.folder.add_picture, name, image, caption_of(line)), dialog)
        notify(f"Kept as a picture of {plain(name)}.")

    # --- characters --------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def characters(self) -> None:
        folder = self.studio.folder
        names = folder.characters()
        name = self.draft.shown_character
        if name not in names:
            name = next(iter(names), "")
        with row().props('role=group aria-label="Your characters"'):
            for each in names:
                chip = button(plain(each), partial(self.show_character, each), look="" if each == name else "outline")
                chip.props["aria-pressed"] = str(each == name).lower()
            button("A new character", self.ask_character, look="flat")
        if not name:
            with tag("section", "empty", aria_label="No character yet"):
                ui.label("Draw one character the same in every picture: five to twenty pictures of it are enough.")
            return
        with card("Pictures"), saying_faults():
            heading("Pictures")
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
        self.sheet(name)
        self.teaching(name)
        remove = partial(self.remove, plain(name), folder.character_folder(name))
        button(f"Remove {plain(name)}", remove, look="flat")

    def show_character(self, name: str) -> None:
        self.change(partial(self.studio.keep, shown_character=name))

    def ask_character(self) -> None:
        with self.dialog("A new character") as dialog:
            name = ui.input("Name").classes("wide")
            words = ui.textarea("What it looks like").classes("wide")
            if self.studio.names.model == TINY:
                ui.label("The practice model draws heroes of its small world, such as “a red round hero with a crown”.")

            def make() -> None:
                with saying_faults():
                    made = self.studio.folder.new_character(name.value or "", words.value or "")
                    self.show_character(made)
                    dialog.close()

            button("Make it", make, look="")

    async def add_pictures(self, name: str, event: events.MultiUploadEventArguments) -> None:
        with saying_faults():
            for image in [opened(await file.read(), file.name) for file in event.files]:
                self.studio.folder.add_picture(name, image)
        self.studio.version += 1

    def sheet(self, name: str) -> None:
        """More pictures of a character, by an editor, the best of each line first."""
        with card("More pictures of it"):
            heading("More pictures of it")
            default = TINY_SHEET if self.studio.editor == TINY else SHEET
            lines = text_field("A line for each picture", default, multiline=True)

            def draw() -> None:
                texts = [line.strip() for line in (lines.value or "").splitlines() if line.strip()]
                self.start("Drawing the sheet", partial(self.studio.draw_sheet, name=name, lines=texts))

            button("Draw them", draw, look="")
            for page in self.studio.folder.pages:
                line = page.recipes[0].sentence
                if page.recipes[0].note != f"sheet of {name}":
                    continue
                with tag("div", "thumb"):
                    ui.label(f"{line} – best first").classes("soft")
                    with tag("div", "pictures"):
                        for path, recipe in zip(page.candidates, page.recipes, strict=True):
                            with tag("div", "picture"):
                                figure(path, standing(recipe, 0))
                                keep = partial(self.keep_picture, name, path, line)
                                button("Keep", keep, label="Keep it as a picture of the character", look="flat dense")
                    cross(f"Remove the line {line}", partial(self.remove, f"page {page.number}", page.folder))

    def teaching(self, name: str) -> None:
        """The newest training of the character, with the pictures of the LoRA that is used."""
        studio = self.studio
        last = next(reversed(trainings(studio.loras, name)), None)
        with card("Teach it"):
            heading("Teach it")
            ui.label("From three pictures on. The studio draws nothing else meanwhile.").classes("soft")
            teach = partial(self.start, f"Teaching {plain(name)}", partial(studio.teach, name=name))
            is_stopped = last is not None and not last.is_finished
            button("Go on teaching it" if is_stopped else "Teach it", teach, look="")
            if last is None or last.lora is None:
                return
            if last.best_step:
                ui.label(f"Best after {last.best_step} of {last.step} steps, by a picture that it does not see.")
            ui.label("Left without it, right with what it has learned.").classes("soft")
            with tag("div", "gallery"):
                for text, before, after in last.samples:
                    with tag("div", "pair"):
                        picture(before, f"Without: {text}")
                        picture(after, f"With: {text}")
                        ui.label(text).classes("soft")
            file = last.lora / "pytorch_lora_weights.safetensors"
            with row():
                button("Use it for pages", partial(self.use, name, str(last.lora)), look="")
                button("Save for ComfyUI", partial(ui.download, file, f"{name}.safetensors"))

    def use(self, name: str, lora: str) -> None:
        """Draw pages with a character's LoRA, in the place of its earlier ones."""
        studio = self.studio
        mine = {str(training.lora) for training in trainings(studio.loras, name)}
        loras = {source: strength for source, strength in studio.names.strengths.items() if source not in mine}
        loras[lora] = PRACTICE_STRENGTH if studio.names.model == TINY else 1.0
        self.change(partial(studio.choose, replace(studio.names, adapter="", loras=loras)))
        studio.keep(character=name)
        notify(f"Pages are drawn with {lora_text({lora: loras[lora]})} now.")

    # --- models ------------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def models_button(self) -> None:
        button(f"Drawn by {drawn_by(self.studio)}", self.ask_for_models, look="flat").classes("by")

    def ask_for_models(self) -> None:
        """Choose what draws, what changes pictures, what judges, and the strength of each LoRA."""
        studio, names = self.studio, self.studio.names
        with self.dialog("Models") as dialog:
            ui.label(f"Judged by {shown_name(names.judge, 'judge')}. Changed by {shown_name(studio.editor) or 'none'}.")
            for source in dict.fromkeys([*studio.lora_sources(), *names.strengths]):
                strength = number(f"Strength of {lora_name(source)}; 0 for off", least=-2, most=2, precision=2)
                strength.set_value(names.strengths.get(source, 0))
                strength.on_value_change(lambda e, source=source: self.set_strength(source, float(e.value or 0)))
            file = text_field("A file of ComfyUI, or a folder: its path")
            button("Use this", lambda: self.change(partial(studio.use, file.value.strip()), dialog))
            for offer in offers():
                self.offer(offer, dialog)
            button("Close", dialog.close)

    def set_strength(self, source: str, strength: float) -> None:
        loras = {**self.studio.names.strengths, source: strength}
        loras = {name: value for name, value in loras.items() if value}
        self.change(partial(self.studio.choose, replace(self.studio.names, adapter="", loras=loras)))

    def offer(self, offer: Offer, dialog: ui.dialog) -> None:
        """A published model: what it does, its licence, and whether it fits this machine."""
        name = shown_name(offer.name)
        with tag("div", "offer"):
            ui.label(name)
            told = ui.label("").classes("told")
            told.bind_visibility_from(told, "text", backward=bool)
            if offer.kind:
                fit = partial(self.tell_fit, offer, told)
                button("Does it fit?", fit, label=f"Does {name} fit?", look="flat dense")
            if offer.is_here:
                use = partial(self.studio.use, offer.name, offer.does)
                button("Use", partial(self.change, use, dialog), label=f"Use {name}", look="outline dense")
            else:
                ask = partial(self.ask_download, offer)
                button("Download", ask, label=f"Download {name}", look="outline dense")
            ui.label(f"{offer.does}; licence {offer.licence}").classes("soft")

    async def tell_fit(self, offer: Offer, told: ui.label) -> None:
        """Plan a model on this machine, on the worker's thread: a plan beside a load would break both."""
        judge = self.studio.names.judge if self.studio.names.judge != TINY else JUDGE
        found: list[str] = []
        self.start(f"Planning {offer.name}", lambda job: found.append(fit_of(offer.name, offer.kind, judge)[1]))
        job = self.studio.job
        while not job.ended:
            await asyncio.sleep(0.2)
        told.set_text(found[0] if found else job.error)

    def ask_download(self, offer: Offer) -> None:
        with self.dialog(f"Download {offer.name}") as dialog:
            agreed = ui.checkbox(f"I have read its licence ({offer.licence}) and accept it")
            ui.link(f"huggingface.co/{offer.name}", f"https://huggingface.co/{offer.name}", new_tab=True)
            token = ui.input("Access token", password=True).classes("wide")
            token.set_visibility(offer.gated)
            if offer.gated:
                ui.label("It is for people who accepted its licence there: paste a token, which is kept nowhere.")

            def fetch() -> None:
                if not agreed.value:
                    notify("Accept its licence first.")
                elif attempt(partial(self.studio.download, offer.name, token=token.value or "")):
                    dialog.close()

            button("Download", fetch, look="")


# --- parts of the page -----------------------------------------------------------------------------------------------


@contextmanager
def saying_faults(*, shorten: bool = False) -> Iterator[None]:
    """Show a fault of the input or the disk to the person, and go on. The practice model lists all of its words."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        message = str(error)
        if shorten:
            message = message.partition(";")[0] + ". Choose another model above for words of your own."
        notify(message, type="warning")


def attempt(act: Callable[[], object]) -> bool:
    """Do something, say its fault if it has one, and return whether it was done."""
    failed = True
    with saying_faults():
        act()
        failed = False
    return not failed


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


def number(label: str, *, least: float = 0, most: float, precision: int = 0) -> ui.number:
    return ui.number(label, min=least, max=most, precision=precision).props("outlined dense").classes("pick")


def heading(text: str, *, level: int = 2) -> None:
    ui.label(text).props(f"role=heading aria-level={level}").classes(f"h{level}")


def row() -> ui.row:
    return ui.row().classes("items-center")


def card(name: str) -> ui.element:
    return tag("section", "card", aria_label=name)


def button(text: str, act: Callable[[], object], *, label: str = "", look: str = "outline") -> ui.button:
    made = ui.button(text, on_click=act).props(f"no-caps {look}")
    if label:
        made.props["aria-label"] = label
    return made


def cross(label: str, act: Callable[[], object]) -> None:
    """The button that removes the thing that it lies on."""
    button("✕", act, label=label, look="flat dense").classes("cross")


def picture(path: Path, alt: str = "") -> ui.element:
    """Show an image of the folder, under an address that changes with its content."""
    root = next(parent for parent in path.parents if (parent / "key").is_file())
    version = path.stat().st_mtime_ns if path.is_file() else 0
    return tag("img", src=f"/file/{quote(path.relative_to(root).as_posix())}?{version}", alt=alt)


def figure(image: Image | Path, caption: str, *, classes: str = "") -> None:
    with tag("figure", classes):
        if isinstance(image, Path):
            picture(image, caption)
        else:
            ui.image(image).props["alt"] = caption
        with tag("figcaption"):
            ui.label(caption)


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
    """The judge's scores of a page, by pairs of panels or by question."""
    ui.label(f"Judged by {shown_name(recipe.judge, 'judge')}. 1: the two belong together.")
    for part, score in recipe.parts.items():
        ui.label(f"{part}: {score_text(score)}")
    with tag("table", "matrix"):
        for number, scores in enumerate(recipe.matrix, 1):
            with tag("tr"):
                ui.html(f"panel {number}", tag="th", sanitize=False)
                for score in scores:
                    ui.html(score_text(score), tag="td", sanitize=False)


# --- words -----------------------------------------------------------------------------------------------------------


def opened(content: bytes, name: str) -> Image:
    """Open a dropped picture. Raises ImageError if it is none, or has too many pixels."""
    return open_image(content, name=name, max_pixels=MOST_PIXELS)


def plain(name: str) -> str:
    return name.replace("_", " ")


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


def score_text(score: float | None) -> str:
    return "–" if score is None else f"{score:.2f}"


def caption_of(line: str) -> str:
    """Turn an instruction into what the picture shows: "Change the scene to sunset." → "at sunset"."""
    line = line.strip().rstrip(".")
    line = re.sub(r"^(change|make|turn) (the )?(scene|time|light|sky|background) (in)?to ", "at ", line, flags=re.I)
    command = r"^show the scene |^(change|make|turn) .*? (in)?to |^(put|add|draw|give (it|her|him|them|the \w+)) "
    return re.sub(command, "", line, flags=re.I)
