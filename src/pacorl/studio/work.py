"""The studio's work, without its page: models, and one job at a time.

Every method that takes a `Job` runs on the worker's thread (`Studio.submit`). A job that fails leaves nothing.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image, Resampling

from pacorl.config import base as configs
from pacorl.config.options import StudioModels
from pacorl.config.user_files import NO_USER_FILES
from pacorl.core.grid import join, parse_layout, shared_text, split
from pacorl.io.children import start_python
from pacorl.io.files import PRIVATE, write_atomic
from pacorl.io.images import open_image
from pacorl.judge import judge_for
from pacorl.judge.calibration import read_calibration, threshold
from pacorl.models.policies import POLICIES, kind_of, tiny_spec
from pacorl.records.compose import layout_for, prompt_from
from pacorl.records.panels import write_panels
from pacorl.studio.folder import Folder, Page, Recipe, Words
from pacorl.studio.models import JUDGE, fetch_code, memory_for, shown_name
from pacorl.studio.teaching import Training, lora_name, training_config, trainings
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Redraw, Try
    from pacorl.models.policies.spec import PolicySpec

LEAST = 0.5
"""Threshold of a check without a calibration."""
TRIES = 6
"""Most redrawn panels of a repair."""
PATIENCE = 10.0
"""Seconds for a stopping trainer to save; a kill afterwards loses what came after its last checkpoint."""

Drawn = list[tuple[Image, Recipe]]


class BusyError(ValueError):
    """Other work has the machine."""


class StoppedError(Exception):
    """Raised inside a job that a person stopped."""


@dataclass(slots=True)
class Job:
    """The work that runs, or the last one."""

    name: str
    phase: str = ""
    done: int = 0
    total: int = 0
    error: str = ""
    ended: bool = False
    stopped: bool = False
    shown: list[tuple[Image | Path, str]] = field(default_factory=list)
    """Images of unfinished work, with their captions."""

    def enter(self, phase: str, total: int = 0) -> None:
        self.phase, self.done, self.total = phase, 0, total
        self.advance(0)

    def advance(self, count: int) -> None:
        """Count progress. Raises StoppedError if a person stopped the job."""
        self.done += count
        if self.stopped:
            raise StoppedError


class Studio:
    """One person's studio: folder, draft, models, and the job that runs."""

    def __init__(self, folder: Path, names: StudioModels | None = None) -> None:
        self.folder = Folder(folder)
        self.draft = draft = self.folder.read_draft()
        self._kept = draft.model_dump()
        self.names = names or StudioModels()
        # The models of the last time, unless the command names others.
        if self.names == StudioModels() and draft.model:
            self.names = replace(
                self.names, model=draft.model, editor=draft.editor, judge=draft.judge, loras=draft.loras
            )
        self.calibration = read_calibration(self.names.calibration or "")
        self.job = Job("", ended=True)
        self.version = 0
        """Counts changes, so that every open window shows them."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._generator: tuple[StudioModels, Generator] | None = None
        self._reward: tuple[str, PacoReward] | None = None

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
        self.save()

    def save(self) -> None:
        """Write the draft if it has changed: fields of the page are bound to it."""
        document = self.draft.model_dump()
        if document != self._kept:
            self.folder.keep_draft(self.draft)
            self._kept = document

    def submit(self, name: str, work: Callable[[Job], object]) -> Job:
        """Start a job. Raises BusyError while another one runs."""
        self._check_idle()
        self.job = job = Job(name)

        def run() -> None:
            try:
                work(job)
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

    def _check_idle(self) -> None:
        if not self.job.ended:
            raise BusyError(f"{self.job.name} is under way; stop it, or wait")

    # --- models ------------------------------------------------------------------------------------------------------

    def choose(self, names: StudioModels) -> None:
        """Draw with other models from now on; the next job loads them."""
        self._check_idle()
        # The practice judge knows pictures of the practice model alone.
        judges = {JUDGE: TINY} if names.model == TINY else {TINY: JUDGE}
        self.unload()
        self.names = replace(names, judge=judges.get(names.judge, names.judge))
        self.keep(model=names.model, editor=names.editor, judge=self.names.judge, loras=dict(names.strengths))

    def use(self, name: str, does: str = "draws") -> None:
        """Choose one model: to draw, to change pictures, or to judge. Raises ValueError for no model."""
        names = self.names
        if does == "judges":
            names = replace(names, judge=name)
        elif does == "changes pictures":
            names = replace(names, editor=name)
        elif not name:
            raise ValueError("name a file or a folder of a model")
        else:
            POLICIES.named(kind_of(name)).check_source(name)
            names = replace(names, model=name, kind="", adapter="", loras={})  # a LoRA belongs to its model
        self.choose(names)

    def unload(self) -> None:
        if self._reward:
            self._reward[1].close()
        self._generator = self._reward = None

    @property
    def spec(self) -> PolicySpec:
        """Kind of the model that draws."""
        return POLICIES.named(self.names.kind or kind_of(self.names.model))

    @property
    def editor(self) -> str:
        """The model that changes pictures; empty if there is none."""
        return self.names.model if self.spec.edits else self.names.editor or (TINY if self.names.model == TINY else "")

    def _models(self, job: Job, *, edits: bool = False) -> tuple[Generator, PacoReward]:
        """Load the generator, or the editor, and the judge; the last ones stay loaded."""
        from pacorl.gate.paco_reward import PacoReward
        from pacorl.generate.generator import Generator
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        names = self.names
        if edits and not self.spec.edits:
            if not self.editor:
                raise ValueError(f"{names.model} draws from words and changes no picture; choose an editor above")
            # LoRAs belong to the model that draws. The practice editor has one that keeps a hero.
            loras = dict.fromkeys(tiny_spec(edits=True).committed.adapters, 1.0) if self.editor == TINY else {}
            kind = kind_of(self.editor, edits=True)
            names = replace(names, model=self.editor, kind=kind, adapter="", loras=loras)
        judge = judge_for(names.judge, edits=edits)
        if self._generator and self._reward and self._generator[0] == names and self._reward[0] == judge:
            return self._generator[1], self._reward[1]

        job.enter("Loading the models")
        self.unload()
        use_cores()
        quiet_loading()
        fitted = replace(names, memory=memory_for(names))
        kind = names.kind or kind_of(names.model)
        adapter = dict(names.strengths)
        generator = Generator.from_pretrained(names.model, kind=kind, adapter=adapter, memory=fitted.memory)
        with generator.judging():
            access = fitted.judge_access | {"calibration": (names.calibration or "") if judge == names.judge else ""}
            reward = PacoReward.from_pretrained(judge, **access)
        generator.judged_by(reward.judge)
        self._generator, self._reward = (names, generator), (judge, reward)
        return generator, reward

    def download(self, name: str, *, token: str = "") -> None:
        """Fetch a model into the hub's cache; an interrupted download goes on where it stopped.

        Args:
            token: of a gated model's user; never written, and never an argument, which all users could read.
        """
        environment = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"} | ({"HF_TOKEN": token} if token else {})
        command = ["-c", fetch_code(name)]
        self.submit(f"Downloading {name}", partial(run_child, command=command, environment=environment))

    # --- drawing -----------------------------------------------------------------------------------------------------

    def unfold(self) -> str:
        """Write the panels of the draft's sentence, unless they were; returns what the writer has to say about it."""
        from pacorl.generate.language_writers import open_writer

        draft = self.draft
        if draft.panels and draft.unfolded == draft.sentence:
            return ""
        sentence = draft.sentence
        cast = {name.replace("_", " "): self.folder.character(name, least=0).text for name in self.folder.characters()}
        for name in sorted(cast, key=len, reverse=True):
            sentence = sentence.replace(name, cast[name])
        written = write_panels(sentence, writer=open_writer(self.names.writer))
        panels = [text.removeprefix(f"{written.theme}, ") for text in written.panels]
        self.keep(theme=written.theme, panels=panels, unfolded=draft.sentence, layout="")
        return written.note

    def prompt(self) -> Prompt:
        """Build the prompt of the draft. Raises ValueError naming what the model does not know."""
        draft = self.draft
        if draft.sources:
            if not draft.sentence.strip():
                raise ValueError("say what shall change in the picture")
            return Prompt(0, draft.sentence.strip(), sources=tuple(map(self.folder.source, draft.sources)))
        panels = [text for text in draft.panels if text.strip()]
        grid = parse_layout(draft.layout) if draft.layout else None
        if grid and grid.count != len(panels):  # a line was added
            grid = None
        prompt = prompt_from(self.names.model, theme=draft.theme, panels=panels, grid=grid)
        most = self.spec.policy.max_references
        if draft.character and most:
            character = self.folder.character(draft.character)
            prompt = replace(prompt, characters=(character,), references=character.images[:most])
        return prompt

    def draw(self, job: Job) -> None:
        """Draw and rank candidates of the draft, and open them as a new page."""
        prompt = self.prompt()
        recipe = Recipe.model_validate(self.draft.model_dump(include={*Words.model_fields}))
        panels = [prompt.text] if prompt.sources else [text for text in recipe.panels if text.strip()]
        drawn = {"prompt": prompt.text, "panels": panels, "layout": str(prompt.grid)}
        models = {"model": self.names.model, "loras": dict(self.names.strengths)}
        if prompt.sources:
            models = {"model": self.editor}
        recipe = recipe.model_copy(update=drawn | models)
        before = open_image(prompt.sources[0]) if prompt.sources else None
        self._open(self.folder.add_page(self._drawn(job, prompt, recipe, seed=recipe.seed), before=before))

    def draw_sheet(self, job: Job, name: str, lines: Sequence[str]) -> None:
        """Draw pictures of a character by edits of its own; every line becomes a page, the best candidate first."""
        most = POLICIES[kind_of(self.editor, edits=True)].policy.max_sources if self.editor else 1
        images = self.folder.character(name).images[:most]
        digests = [self.folder.add_source(open_image(path)) for path in images]
        pages = []
        for line in lines:
            prompt = Prompt(0, line, sources=tuple(map(self.folder.source, digests)))
            recipe = Recipe(sentence=line, panels=[line], layout="1x1", prompt=line, character=name, sources=digests)
            recipe = recipe.model_copy(update={"model": self.editor, "note": f"sheet of {name}"})
            pages.append(self._drawn(job, prompt, recipe))
        for page in pages:
            self.folder.add_page(page)

    def _drawn(self, job: Job, prompt: Prompt, recipe: Recipe, *, seed: int | None = None) -> Drawn:
        """Draw candidates of a prompt, and rank them."""
        generator, _ = self._models(job, edits=bool(prompt.sources))
        count = self.draft.candidates
        first = new_seed() if seed is None else seed
        job.enter(f"Drawing {recipe.name}", generator.default_steps * count)
        images = generator.sample([prompt] * count, range(first, first + count), on_step=job.advance)
        recipes = [recipe.model_copy(update={"seed": first + number}) for number in range(count)]
        return self._ranked(job, prompt, list(zip(images, recipes, strict=True)))

    def _ranked(self, job: Job, prompt: Prompt, drawn: Drawn) -> Drawn:
        """Rank images of one prompt, the best first; a single picture belongs with nothing, and has no rank."""
        from pacorl.generate.sets import best_first, judge_prompts

        if prompt.grid.count == 1 and not prompt.sources:
            return drawn
        job.enter("Comparing")
        generator, reward = self._models(job, edits=bool(prompt.sources))
        with generator.judging():
            judged = judge_prompts(reward.judge, [prompt] * len(drawn), [image for image, _ in drawn])
        ranked: Drawn = []
        for group in best_first(judged):
            for index in group:
                image, recipe = drawn[index]
                answer = judged[index]
                matrix = [list(row) for row in answer.matrix]
                scores = {"score": answer.score, "matrix": matrix, "parts": dict(answer.parts), "judge": reward.name}
                place = {"rank": len(ranked) + 1, "tied": len(group)}
                ranked.append((image, recipe.model_copy(update=scores | place)))
        return ranked

    def _open(self, page: Page) -> Page:
        self.keep(page=page.number, candidate=0)
        return page

    def restore(self, recipe: Recipe) -> list[str]:
        """Fill the draft in from a recipe; returns how the models of now differ from the recipe's."""
        missing = [digest for digest in recipe.sources if not self.folder.source(digest).is_file()]
        if missing:
            raise ValueError(f"{len(missing)} of the pictures that it changes are not here any more; add them again")
        sentence = recipe.sentence or recipe.prompt
        is_here = recipe.character in self.folder.characters()
        words = {**recipe.model_dump(include={*Words.model_fields}), "sentence": sentence, "unfolded": sentence}
        self.keep(**words | {"character": recipe.character if is_here else ""})
        differing = []
        own = self.editor if recipe.sources else self.names.model
        if recipe.model and recipe.model != own:
            differing.append(f"drawn by {recipe.model}")
        if not recipe.sources and recipe.loras != dict(self.names.strengths):
            differing.append(f"with {lora_text(recipe.loras) or 'no LoRA'}")
        if recipe.character and not is_here:
            differing.append(f"of {recipe.character}, who is not here")
        return differing

    # --- a page that is there ----------------------------------------------------------------------------------------

    def add_pictures(self, pictures: Sequence[tuple[Image, str]]) -> Page:
        """Make a page of pictures of any program, a panel each."""
        grid = layout_for(len(pictures)) if len(pictures) > 1 else Grid(1, 1)
        image = page_of([image for image, _ in pictures], grid)
        recipe = Recipe(layout=str(grid), panels=[""] * grid.count, note=", ".join(name for _, name in pictures))
        return self._open(self.folder.add_page([(image, recipe)]))

    def cut(self, page: Page, layout: str) -> None:
        """Say how a picture of another program is cut into panels."""
        image = open_image(page.candidates[0])
        panels = split(image, parse_layout(layout))  # refuses a picture with fewer pixels than panels
        recipe = page.recipes[0].model_copy(update={"layout": layout, "panels": [""] * len(panels)})
        self.folder.keep_recipe(page, 0, recipe, image)
        self.version += 1

    def redraw(self, job: Job, page: Page, candidate: int, panel: int) -> None:
        """Draw one panel again some times; the new page is the best of these and of the page before."""
        before, recipe = open_image(page.candidates[candidate]), page.recipes[candidate]
        panels = split(before, recipe.grid)
        draw = self._redrawing(job, recipe, panels, seed=new_seed())
        drawn = [(before, recipe.model_copy(update={"note": "as before"}))]
        for number in range(self.draft.candidates):
            job.enter(f"Drawing panel {panel + 1} again, {number + 1} of {self.draft.candidates}")
            redrawn = draw(panel, number)
            assert redrawn  # a generator always draws
            said: dict[str, Any] = {"note": f"panel {panel + 1} redrawn", "verdict": [], "odd": None}
            changed = page_of([*panels[:panel], redrawn[0], *panels[panel + 1 :]], recipe.grid)
            drawn.append((changed, recipe.model_copy(update=said)))
        prompt = Prompt(0, recipe.prompt, theme=recipe.theme, grid=recipe.grid, panels=tuple(recipe.panels))
        self._open(self.folder.add_page(self._ranked(job, prompt, drawn), before=before))

    def check(self, job: Job, page: Page, candidate: int) -> None:
        """Check whether the panels of a page belong together, and redraw the ones that do not.

        The verdict is in the page's recipe. A repaired page is a new one. Panels of another program are described by
        the draft, if it has as many; without words they are checked alone.
        """
        from pacorl.gate.check import ControlError
        from pacorl.generate.repair import repair_set

        recipe, before = page.recipes[candidate], open_image(page.candidates[candidate])
        if self.names.judge == TINY and recipe.model != TINY:
            raise ValueError("the practice judge knows pictures of the practice model alone; choose another above")
        if not any(recipe.panels) and len(self.draft.panels) == recipe.grid.count:
            recipe = recipe.model_copy(update={"theme": self.draft.theme, "panels": self.draft.panels})
        images = split(before, recipe.grid)
        tries = TRIES if self.spec.sets and all(text.strip() for text in recipe.panels) else 0
        gate = self._gate(job, recipe, len(images))
        draw = self._redrawing(job, recipe, images, seed=(recipe.seed or 0) + 1) if tries else None

        def redraw(panel: int, number: int) -> tuple[Image, Mapping[str, str]] | None:
            job.enter(f"Redrawing panel {panel + 1}, try {number} of {TRIES}")
            return draw(panel, number) if draw else None

        def show(attempt: Try) -> None:
            job.shown = [*job.shown, (attempt.image, words_of(attempt))]

        try:
            repair = repair_set(images, gate=gate, redraw=redraw, tries=tries, on_try=show)
        except ControlError as fault:
            raise ValueError(f"{self.names.judge} cannot read these pictures: {fault}") from None
        checked = recipe.model_copy(update=self._verdict(repair.before))
        self.folder.keep_recipe(page, candidate, checked, before)
        if repair.tries:
            repaired = {"note": "repaired", "tries": [*map(words_of, repair.tries)], "rank": 1, "tied": 1}
            scores = {"score": repair.after.scores.mean, "matrix": [list(row) for row in repair.after.scores.matrix]}
            recipe = recipe.model_copy(update=repaired | scores | self._verdict(repair.after))
            drawn = [attempt.image for attempt in repair.tries]
            image = page_of(repair.images, recipe.grid)
            self._open(self.folder.add_page([(image, recipe)], before=before, tries=drawn))

    def _gate(self, job: Job, recipe: Recipe, count: int) -> Callable[[Sequence[Image]], Check]:
        """Return the check of a page's panels."""
        from pacorl.gate.check import check_set
        from pacorl.gate.scores import questions_about

        generator, reward = self._models(job)
        # A calibration's thresholds are for the plain question.
        theme = "" if self.calibration else shared_text(recipe.prompt)
        least = threshold(self.calibration, None if self.calibration else LEAST, panels=count)
        questions = questions_about(theme)
        names = [f"panel {number}" for number in range(1, count + 1)]

        def gate(panels: Sequence[Image]) -> Check:
            job.enter("Checking")
            with generator.judging():
                return check_set(reward.judge, panels, least=least, names=names, questions=questions)

        return gate

    def _verdict(self, check: Check) -> dict[str, Any]:
        from pacorl.gate.check import verdict_lines

        return {
            "verdict": verdict_lines(check, judge=shown_name(self.names.judge, "judge")),
            "odd": check.odd_one_out,
            "judge": self.names.judge,
        }

    def _redrawing(self, job: Job, recipe: Recipe, panels: Sequence[Image], *, seed: int) -> Redraw:
        """Return what draws a panel of a page again, from its text."""
        from pacorl.generate.repair import panel_prompt, redraw_by

        generator, _ = self._models(job)
        model, kind = self.names.model, self.names.kind
        if not self.spec.sets:
            raise ValueError(f"{model} changes pictures and draws none from words; choose another model")
        references: tuple[Path, ...] = ()
        if recipe.character and self.spec.policy.max_references:
            references = self.folder.character(recipe.character).images
        prompts = [
            panel_prompt(model, text, theme=recipe.theme, kind=kind, references=references) for text in recipe.panels
        ]
        # The practice model has a size of its own.
        wanted = Size(panels[0].height, panels[0].width)
        size = None if model == TINY else generator.policy.nearest_size(wanted)
        return redraw_by(generator, prompts, seeds=[seed] * len(prompts), size=size, on_step=job.advance)

    # --- characters --------------------------------------------------------------------------------------------------

    @property
    def loras(self) -> Path:
        return self.folder.path / "loras"

    def lora_sources(self) -> list[str]:
        """List the LoRAs that were taught here."""
        listed = [training for name in self.folder.characters() for training in trainings(self.loras, name)]
        return [str(training.lora) for training in listed if training.lora]

    def teach(self, job: Job, name: str, *, steps: int | None = None) -> None:
        """Teach a character to the model that draws, in a process of its own, or let a stopped training go on.

        The process executes no file that a config names: the folder may be somebody else's.
        """
        job.enter("Looking at the pictures")
        self.unload()  # two generators would not fit most cards
        source = self.folder.character_folder(name)
        training = next(reversed(trainings(self.loras, name)), Training(self.loras / name / "0"))
        config = training_config(self.names, source, training.run, steps=steps)
        if training.is_finished or training.config != configs.dump(config):
            training = Training(self.loras / name / str(int(training.folder.name) + 1))
            config = config.model_copy(update={"out": training.run})
            write_atomic(training.folder / "config.yaml", configs.dump(config), mode=PRIVATE)
        job.enter(f"Learning {name.replace('_', ' ')}", config.steps)

        def watch() -> None:
            if training.step != job.done:
                job.done = training.step
                job.shown = [(after, text) for text, _, after in training.samples if after.is_file()]

        command = ["-m", "pacorl", "train-character", str(source), "--config", str(training.folder / "config.yaml")]
        command += ["--resume", "auto", "--stop-with-stdin"]
        run_child(job, command, environment={NO_USER_FILES: "1"}, watch=watch)


# --- small things ----------------------------------------------------------------------------------------------------


def run_child(
    job: Job, command: Sequence[str], *, environment: Mapping[str, str], watch: Callable[[], object] = lambda: None
) -> None:
    """Run Python with these arguments until it ends or the job is stopped. Raises RuntimeError if it fails."""
    with tempfile.TemporaryFile() as log:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
        # Standard input closes with this process, however that ends, and a trainer watches it.
        with start_python(*command, **pipes, env=os.environ | environment) as process:
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    watch()
                    job.advance(0)
            except BaseException:
                process.terminate()  # a trainer saves
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:  # it still loads, or learns
                    process.kill()
                raise
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1][:400] if lines else f"it ended with status {process.returncode}")


def new_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def page_of(panels: Sequence[Image], grid: Grid) -> Image:
    """Join panels in one image, all at the size of the first."""
    size = panels[0].size
    return join([panel if panel.size == size else panel.resize(size, Resampling.LANCZOS) for panel in panels], grid)


def lora_text(loras: Mapping[str, float]) -> str:
    """Name LoRAs with their strengths."""
    return ", ".join(f"{lora_name(source)} {strength:g}" for source, strength in loras.items())


def words_of(attempt: Try) -> str:
    return f"Panel {attempt.panel + 1}: {attempt.verdict}"
