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

from pacorl.config.options import StudioModels
from pacorl.core.grid import split
from pacorl.io.images import open_image
from pacorl.studio.folder import Page, Recipe
from pacorl.studio.models import JUDGE, Download, Offer, cached, fit_of, gib, offers
from pacorl.studio.teaching import Training
from pacorl.studio.work import Job, Studio, lora_text
from pacorl.tiny.characters import EDITS, VALUES, character_prompts
from pacorl.types import TINY

STYLE = Path(__file__).with_name("style.css")
MOST_BYTES = 20 * 2**20
MOST_PIXELS = 25_000_000
LAYOUTS = ("1x1", "2x2", "1x2", "1x3", "2x3", "3x3", "1x4", "2x1", "3x1")
EXAMPLES = (
    "Four pictures of the same young dentist in light-blue scrubs, soft watercolour: explains brushing to a child; "
    "studies an X-ray; cleans a tooth; waves goodbye at the door",
    "Four pictures of a red fox with a green scarf, ink and wash: sleeps under a tree; crosses a stream; meets an owl; "
    "comes home in the snow",
)
SHEET = "from the side, walking\nfrom the front, full body\nfrom behind, looking back\nclose-up of the face, smiling"
FORM = {"sentence", "theme", "panels", "character", "sources", "candidates", "seed"}
"""Fields of the draft that the form of a page shows."""
PRACTICE_STRENGTH = 0.5
"""The practice model learns single pictures and draws pages, which full strength spoils."""


class StudioPage:
    """One window on the studio."""

    def __init__(self, studio: Studio, download: Download) -> None:
        self.studio = studio
        self.download = download
        self.seen = studio.version  # all is drawn below
        self.page_shown = studio.draft.page
        self.form_shown: dict[str, Any] = {}
        self.training_shown: object = None
        self.character = next(iter(studio.folder.characters()), "")
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
            shown = characters if studio.draft.tab == "Characters" else pages
            panels = ui.tab_panels(tabs, value=shown, animated=False).classes("tabs")
            panels.on_value_change(lambda e: studio.keep(tab=e.value))
            with panels:
                with ui.tab_panel(pages), ui.element("div").classes("desk"):
                    self.strip()
                    with ui.element("div").classes("work"):
                        self.form()
                        self.hero()
                with ui.tab_panel(characters):
                    self.character_view()
        self.toast()
        self.dialogs = ui.element("div")
        ui.timer(0.4, self.look)

    def look(self) -> None:
        """Show what has changed, here or in another window."""
        studio = self.studio
        if studio.version != self.seen:
            self.seen = studio.version
            for part in (self.strip, self.hero, self.toast, self.models_button, self.character_view):
                part.refresh()
            if studio.draft.page != self.page_shown:
                self.page_shown = studio.draft.page
                # On a phone the result is below the form.
                ui.run_javascript("document.querySelector('.page')?.scrollIntoView({block: 'nearest'})")
            if self.form_shown != studio.draft.model_dump(include=FORM):
                self.form.refresh()
        training = (studio.teacher.name, studio.teacher.last(self.character)) if studio.teacher.name else None
        if training != self.training_shown:
            self.training_shown = training
            self.training.refresh()
        self.status.refresh()

    @ui.refreshable_method
    def status(self) -> None:
        """The job that runs, its progress, its unfinished pictures, and its fault."""
        job = self.studio.job
        with ui.element("div").classes("status").props("role=status"):
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
            if self.download.runs:
                with row():
                    ui.label(f"Downloading {self.download.name}: {gib(cached().get(self.download.name, 0))} so far")
                    button("Stop the download", self.download.stop)
            elif self.download.fault:
                ui.label(f"{self.download.name}: {self.download.fault}").classes("fault")

    @ui.refreshable_method
    def toast(self) -> None:
        """What was removed last, with its undo."""
        removed = self.studio.removed
        if removed:
            with ui.element("div").classes("toast").props("role=status"):
                ui.label(f"Removed {removed.what}.")
                button("Undo", partial(attempt, self.studio.undo), look="flat dense")

    def remove(self, what: str, *paths: Path) -> None:
        attempt(partial(self.studio.remove, what, *paths))
        self.look()

    @contextmanager
    def dialog(self, name: str) -> Iterator[ui.dialog]:
        """Open a dialog; it stays when what opened it is drawn anew."""
        with self.dialogs, ui.dialog(value=True).props(f'aria-label="{quoted(name)}"') as dialog, ui.card():
            heading(name)
            yield dialog

    def start(self, name: str, work: Callable[[Job], object]) -> None:
        attempt(partial(self.studio.submit, name, work))
        self.look()

    # --- pages -------------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def strip(self) -> None:
        """The earlier pages, which are the output folder."""
        with ui.element("nav").classes("strip").props('aria-label="Earlier pages"'):
            drop_zone("Drop or choose pictures", self.dropped)
            for page in self.studio.folder.pages:
                name = page.recipes[0].name[:60]
                is_open = page.number == self.studio.draft.page
                with ui.element("div").classes("thumb" + " here" * is_open):
                    shown = picture_button(page.candidates[0], name, partial(self.open, page), label=f"Open {name}")
                    shown.props(f"aria-current={str(is_open).lower()}")
                    cross(f"Remove {name}", partial(self.remove, f"page {page.number}", page.folder))

    def open(self, page: Page, candidate: int = 0) -> None:
        self.studio.keep(page=page.number, candidate=candidate)
        self.look()

    async def dropped(self, event: events.MultiUploadEventArguments) -> None:
        """Open dropped pictures: a page of this studio by its recipe, or pictures of any program."""
        files = [(await file.read(), file.name) for file in event.files]
        with saying_faults():
            pictures = [(opened(content, name), name) for content, name in files]
            recipe = Recipe.of(files[0][0]) if len(files) == 1 else None
            if recipe:
                self.open(self.studio.folder.add_page([(pictures[0][0], recipe)]))
                self.restore(recipe)
            else:
                self.studio.add_pictures(pictures)
        self.look()

    @ui.refreshable_method
    def form(self) -> None:
        """One box; a sentence unfolds into panels that can be edited."""
        studio, draft = self.studio, self.studio.draft
        self.form_shown = draft.model_dump(include=FORM)
        with card("What to draw").classes("form"):
            for digest in draft.sources:
                with ui.element("div").classes("thumb source"):
                    picture(studio.folder.source(digest), "The picture to change")
                    rest = [other for other in draft.sources if other != digest]
                    cross("Do not change this picture", partial(studio.keep, sources=rest))
            label = "What should change?" if draft.sources else "What should the pictures show?"
            box = ui.textarea(label, value=draft.sentence, on_change=lambda e: self.typed(sentence=e.value or ""))
            box.props("autogrow outlined input-style=min-height:3em").classes("wide")
            box.on("keydown.ctrl.enter", self.draw)
            if draft.panels and not draft.sources:
                field("In all of them", draft.theme, lambda text: self.typed(theme=text)).classes("wide")
                with ui.element("div").classes("panels"):
                    for index, text in enumerate(draft.panels):
                        field(f"Panel {index + 1}", text, partial(self.panel_typed, index))
            with row():
                button("Draw", self.draw, look="")
                if not draft.sources:
                    button("Show the panels", self.unfold)
                    button("An example", self.show_example, look="flat")
            names = studio.folder.characters()
            if names and not draft.sources:
                people = {"": "nobody in particular"} | {name: plain(name) for name in names}
                who = ui.select(people, label="Who is in it", value=draft.character if draft.character in names else "")
                who.on_value_change(lambda e: self.typed(character=e.value or "")).props("dense outlined")
            with ui.expansion("More").classes("more"), row():
                number("Pictures to choose from", draft.candidates, 1, 50, lambda n: self.typed(candidates=n or 4))
                number("Variation; empty for a new one", draft.seed, 0, 2**31, lambda n: self.typed(seed=n))

    def typed(self, **changes: Any) -> None:
        """Keep what was typed, without drawing this window's form anew."""
        if attempt(partial(self.studio.keep, **changes)):
            self.form_shown |= changes

    def panel_typed(self, index: int, text: str) -> None:
        panels = list(self.studio.draft.panels)
        panels[index] = text
        self.typed(panels=panels)

    def unfold(self) -> None:
        with saying_faults():
            if note := self.studio.unfold():
                notify(note)
        self.look()

    def show_example(self) -> None:
        sentence = EXAMPLES[self.example % len(EXAMPLES)]
        if self.studio.names.model == TINY:
            prompt = character_prompts("test", 8, seed=1)[self.example % 8]
            panels = [text.removeprefix(f"{prompt.theme}, ").replace(", ", " with ") for text in prompt.panels]
            sentence = f"Four pictures of {prompt.theme}: {'; '.join(panels)}"
        self.example += 1
        self.studio.keep(sentence=sentence, sources=[], character="")
        self.unfold()

    def draw(self) -> None:
        studio = self.studio
        with saying_faults(shorten=studio.names.model == TINY):
            if not studio.draft.sources:
                studio.unfold()
            studio.prompt()  # its faults are said at once
            self.start("Drawing", studio.draw)
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
        # A dropped file may name anything; what is not here already is not loaded.
        is_here = recipe.model in {offer.name for offer in offers(studio.names) if offer.is_here}
        known = {*studio.teacher.lora_sources().values(), *studio.names.strengths}
        with self.dialog("Drawn in another way") as dialog:
            ui.label(f"This page was {', '.join(differing)}. Now: {drawn_by(studio)}.")
            with row():
                if is_here and known >= {*recipe.loras}:
                    names = with_loras(replace(studio.names, model=recipe.model, kind=""), recipe.loras)
                    button("Draw as it was drawn", partial(self.choose, names, dialog), look="")
                else:
                    ui.label("Its models are not all on this machine.")
                button("Keep the models of now", dialog.close)

    def choose(self, names: StudioModels, dialog: ui.dialog) -> None:
        if attempt(partial(self.studio.choose, names)):
            dialog.close()

    @ui.refreshable_method
    def hero(self) -> None:
        """The page that is open: the picture with its verbs, its candidates, its check and its tries."""
        page = self.studio.folder.page(self.studio.draft.page)
        if page is None:
            with ui.element("section").classes("empty").props('aria-label="Nothing is open"'):
                ui.label("Your pages appear here. Write a sentence, or drop pictures of any program.")
                ui.label("For a character of your own, begin under Characters.")
            return
        candidate = min(self.studio.draft.candidate, len(page.candidates) - 1)
        recipe = page.recipes[candidate]
        with ui.element("section").classes("page").props('aria-label="The page that is open"'):
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
            verdict = page.verdict if candidate == 0 else None
            for words in verdict.lines if verdict else []:
                ui.label(words).classes("verdict" + (" good" if verdict and verdict.passed else " bad"))
            if not recipe.prompt:
                self.wording(page, recipe)
            self.others(page, candidate)

    def others(self, page: Page, candidate: int) -> None:
        """The candidates of a page, the tries of its repair, and the judge's scores."""
        recipe = page.recipes[candidate]
        if len(page.candidates) > 1:
            with ui.element("div").classes("candidates").props('role=group aria-label="All of them, best first"'):
                for index, path in enumerate(page.candidates):
                    shown = picture_button(path, standing(page.recipes[index], 0), partial(self.open, page, index))
                    shown.props(f"aria-pressed={str(index == candidate).lower()}")
        if recipe.tries:
            heading("Every try")
            with row():
                for line, path in zip(recipe.tries, page.tries, strict=False):
                    figure(path, f"Panel {line.panel + 1}: {line.verdict}", classes="small")
        if recipe.matrix or recipe.parts:
            with ui.expansion("Why?"):
                why(recipe)

    def picture(self, page: Page, candidate: int) -> None:
        """The picture, with the verbs of each panel on it, and a slider over the picture before it."""
        recipe = page.recipes[candidate]
        odd = page.verdict.odd if page.verdict and candidate == 0 else None
        with ui.element("div").classes("hero"):
            picture(page.candidates[candidate], recipe.name)
            if page.before:
                picture(page.before, "Before").classes("before")
            grid = f"grid-template: repeat({recipe.grid.rows}, 1fr) / repeat({recipe.grid.cols}, 1fr)"
            with ui.element("div").classes("verbs").style(grid):
                for index in range(recipe.grid.count):
                    panel = f"panel {index + 1}" if recipe.grid.count > 1 else "this picture"
                    verbs = {"Keep": f"Keep {panel} as a picture of a character"}
                    if recipe.grid.count > 1 and recipe.prompt:
                        verbs["Redraw"] = f"Draw {panel} again"
                    verbs["Change"] = f"Change {panel} by words"
                    with ui.element("div").classes("odd" if index == odd else ""):
                        for verb, label in verbs.items():
                            act = partial(self.act_on_panel, verb, page, candidate, index)
                            button(verb, act, label=label, look="flat dense")
            if page.before:
                slider = ui.element("input").props("type=range min=0 max=100 value=0").classes("wipe")
                slider.props('aria-label="Compare with the picture before"')
                cut = "(e) => e.target.parentElement.style.setProperty('--cut', e.target.value + '%')"
                slider.on("input", js_handler=cut)

    def act_on_panel(self, verb: str, page: Page, candidate: int, panel: int) -> None:
        """Keep, redraw or change one panel of a page; the last two never take the whole page."""
        recipe = page.recipes[candidate]
        if verb == "Redraw":
            redraw = partial(self.studio.redraw, page=page, candidate=candidate, panel=panel)
            self.start("Drawing a panel again", redraw)
            return
        image = split(open_image(page.candidates[candidate]), recipe.grid)[panel]
        if verb == "Change":
            self.studio.keep(sources=[self.studio.folder.add_source(image)], sentence="")
            notify("Say what should change in this picture.")
            self.look()
            return
        names = self.studio.folder.characters()
        if not names:
            notify("There is no character yet; make one under Characters.")
            return
        with self.dialog("A picture of whom?") as dialog:
            for name in names:
                button(plain(name), partial(self.keep_picture, name, image, recipe.panels[panel], dialog))

    def keep_picture(self, name: str, image: Image, line: str, dialog: ui.dialog | None = None) -> None:
        """Make a drawn picture one of a character's, with what it shows as its caption."""
        if attempt(partial(self.studio.folder.add_picture, name, image, caption_of(line))):
            self.studio.version += 1
            notify(f"Kept as a picture of {plain(name)}.")
            if dialog:
                dialog.close()
        self.look()

    def wording(self, page: Page, recipe: Recipe) -> None:
        """Ask how a picture of another program is cut, and what its panels show, without which none is redrawn."""
        with ui.expansion("Say how it is cut into panels and what they show, to have one drawn again").classes("wide"):
            layout = ui.select(list(LAYOUTS), value=recipe.layout, label="Rows x columns")
            theme = ui.input("In all of them", value=recipe.theme)
            texts = [ui.input(f"Panel {index + 1}", value=text) for index, text in enumerate(recipe.panels)]

            def use() -> None:
                panels = [box.value or "" for box in texts]
                attempt(partial(self.studio.describe, page, str(layout.value), theme.value or "", panels))
                self.look()

            button("Use these", use)

    # --- characters --------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def character_view(self) -> None:
        folder = self.studio.folder
        names = folder.characters()
        if self.character not in names:
            self.character = next(iter(names), "")
        with row().classes("chips").props('role=group aria-label="Your characters"'):
            for name in names:
                is_shown = name == self.character
                chip = button(plain(name), partial(self.show_character, name), look="" if is_shown else "outline")
                chip.props(f"aria-pressed={str(is_shown).lower()}")
            button("A new character", self.ask_character, look="flat")
        if not self.character:
            with ui.element("section").classes("empty").props('aria-label="No character yet"'):
                ui.label("Draw one character the same in every picture: five to twenty pictures of it are enough.")
            return
        with card("Pictures"):
            heading("Pictures")
            with saying_faults():
                words = ui.textarea("What it looks like", value=folder.description(self.character))
                words.props("autogrow outlined").classes("wide").on("blur", lambda: self.describe(words.value or ""))
            with ui.element("div").classes("pictures"):
                for index, (path, caption) in enumerate(folder.pictures(self.character), 1):
                    with ui.element("div").classes("picture thumb"):
                        picture(path, caption or "A picture of it")
                        field("What it shows", caption, partial(folder.caption, path))
                        cross(
                            f"Remove picture {index}", partial(self.remove, "a picture", path, path.with_suffix(".txt"))
                        )
                drop_zone("Drop or choose pictures", self.add_pictures)
        self.sheet()
        with card("Teach it"):
            heading("Teach it")
            self.training()
        path = folder.character_folder(self.character)
        button(f"Remove {plain(self.character)}", partial(self.remove, plain(self.character), path), look="flat")

    def show_character(self, name: str) -> None:
        self.character = name
        self.character_view.refresh()

    def ask_character(self) -> None:
        with self.dialog("A new character") as dialog:
            name = ui.input("Name").classes("wide")
            words = ui.textarea("What it looks like").classes("wide")
            if self.studio.names.model == TINY:
                ui.label("The practice model draws heroes of its small world, such as “red round hero, crown, night”.")

            def make() -> None:
                with saying_faults():
                    self.character = self.studio.folder.new_character(name.value or "", words.value or "")
                    self.studio.version += 1
                    dialog.close()
                self.look()

            button("Make it", make, look="")

    def describe(self, words: str) -> None:
        attempt(partial(self.studio.folder.describe, self.character, words))

    async def add_pictures(self, event: events.MultiUploadEventArguments) -> None:
        files = [(await file.read(), file.name) for file in event.files]
        with saying_faults():
            for image in [opened(content, name) for content, name in files]:
                self.studio.folder.add_picture(self.character, image)
        self.studio.version += 1
        self.look()

    def sheet(self) -> None:
        """More pictures of a character, by an editor, the best of each line first."""
        with card("More pictures of it"):
            heading("More pictures of it")
            default = SHEET
            if self.studio.editor == TINY:
                default = "\n".join(EDITS[name].format(VALUES[name][-1]) for name in ("palette", "prop"))
            lines = ui.textarea("A line for each picture", value=default).props("autogrow outlined").classes("wide")

            def draw() -> None:
                texts = [line.strip() for line in (lines.value or "").splitlines() if line.strip()]
                self.start("Drawing the sheet", partial(self.studio.draw_sheet, name=self.character, lines=texts))

            button("Draw them", draw, look="")
            for page in self.studio.folder.pages:
                if page.recipes[0].note != f"sheet of {self.character}":
                    continue
                line = page.recipes[0].sentence
                with ui.element("div").classes("thumb"):
                    ui.label(f"{line} – best first").classes("soft")
                    with ui.element("div").classes("pictures"):
                        for path, recipe in zip(page.candidates, page.recipes, strict=True):
                            with ui.element("div").classes("picture"):
                                figure(path, standing(recipe, 0))
                                keep = partial(self.keep_picture, self.character, open_image(path), line)
                                button("Keep", keep, label="Keep it as a picture of the character", look="flat dense")
                    cross(f"Remove the line {line}", partial(self.remove, f"page {page.number}", page.folder))

    @ui.refreshable_method
    def training(self) -> None:
        """The newest training of the character, with the pictures of the LoRA that is used."""
        teacher = self.studio.teacher
        last: Training | None = None
        with saying_faults():
            last = teacher.last(self.character)
        if last and teacher.name == last.name:
            with row():
                ui.label(f"Learning: {last.step} of {last.steps} steps.")
                button("Stop; it can go on later", self.stop_teaching)
        else:
            ui.label("From three pictures on. The studio draws nothing else meanwhile.").classes("soft")
            with row():
                steps = ui.number("Steps; empty for the usual", min=1, precision=0)
                steps.props("dense outlined").classes("pick")
                button("Teach it", lambda: self.teach(steps=int(steps.value) if steps.value else None), look="")
                if last and not last.finished:
                    button(f"Go on from step {last.step}", partial(self.teach, resume=last.name))
        if last is None:
            return
        if last.error:
            ui.label(last.error).classes("fault")
        if last.best_step:
            ui.label(f"Best after {last.best_step} of {last.step} steps, measured on a picture that it does not see.")
        if last.samples:
            ui.label("Left without it, right with what it has learned.").classes("soft")
            with ui.element("div").classes("gallery"):
                for text, before, after in last.samples:
                    with ui.element("div").classes("pair"):
                        picture(before, f"Without: {text}")
                        picture(after, f"With: {text}")
                        ui.label(text).classes("soft")
        if last.lora:
            file = last.lora / "pytorch_lora_weights.safetensors"
            with row():
                button("Use it for pages", partial(self.use, str(last.lora)), look="")
                button("Save for ComfyUI", partial(ui.download, file, f"{self.character}.safetensors"))

    def teach(self, *, steps: int | None = None, resume: str = "") -> None:
        attempt(partial(self.studio.teach, self.character, steps=steps, resume=resume))
        self.look()

    async def stop_teaching(self) -> None:
        await asyncio.to_thread(self.studio.teacher.stop)
        self.look()

    def use(self, lora: str) -> None:
        """Draw pages with a character's LoRA, in the place of its earlier ones."""
        studio = self.studio
        mine = studio.teacher.lora_sources(self.character).values()
        loras = {source: strength for source, strength in studio.names.strengths.items() if source not in mine}
        loras[lora] = PRACTICE_STRENGTH if studio.names.model == TINY else 1.0
        if attempt(partial(studio.choose, with_loras(studio.names, loras))):
            studio.keep(character=self.character)
            notify(f"Pages are drawn with {lora_text({lora: loras[lora]})} now.")

    # --- models ------------------------------------------------------------------------------------------------------

    @ui.refreshable_method
    def models_button(self) -> None:
        button(f"Drawn by {drawn_by(self.studio)}", self.ask_for_models, look="flat").classes("by")

    def ask_for_models(self) -> None:
        """Choose what draws, what changes pictures, what judges, and the LoRAs."""
        studio, names = self.studio, self.studio.names
        offered = offers(names)
        here = [offer for offer in offered if offer.is_here]
        with self.dialog("Models") as dialog:
            generators = {offer.name: shown_name(offer.name) for offer in here if offer.draws}
            draws = ui.select(generators, label="Draws", value=names.model if names.model in generators else None)
            file = ui.input("Or a file of ComfyUI: path of a .safetensors")
            editors = {"": "the one that draws, or none"}
            editors |= {offer.name: shown_name(offer.name) for offer in here if offer.changes}
            edits = ui.select(editors, label="Changes pictures", value=names.editor)
            judges = {name: shown_name(name, "judge") for name in dict.fromkeys([TINY, JUDGE, names.judge])}
            judge = ui.select(judges, label="Judges", value=names.judge)
            known = {source: name for name, source in studio.teacher.lora_sources().items()}
            strengths = {}
            for source in dict.fromkeys([*known, *names.strengths]):
                label = f"Strength of {known.get(source, source)}; 0 for off"
                strengths[source] = ui.number(label, value=names.strengths.get(source, 0), min=-2, max=2, step=0.05)
            for choice in (draws, file, edits, judge, *strengths.values()):
                choice.classes("wide")

            def take() -> None:
                model = (file.value or "").strip() or str(draws.value or names.model)
                loras = {source: float(box.value) for source, box in strengths.items() if box.value}
                kind = names.kind if model == names.model else ""
                chosen = replace(names, model=model, kind=kind, editor=edits.value or "", judge=str(judge.value))
                self.choose(with_loras(chosen, loras), dialog)

            with row():
                button("Use these", take, look="")
                button("Close", dialog.close)
            heading("More models", level=3)
            for offer in offered:
                if offer.name != TINY:
                    self.offer(offer)

    def offer(self, offer: Offer) -> None:
        """A published model: what it does, its licence, and whether it fits this machine."""
        does = " and ".join(["draws"] * offer.draws + ["changes pictures"] * offer.changes) or "judges"
        with ui.element("div").classes("offer"):
            ui.label(offer.name)
            ui.label(f"{does}; licence {offer.licence or 'as its page says'}").classes("soft")
            told = ui.label("")
            if offer.kind:
                fit = partial(self.tell_fit, offer, told)
                button("Does it fit?", fit, label=f"Does {offer.name} fit?", look="flat dense")
            if not offer.is_here:
                ask = partial(self.ask_download, offer)
                button("Download", ask, label=f"Download {offer.name}", look="flat dense")

    async def tell_fit(self, offer: Offer, told: ui.label) -> None:
        """Plan a model on this machine, on the worker's thread: a plan beside a load would break both."""
        judge = self.studio.names.judge if self.studio.names.judge != TINY else JUDGE
        found: list[str] = []
        self.start(f"Planning {offer.name}", lambda job: found.append(fit_of(offer.name, offer.kind, judge).text))
        job = self.studio.job
        while not job.ended:
            await asyncio.sleep(0.2)
        told.set_text(found[0] if found else job.error)

    def ask_download(self, offer: Offer) -> None:
        with self.dialog(f"Download {offer.name}") as dialog:
            agreed = ui.checkbox(f"I have read its licence ({offer.licence or 'see its page'}) and accept it")
            ui.link(f"huggingface.co/{offer.name}", f"https://huggingface.co/{offer.name}", new_tab=True)
            token = ui.input("Access token", password=True).classes("wide")
            token.set_visibility(offer.gated)
            if offer.gated:
                ui.label("It is for people who accepted its licence there: paste a token, which is kept nowhere.")

            def fetch() -> None:
                if not agreed.value:
                    notify("Accept its licence first.")
                elif attempt(partial(self.download.start, offer.name, token=token.value or "")):
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


def heading(text: str, *, level: int = 2) -> None:
    ui.label(text).props(f"role=heading aria-level={level}").classes(f"h{level}")


def row() -> ui.row:
    return ui.row().classes("items-center")


def card(name: str) -> ui.element:
    return ui.element("section").classes("card").props(f'aria-label="{name}"')


def button(text: str, act: Callable[[], object], *, label: str = "", look: str = "outline") -> ui.button:
    made = ui.button(text, on_click=act).props(f"no-caps {look}")
    return made.props(f'aria-label="{quoted(label)}"') if label else made


def cross(label: str, act: Callable[[], object]) -> None:
    """The button that removes the thing that it lies on."""
    button("✕", act, label=label, look="flat dense").classes("cross")


def field(label: str, text: str, take: Callable[[str], object]) -> ui.input:
    box = ui.input(label, value=text, on_change=lambda e: attempt(partial(take, e.value or "")))
    return box.props("outlined dense debounce=300")


def number(label: str, value: int | None, least: int, most: int, take: Callable[[int | None], object]) -> None:
    def change(event: events.ValueChangeEventArguments[Any]) -> None:
        take(None if event.value in (None, "") else int(event.value))

    ui.number(label, value=value, min=least, max=most, precision=0, on_change=change).props("dense outlined")


def picture(path: Path, alt: str = "") -> ui.element:
    """Show an image of the folder, under an address that changes with its content."""
    root = next(parent for parent in path.parents if (parent / "key").is_file())
    version = path.stat().st_mtime_ns if path.is_file() else 0
    address = f"/file/{quote(path.relative_to(root).as_posix())}?{version}"
    return ui.element("img").props(f'src="{address}" alt="{quoted(alt)}"')


def figure(image: Image | Path, caption: str, *, classes: str = "") -> None:
    with ui.element("figure").classes(classes):
        if isinstance(image, Path):
            picture(image, caption)
        else:
            ui.image(image).props(f'alt="{quoted(caption)}"')
        with ui.element("figcaption"):
            ui.label(caption)


def picture_button(path: Path, caption: str, act: Callable[[], object], *, label: str = "") -> ui.button:
    with button("", act, label=label or caption, look="flat").classes("shot") as made:
        picture(path)
        ui.label(caption)
    return made


def drop_zone(label: str, take: Callable[[events.MultiUploadEventArguments], Any]) -> None:
    """A button that chooses files, and on which files are dropped. The uploader behind it has no name for readers."""
    options: dict[str, Any] = {"multiple": True, "auto_upload": True, "max_file_size": MOST_BYTES}
    upload = ui.upload(on_multi_upload=take, **options).props('accept=".png,.jpg,.jpeg,.webp"').classes("hidden")
    zone = ui.button(label).props("flat no-caps").classes("drop")
    zone.on("click", js_handler=f"(e) => runMethod({upload.id}, 'pickFiles', [e])")
    zone.on("dragover", js_handler="(e) => e.preventDefault()")
    added = f"runMethod({upload.id}, 'addFiles', [[...e.dataTransfer.files]])"
    zone.on("drop", js_handler=f"(e) => {{ e.preventDefault(); {added}; }}")


def why(recipe: Recipe) -> None:
    """The judge's scores of a page, by pairs of panels or by question."""
    ui.label(f"Judged by {shown_name(recipe.judge, 'judge')}. 1: the two belong together.")
    for part, score in recipe.parts.items():
        ui.label(f"{part}: {score_text(score)}")
    with ui.element("table").classes("matrix"):
        for number_of, scores in enumerate(recipe.matrix, 1):
            with ui.element("tr"):
                ui.html(f"panel {number_of}", tag="th", sanitize=False)
                for score in scores:
                    ui.html(score_text(score), tag="td", sanitize=False)


# --- words -----------------------------------------------------------------------------------------------------------


def opened(content: bytes, name: str) -> Image:
    """Open a dropped picture. Raises ImageError if it is none, or has too many pixels."""
    return open_image(content, name=name, max_pixels=MOST_PIXELS)


def quoted(text: str) -> str:
    """Quote a text within `props`, whose values stand between double quotes."""
    return text.replace("\\", "").replace('"', "”").replace("\n", " ")


def plain(name: str) -> str:
    return name.replace("_", " ")


def shown_name(model: str, kind: str = "model") -> str:
    if model == TINY:
        return f"the practice {kind}"
    return Path(model).name if model.endswith(".safetensors") else model


def drawn_by(studio: Studio) -> str:
    loras = lora_text(studio.names.strengths)
    return shown_name(studio.names.model) + (f" + {loras}" if loras else "")


def with_loras(names: StudioModels, loras: dict[str, float]) -> StudioModels:
    """Draw with these LoRAs in place of the former ones."""
    return replace(names, adapter="", loras=dict(loras))


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
    scene = re.fullmatch(
        r"(?:change|make|turn) (?:the )?(?:scene|time|light|sky|background) (?:in)?to (.+)", line, re.I
    )
    if scene:
        return f"at {scene[1]}"
    command = r"^(change|make|turn) .*? (in)?to |^(put|add|draw|give (it|her|him|them|the \w+)) "
    return re.sub(command, "", line, flags=re.I)
