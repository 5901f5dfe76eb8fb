"""The studio's work, without its page: models, and one job at a time.

Every method that takes a `Job` runs on the worker's thread (`Studio.submit`). A failed job leaves no files.
"""

from __future__ import annotations

import logging
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image, Resampling

from pacorl.config.options import StudioModels
from pacorl.config.user_files import NO_USER_FILES
from pacorl.core.grid import join, shared_text
from pacorl.io.children import start_python
from pacorl.io.documents import write_json
from pacorl.io.files import inside
from pacorl.io.images import open_image
from pacorl.judge import judge_for
from pacorl.models.adapters import adapter_names, read_adapters
from pacorl.models.policies import POLICIES, kind_of, tiny_spec
from pacorl.records.compose import check_for, layout_for, prompt_from
from pacorl.records.panels import write_panels
from pacorl.studio.folder import Drawing, Folder, Recipe, timestamp
from pacorl.studio.models import JUDGE, download, fit_of, is_here, judge_of, offers, shown_name
from pacorl.studio.teaching import Training, newest_training, training_recipe
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Redraw
    from pacorl.models.policies.spec import PolicySpec

LEAST = 0.5
"""Threshold of a check."""
DRAWINGS = 4
"""Drawings of a page or a panel, of which the best comes first."""
TRIES = 6
"""Most redrawn panels of a repair."""
PRACTICE_STRENGTH = 0.5
"""Strength of a LoRA of the practice model, which learns single pictures and draws pages."""


class StoppedError(Exception):
    """Raised inside a stopped job."""


@dataclass(slots=True)
class Job:
    """The work that runs, or the last one."""

    phase: str
    error: str = ""
    ended: bool = False
    stopped: bool = False

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.go_on()

    def go_on(self, images: int = 0) -> None:
        """Raise StoppedError if a person stopped the job; generators call it with their number of `images`."""
        if self.stopped:
            raise StoppedError


class Studio:
    """One person's studio: folder, draft, models, and the job that runs."""

    def __init__(self, folder: Path, names: StudioModels | None = None) -> None:
        self.folder = Folder(folder)
        self.draft = self.folder.read_draft()
        self._kept = self.draft.model_dump()
        self.names = names or StudioModels()
        # The model that was chosen on the page, unless the command names one.
        if self.names == StudioModels() and self.draft.model:
            self.names = self._chosen()
        self.job = Job("", ended=True)
        self.version = 0
        """Counts changes, so that every open window shows them."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self.fits = dict.fromkeys(offers(), "")
        """Model → whether it fits this machine, in words; empty before `measure`."""
        self._loaded: tuple[tuple[str, Mapping[str, float]], Generator, PacoReward] | None = None
        """Kind and LoRAs of the loaded generator, the generator, and the judge."""

    def close(self) -> None:
        self.job.stopped = True
        self._worker.shutdown(wait=True)
        self.unload()
        self.save()
        self.folder.close()

    def keep(self, **changes: Any) -> None:
        """Change the draft, and show it in every window."""
        for name, value in changes.items():
            setattr(self.draft, name, value)
        self.version += 1

    def change(self, sources: list[str], words: str) -> None:
        """Fill in the form to change pictures, or to draw a page without `sources`."""
        if not self.draft.sources:
            self.draft.page_words = self.draft.words
        self.keep(sources=sources, words=words)

    def save(self) -> None:
        """Write the draft if it has changed: fields of the page are bound to it."""
        document = self.draft.model_dump()
        if document != self._kept:
            write_json(self.folder.path / "draft.json", document)
            self._kept = document

    def submit(self, work: Callable[..., object], **options: Any) -> Job:
        """Start a job. Raises ValueError while another one runs."""
        if not self.job.ended:
            raise ValueError(f"{self.job.phase} is under way; stop it, or wait")
        self.job = job = Job("Beginning")

        def run() -> None:
            try:
                work(job, **options)
            except StoppedError:
                pass
            except Exception as error:
                # Messages of these classes are for users; anything else is a fault of ours, logged in full.
                if not isinstance(error, ValueError | OSError | RuntimeError):
                    logging.getLogger(__name__).exception("a job of the studio failed")
                job.error = str(error).strip() or type(error).__name__
            finally:
                job.ended = True
                self.version += 1

        self._worker.submit(run)
        return job

    # --- models ------------------------------------------------------------------------------------------------------

    def unload(self) -> None:
        if self._loaded:
            self._loaded[2].close()
        self._loaded = None

    def spec(self, *, edits: bool = False) -> PolicySpec:
        """Return the kind of the chosen model; the practice model is two, of which one changes pictures."""
        return POLICIES.named(kind_of(self.names.model, edits=edits))

    def adapters(self, character: str, *, edits: bool = False) -> dict[str, float]:
        """List the LoRAs of the next drawing: the command's and the character's."""
        if edits and self.names.model == TINY:
            return dict.fromkeys(tiny_spec(edits=True).committed.adapters, 1.0)
        adapters = read_adapters(self.names.adapter)
        training = newest_training(self.loras(character)) if character else None
        if training and training.is_finished:
            adapters[str(training.lora)] = PRACTICE_STRENGTH if self.names.model == TINY else 1.0
        return adapters

    def known(self, recipe: Recipe) -> str:
        """Return the character of a recipe; empty if it is not here."""
        if recipe.character not in self.folder.characters():
            return ""
        return recipe.character

    def measure(self, job: Job) -> None:
        """Find out which models fit this machine."""
        for name in offers():
            if name != JUDGE:
                job.enter(f"Measuring {shown_name(name)}")
                self.fits[name] = fit_of(name)[1]

    def use(self, job: Job, name: str) -> None:
        """Draw with another model from now on.

        Raises:
            ValueError: it is no model of this machine, or does not fit it.
        """
        job.enter(f"Looking at {shown_name(name)}")
        # The recipe of a file from elsewhere may name anything, and is to download nothing.
        if not is_here(name):
            raise ValueError(f"{name} is not on this machine; download it above, or give the path of its file")
        POLICIES.named(kind_of(name)).check_source(name)
        # Plan first: a load that does not fit would exhaust the machine.
        memory, words = fit_of(name)
        if not memory:
            raise ValueError(f"{name} {words}")
        self.unload()
        self.keep(model=name, memory=memory)
        self.names = self._chosen()

    def _chosen(self) -> StudioModels:
        # Without the command's LoRA, which belongs to its model.
        memory: Any = self.draft.memory
        return StudioModels(model=self.draft.model, memory=memory, judge=judge_of(self.draft.model))

    def download(self, job: Job, name: str, token: str) -> None:
        """Fetch a model. The token is written nowhere, and is no argument, which other users could read."""
        secret = {"HF_TOKEN": token} if token else {}
        run_child(job, download(name), secret, phase=lambda: f"Downloading {name}")

    def _models(self, job: Job, character: str, *, edits: bool = False) -> tuple[Generator, PacoReward]:
        """Load the generator with a character's LoRA, and the judge; both stay loaded until another choice."""
        from pacorl.gate.paco_reward import PacoReward
        from pacorl.generate.generator import Generator
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        names, kind, adapters = self.names, self.spec(edits=edits).kind, self.adapters(character, edits=edits)
        if self._loaded and self._loaded[0] == (kind, adapters):
            return self._loaded[1:]
        job.enter("Loading the models")
        self.unload()
        use_cores()
        quiet_loading()
        generator = Generator.from_pretrained(names.model, kind=kind, adapter=adapters, memory=names.memory)
        with generator.judging():
            reward = PacoReward.from_pretrained(judge_for(names.judge, edits=edits), memory=names.memory)
        generator.judged_by(reward.judge)
        self._loaded = ((kind, adapters), generator, reward)
        return generator, reward

    # --- drawing -----------------------------------------------------------------------------------------------------

    def unfold(self) -> None:
        """Turn the draft's sentence into a shared description and a line per panel, unless it has lines.

        Raises:
            ValueError: it is no such sentence.
        """
        if self.panels[1]:
            return
        sentence, name = self.draft.words, self.draft.character
        if name:
            text = self.folder.character(name, least=0).text
            # A LoRA learned the name too; the practice model knows no names.
            described = text if self.names.model == TINY else f"{name}, {text}"
            sentence = sentence.replace(name.replace("_", " "), described)
        written = write_panels(sentence)
        panels = [text.removeprefix(f"{written.theme}, ") for text in written.panels]
        self.keep(words="\n".join([written.theme, *panels]))

    @property
    def panels(self) -> tuple[str, list[str]]:
        """What all panels of the draft show, and a line for each; no line before `unfold`."""
        theme, *lines = self.draft.words.split("\n")
        return theme.strip(), [line.strip() for line in lines if line.strip()]

    def prompts(self) -> list[Prompt]:
        """Build the prompt of the draft, or one for each line that changes its pictures.

        Raises:
            ValueError: the model does not know a word, or draws or changes no pictures.
        """
        draft = self.draft
        spec = self.spec(edits=bool(draft.sources))
        if not (spec.edits if draft.sources else spec.sets):
            verb = "changes" if draft.sources else "draws"
            raise ValueError(f"{shown_name(self.names.model)} {verb} no pictures; choose a model above that does")
        if draft.sources:
            sources = tuple(self.folder.path / name for name in draft.sources)
            lines = [line.strip() for line in draft.words.splitlines() if line.strip()]
            if not lines:
                raise ValueError("say what should change, a line for each new picture")
            prompts = [Prompt(number, line, sources=sources) for number, line in enumerate(lines)]
            return [check_for(self.names.model, prompt) for prompt in prompts]
        theme, panels = self.panels
        prompt = prompt_from(self.names.model, theme=theme, panels=panels)
        if draft.character:
            character = self.folder.character(draft.character)
            references = character.images[: spec.policy.max_references]
            prompt = replace(prompt, characters=(character,), references=references)
        return [prompt]

    def draw(self, job: Job) -> None:
        """Draw and rank candidates of the draft, and open them as a new page."""
        from pacorl.generate.generated_images import recipe_texts
        from pacorl.generate.sets import generate_sets

        prompts, draft = self.prompts(), self.draft.model_copy()
        generator, reward = self._models(job, draft.character, edits=bool(draft.sources))
        seed = draft.seed
        if seed is None:
            seed = new_seed()
        # `go_on` stops a drawing between two of its steps.
        job.enter(f"Drawing {prompts[0].theme or prompts[0].text}")
        options: dict[str, Any] = {"best_of": DRAWINGS, "judge": reward, "keep_all": True, "on_step": job.go_on}
        drawings = []
        best = 1
        for each in generate_sets(generator, prompts, seed=seed, **options):
            recipe = Recipe.model_validate(recipe_texts(each, judge=self.names.judge))
            if draft.sources:
                recipe = recipe.updated(note=each.prompt.text.rstrip("."), sources=draft.sources)
            matrix = each.judged.matrix if each.judged else ()
            if each.rank == 1:
                best = each.tied
            drawings.append((each.image, recipe.updated(tied=best if each.rank <= best else 1, matrix=matrix)))
        self._open(drawings)
        self.draft.seed = None

    def _open(self, drawings: Sequence[tuple[Image, Recipe]]) -> None:
        self.keep(page=self.folder.add_page(drawings), drawing=0)

    def restore(self, recipe: Recipe) -> None:
        """Fill the draft in from a recipe, so that the same picture is drawn first.

        Raises:
            ValueError: a source picture is missing, or the current models would draw another picture.
        """
        # A dropped file may name any path.
        if not all(inside(self.folder.path, name).is_file() for name in recipe.sources):
            raise ValueError("the picture that it changes is not here; choose Change on another one")
        edits = bool(recipe.sources)
        character = self.draft.character if edits else self.known(recipe)
        words = "\n".join([recipe.theme or recipe.prompt, *recipe.panels])
        self.change(recipe.sources, words)
        self.keep(seed=recipe.seed, character=character)
        then = {"model": recipe.model, "LoRA": recipe.adapter, "character": recipe.character, "layout": recipe.layout}
        adapters = self.spec(edits=edits).adapters_of(self.names.model, self.adapters(character, edits=edits))
        now = {"model": self.names.model, "LoRA": adapter_names(adapters), "character": "" if edits else character}
        now["layout"] = str(layout_for(len(recipe.panels) or 1))
        differing = [f"{name} {value or 'none'}" for name, value in then.items() if value != now[name]]
        if differing:
            raise ValueError(f"this page was drawn with {', '.join(differing)}, and would be another now")

    # --- an existing page -------------------------------------------------------------------------------------------

    def add_pictures(self, pictures: Sequence[tuple[Image, str]], texts: Mapping[str, str]) -> None:
        """Make a page of pictures of any program, a panel each, or of one with the texts of its recipe."""
        grid = layout_for(len(pictures))
        image = page_of([image for image, _ in pictures], grid)
        note = ", ".join([name for _, name in pictures])
        self._open([(image, Recipe.model_validate({"layout": str(grid), "note": note, **texts}))])

    def redraw(self, job: Job, drawing: Drawing, panel: int) -> None:
        """Draw one panel again some times, and rank these pages with the page before, so that none is worse."""
        from pacorl.generate.sets import best_first, judge_sets

        recipe, panels = drawing.recipe, drawing.panels
        generator, reward = self._models(job, self.known(recipe))
        draw = self._redrawing(job, generator, recipe, panels[0], seed=new_seed())
        # The present page competes too, so that no worse drawing replaces it.
        pages = [(open_image(drawing.path), recipe.updated(note="as before"))]
        changed = recipe.updated(checked=[], odd=None, note=f"panel {panel + 1} drawn again")
        job.enter(f"Drawing panel {panel + 1} again")
        for number in range(DRAWINGS):
            panels[panel], _ = draw(panel, number)
            pages.append((page_of(panels, recipe.grid), changed))
        job.enter("Comparing")
        # Whole pages are judged: a panel is consistent only with its neighbours.
        prompt = Prompt(0, recipe.prompt, theme=recipe.theme, grid=recipe.grid, panels=tuple(recipe.panels))
        with generator.judging():
            judged = judge_sets(reward.judge, [prompt] * len(pages), [image for image, _ in pages])
        ranked = []
        for place, group in enumerate(best_first(judged)):
            tied = 1 if place else len(group)
            for index in group:
                image, recipe = pages[index]
                scores = {"score": judged[index].score, "matrix": judged[index].matrix, "tied": tied}
                ranked.append((image, recipe.updated(**scores)))
        self._open(ranked)

    def check(self, job: Job, drawing: Drawing) -> None:
        """Check whether the panels of a page belong together, and redraw the odd panels.

        The verdict is in the drawing's recipe. A repaired page is a new one. Panels of another program are described
        by the draft, if it has as many; without words they are checked alone. A page without a character is repaired by
        what the draft's character was taught.
        """
        from pacorl.gate.check import check_set
        from pacorl.gate.scores import questions_about
        from pacorl.generate.repair import repair_set

        recipe, panels = drawing.recipe, drawing.panels
        if self.names.judge == TINY and recipe.model != TINY:
            raise ValueError(
                "the practice judge reads pictures of the practice model alone; choose another model above"
            )
        # A page of another program has no texts: the lines of the form describe it.
        theme, lines = self.panels
        if not recipe.panels and len(lines) == recipe.grid.count:
            recipe = recipe.updated(theme=theme, panels=lines)
        character = self.draft.character
        if not recipe.character and self.adapters(character) != self.adapters(""):
            recipe = recipe.updated(characters=[character])
        generator, reward = self._models(job, self.known(recipe))
        names = [f"panel {number}" for number in range(1, len(panels) + 1)]
        ask = partial(check_set, least=LEAST, names=names, questions=questions_about(shared_text(recipe.prompt)))

        def gate(images: Sequence[Image]) -> Check:
            job.enter("Checking")
            with generator.judging():
                return ask(reward.judge, images)

        redraw = self._redrawing(job, generator, recipe, panels[0], seed=recipe.seed + 1)
        # Without a text no panel can be drawn again, and an editor draws none from a text alone.
        most = TRIES if recipe.panels and self.spec().sets else 0
        repair = repair_set(panels, gate=gate, redraw=redraw, tries=most)
        # The verdict stays with the page that was checked, also if nothing was repaired.
        verdict = self._verdict(repair.before)
        drawing.rewrite(**verdict)
        if repair.tries:
            tries = [Recipe(note=f"Panel {each.panel + 1}: {each.verdict}") for each in repair.tries]
            drawn_by = {"characters": recipe.characters, "adapter": generator.adapter}
            verdict_after = self._verdict(repair.after)
            repaired = drawing.recipe.updated(tries=[each.note for each in tries], **drawn_by, **verdict_after)
            before = drawing.recipe.updated(note="as before", **verdict)
            pages = [(page_of(repair.images, recipe.grid), repaired.updated(note="repaired"))]
            pages.append((open_image(drawing.path), before))
            self._open([*pages, *zip((each.image for each in repair.tries), tries, strict=True)])

    def _verdict(self, check: Check) -> dict[str, Any]:
        """Return the fields that a check adds to a recipe."""
        from pacorl.gate.check import verdict_lines

        lines = verdict_lines(check, judge=shown_name(self.names.judge, "judge"))
        scores = {"score": check.scores.mean, "matrix": check.scores.matrix, "tied": 1}
        return {"checked": lines, "odd": check.odd_one_out, **scores}

    def _redrawing(self, job: Job, generator: Generator, recipe: Recipe, panel: Image, *, seed: int) -> Redraw:
        """Return the function that redraws a panel of a page from its text, in the size of `panel`."""
        from pacorl.generate.repair import panel_prompt, redraw_by

        character = self.known(recipe)
        images = self.folder.character(character).images if character else ()
        options: dict[str, Any] = {"theme": recipe.theme, "references": images}
        prompts = [panel_prompt(self.names.model, text, **options) for text in recipe.panels]
        # The practice model has a size of its own.
        size = None
        if self.names.model != TINY:
            size = generator.policy.nearest_size(Size(panel.height, panel.width))
        return redraw_by(generator, prompts, seeds=[seed] * len(prompts), size=size, on_step=job.go_on)

    # --- characters --------------------------------------------------------------------------------------------------

    def loras(self, character: str) -> Path:
        """Folder of a character's trainings; a LoRA fits one model only."""
        return self.folder.path / "loras" / re.sub(r"\W+", "-", self.names.model) / character

    def teach(self, job: Job, character: str) -> None:
        """Teach a character to the model that draws, in a process of its own, or let a stopped training go on.

        The process executes no file that a config names: the folder may be somebody else's.
        """
        self.unload()  # two generators would not fit most cards
        folder = self.folder.character_folder(character)
        training = newest_training(self.loras(character))
        if training is None or training.is_finished:
            training = Training(self.loras(character) / timestamp())
        command = ["-m", "pacorl", "train-character", str(folder), f"out={training.run}"]
        command += [*training_recipe(self.names), "--resume", "auto", "--stop-with-stdin"]
        shown = len(training.samples)

        def phase() -> str:
            nonlocal shown
            if len(training.samples) != shown:
                shown = len(training.samples)
                self.version += 1
            return f"Learning {character.replace('_', ' ')}, step {training.step}"

        run_child(job, command, {NO_USER_FILES: "1"}, phase=phase)


# --- small things ----------------------------------------------------------------------------------------------------


def run_child(job: Job, command: Sequence[str], environment: Mapping[str, str], *, phase: Callable[[], str]) -> None:
    """Run Python until it ends, or the job is stopped. Raises RuntimeError with its last line if it fails."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # Its standard input ends with this process, however that ends: a trainer saves, and stops.
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
        with start_python(*command, **pipes, env=os.environ | environment) as process:
            try:
                while process.poll() is None:
                    time.sleep(0.5)
                    job.enter(phase())
            except StoppedError:
                process.terminate()  # a trainer saves
                raise
        if process.returncode:
            log.seek(0)
            raise RuntimeError(log.read().strip().rpartition("\n")[2] or f"it ended with {process.returncode}")


def new_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def page_of(panels: Sequence[Image], grid: Grid) -> Image:
    """Join panels in one image, all at the size of the first."""
    size = panels[0].size
    return join([panel if panel.size == size else panel.resize(size, Resampling.LANCZOS) for panel in panels], grid)
