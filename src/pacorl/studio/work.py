"""The studio's work, without its page: models, and one job at a time.

Every method that takes a `Job` runs on the worker's thread (`Studio.submit`). A job that fails leaves nothing.
"""

from __future__ import annotations

import logging
import os
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image, Resampling

from pacorl.config.options import StudioModels
from pacorl.config.user_files import NO_USER_FILES
from pacorl.core.grid import join, parse_layout, shared_text, split
from pacorl.io.children import start_python
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.judge.calibration import read_calibration, threshold
from pacorl.models.adapters import adapter_names
from pacorl.models.policies import POLICIES, kind_of
from pacorl.records.compose import layout_for, prompt_from
from pacorl.records.panels import write_panels
from pacorl.studio.folder import Drawing, Folder, Recipe, Texts, json_texts, timestamp
from pacorl.studio.teaching import Training, newest_training, training_recipe
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Redraw

LEAST = 0.5
"""Threshold of a check without a calibration."""
DRAWINGS = 4
"""Drawings of a page or a panel, of which the best comes first."""
TRIES = 6
"""Most redrawn panels of a repair."""
PRACTICE_STRENGTH = 0.5
"""Strength of a LoRA of the practice model, which learns single pictures and draws pages."""


class StoppedError(Exception):
    """Raised inside a job that a person stopped."""


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
        """Raise StoppedError if a person stopped the job; `images` is what a generator calls it with."""
        if self.stopped:
            raise StoppedError


class Studio:
    """One person's studio: folder, draft, models, and the job that runs."""

    def __init__(self, folder: Path, names: StudioModels | None = None) -> None:
        self.folder = Folder(folder)
        self.draft = self.folder.read_draft()
        self._kept = self.draft.model_dump()
        self.names = names or StudioModels()
        self.spec = POLICIES.named(self.names.kind or kind_of(self.names.model))
        self.calibration = read_calibration(self.names.calibration or "")
        self.job = Job("", ended=True)
        self.version = 0
        """Counts changes, so that every open window shows them."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._loaded: tuple[dict[str, float], Generator, PacoReward] | None = None
        """The adapters of the loaded generator, the generator, and the judge."""

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

    def save(self) -> None:
        """Write the draft if it has changed: fields of the page are bound to it."""
        document = self.draft.model_dump()
        if document != self._kept:
            self.folder.keep_draft(self.draft)
            self._kept = document

    def submit(self, work: Callable[[Job], object]) -> Job:
        """Start a job. Raises ValueError while another one runs."""
        if not self.job.ended:
            raise ValueError(f"{self.job.phase} is under way; stop it, or wait")
        self.job = job = Job("Beginning")

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

    # --- models ------------------------------------------------------------------------------------------------------

    def unload(self) -> None:
        if self._loaded:
            self._loaded[2].close()
        self._loaded = None

    def adapters(self, character: str) -> dict[str, float]:
        """List the LoRAs that draw a character with their strengths: the command's, and what was learned of it."""
        adapters = {self.names.adapter: 1.0} if self.names.adapter else {}
        training = newest_training(self.loras(character)) if character else None
        if training and training.is_finished:
            adapters[str(training.lora)] = PRACTICE_STRENGTH if self.names.model == TINY else 1.0
        return adapters

    def known(self, recipe: Recipe) -> str:
        """Return the character of a recipe; empty if it is not here."""
        return recipe.character if recipe.character in self.folder.characters() else ""

    def _models(self, job: Job, character: str) -> tuple[Generator, PacoReward]:
        """Load the generator with a character's LoRA, and the judge; the last ones stay loaded."""
        from pacorl.gate.paco_reward import PacoReward
        from pacorl.generate.generator import Generator
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        names, adapters = self.names, self.adapters(character)
        if self._loaded and self._loaded[0] == adapters:
            return self._loaded[1:]
        job.enter("Loading the models")
        self.unload()
        use_cores()
        quiet_loading()
        generator = Generator.from_pretrained(names.model, kind=names.kind, adapter=adapters, memory=names.memory)
        with generator.judging():
            reward = PacoReward.from_pretrained(names.judge, **names.judge_access)
        generator.judged_by(reward.judge)
        self._loaded = (adapters, generator, reward)
        return generator, reward

    # --- drawing -----------------------------------------------------------------------------------------------------

    def unfold(self) -> None:
        """Write the panels of the draft's sentence, unless they were. Raises ValueError for no such sentence."""
        from pacorl.generate.language_writers import open_writer

        draft = self.draft
        if draft.panels and draft.unfolded == draft.sentence:
            return
        sentence, name = draft.sentence, draft.character
        if name:
            text = self.folder.character(name, least=0).text
            # A LoRA learned the name too; the practice model knows no names.
            described = text if self.names.model == TINY else f"{name}, {text}"
            sentence = sentence.replace(name.replace("_", " "), described)
        written = write_panels(sentence, writer=open_writer(self.names.writer))
        panels = [text.removeprefix(f"{written.theme}, ") for text in written.panels]
        self.keep(theme=written.theme, panels=panels, unfolded=draft.sentence, layout="")

    def prompt(self) -> Prompt:
        """Build the prompt of the draft. Raises ValueError naming what the model does not know."""
        draft = self.draft
        panels = [text for text in draft.panels if text.strip()]
        grid = parse_layout(draft.layout) if draft.layout else None
        if grid and grid.count != len(panels):  # a line was added
            grid = None
        prompt = prompt_from(self.names.model, theme=draft.theme, panels=panels, grid=grid)
        if draft.character:
            character = self.folder.character(draft.character)
            references = character.images[: self.spec.policy.max_references]
            prompt = replace(prompt, characters=(character,), references=references)
        return prompt

    def draw(self, job: Job) -> None:
        """Draw and rank candidates of the draft, and open them as a new page."""
        from pacorl.generate.generated_images import recipe_texts
        from pacorl.generate.sets import generate_sets

        prompt, draft = self.prompt(), self.draft.model_copy()
        generator, reward = self._models(job, draft.character)
        job.enter(f"Drawing {prompt.theme}")
        seed = new_seed() if draft.seed is None else draft.seed
        made = generate_sets(generator, prompt, seed=seed, count=DRAWINGS, on_step=job.go_on)
        drawn = [(each.image, recipe_texts(each) | {"sentence": draft.sentence}) for each in made]
        self._open_ranked(job, prompt, drawn, generator, reward)
        self.draft.seed = None

    def _open_ranked(
        self, job: Job, prompt: Prompt, drawn: Sequence[tuple[Image, Texts]], generator: Generator, reward: PacoReward
    ) -> None:
        """Open a new page of drawings, the best first; a single picture belongs with nothing, and has no rank."""
        from pacorl.generate.sets import best_first, judge_sets

        ranked = list(drawn)
        if prompt.grid.count > 1:
            job.enter("Comparing")
            with generator.judging():
                judged = judge_sets(reward.judge, [prompt] * len(drawn), [image for image, _ in drawn])
            ranked = []
            for group in best_first(judged):
                for index in group:
                    image, texts = drawn[index]
                    ranked.append((image, {**texts, **json_texts(score=judged[index].score, tied=len(group))}))
        self._open(ranked)

    def _open(self, drawings: Sequence[tuple[Image, Texts]]) -> None:
        self.keep(page=self.folder.add_page(drawings), drawing=0)

    def restore(self, recipe: Recipe) -> list[str]:
        """Fill the draft in from a recipe; returns what was different then, so that another picture would be drawn."""
        character = self.known(recipe)
        sentence = recipe.sentence or recipe.prompt
        words = {name: getattr(recipe, name) for name in ("theme", "panels", "layout", "seed")}
        self.keep(**words, sentence=sentence, unfolded=sentence, character=character)
        then = {"model": recipe.model, "LoRA": recipe.adapter, "character": recipe.character}
        chosen = self.spec.adapters_of(self.names.model, self.adapters(character))
        now = {"model": self.names.model, "LoRA": adapter_names(chosen), "character": character}
        return [f"{name} {value or 'none'}" for name, value in then.items() if value != now[name]]

    # --- a page that is there ----------------------------------------------------------------------------------------

    def add_pictures(self, pictures: Sequence[tuple[Image, str]], texts: Texts) -> None:
        """Make a page of pictures of any program, a panel each, or of one with the texts of its recipe."""
        grid = layout_for(len(pictures))
        image = page_of([image for image, _ in pictures], grid)
        self._open([(image, {"layout": str(grid), "note": ", ".join(name for _, name in pictures), **texts})])

    def rewrite(self, drawing: Drawing, **changes: str) -> None:
        """Write a drawing again, with other texts."""
        write_atomic(drawing.path, png_bytes(open_image(drawing.path), {**drawing.texts, **changes}))
        self.version += 1

    def redraw(self, job: Job, drawing: Drawing, panel: int) -> None:
        """Draw one panel again some times, and rank these pages with the page before."""
        recipe, before = drawing.recipe, open_image(drawing.path)
        panels = split(before, recipe.grid)
        generator, reward = self._models(job, self.known(recipe))
        draw = self._redrawing(job, recipe, panels, seed=new_seed())
        drawn = [(before, {**drawing.texts, "note": "as before"})]
        texts = {**drawing.texts, **json_texts(checked=[], odd=None), "note": f"panel {panel + 1} drawn again"}
        for number in range(DRAWINGS):
            job.enter(f"Drawing panel {panel + 1} again, {number + 1} of {DRAWINGS}")
            redrawn = draw(panel, number)
            assert redrawn  # a generator always draws
            drawn.append((page_of([*panels[:panel], redrawn[0], *panels[panel + 1 :]], recipe.grid), texts))
        prompt = Prompt(0, recipe.prompt, theme=recipe.theme, grid=recipe.grid, panels=tuple(recipe.panels))
        self._open_ranked(job, prompt, drawn, generator, reward)

    def check(self, job: Job, drawing: Drawing) -> None:
        """Check whether the panels of a page belong together, and redraw the ones that do not.

        The verdict is in the drawing's recipe. A repaired page is a new one. Panels of another program are described
        by the draft, if it has as many; without words they are checked alone.
        """
        from pacorl.gate.check import check_set
        from pacorl.gate.scores import questions_about
        from pacorl.generate.repair import repair_set

        recipe, before = drawing.recipe, open_image(drawing.path)
        if self.names.judge == TINY and recipe.model != TINY:
            raise ValueError("the practice judge knows pictures of the practice model alone; start with --judge")
        if not recipe.panels and len(self.draft.panels) == recipe.grid.count:
            recipe = recipe.model_copy(update={"theme": self.draft.theme, "panels": self.draft.panels})
        panels = split(before, recipe.grid)
        generator, reward = self._models(job, self.known(recipe))
        # A calibration's thresholds are for the plain question.
        theme = "" if self.calibration else shared_text(recipe.prompt)
        options: dict[str, Any] = {
            "least": threshold(self.calibration, None if self.calibration else LEAST, panels=len(panels)),
            "names": [f"panel {number}" for number in range(1, len(panels) + 1)],
            "questions": questions_about(theme),
        }

        def gate(images: Sequence[Image]) -> Check:
            job.enter("Checking")
            with generator.judging():
                return check_set(reward.judge, images, **options)

        redraw = self._redrawing(job, recipe, panels, seed=recipe.seed + 1)
        tries = TRIES if recipe.panels else 0
        repair = repair_set(panels, gate=gate, redraw=redraw, tries=tries)
        self.rewrite(drawing, **self._verdict(repair.before))
        if repair.tries:
            texts = {**drawing.texts, "note": "repaired", **self._verdict(repair.after)}
            drawings: list[tuple[Image, Texts]] = [(page_of(repair.images, recipe.grid), texts)]
            drawings.append((before, {**drawing.texts, "note": "as before", **self._verdict(repair.before)}))
            drawings += [(each.image, {"note": f"Panel {each.panel + 1}: {each.verdict}"}) for each in repair.tries]
            self._open(drawings)

    def _verdict(self, check: Check) -> dict[str, str]:
        from pacorl.gate.check import verdict_lines

        lines = verdict_lines(check, judge=shown_name(self.names.judge, "judge"))
        return json_texts(checked=lines, odd=check.odd_one_out, score=check.scores.mean, tied=1)

    def _redrawing(self, job: Job, recipe: Recipe, panels: Sequence[Image], *, seed: int) -> Redraw:
        """Return what draws a panel of a page again, from its text."""
        from pacorl.generate.repair import panel_prompt, redraw_by

        character = self.known(recipe)
        generator, _ = self._models(job, character)
        images = self.folder.character(character).images if character else ()
        options: dict[str, Any] = {"theme": recipe.theme, "kind": self.names.kind, "references": images}
        prompts = [panel_prompt(self.names.model, text, **options) for text in recipe.panels]
        # The practice model has a size of its own.
        wanted = Size(panels[0].height, panels[0].width)
        size = None if self.names.model == TINY else generator.policy.nearest_size(wanted)
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
        environment = os.environ | {NO_USER_FILES: "1"}
        with tempfile.TemporaryFile() as log:
            # Its standard input ends with the inner block, or with this process: it saves, and stops.
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
            samples = training.samples
            with start_python(*command, **pipes, env=environment) as process:
                while process.poll() is None:
                    time.sleep(0.5)
                    job.enter(f"Learning {character.replace('_', ' ')}, step {training.step}")
                    if training.samples != samples:
                        samples = training.samples
                        self.version += 1
            if process.returncode:
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()
                raise RuntimeError(lines[-1][:400] if lines else f"it ended with status {process.returncode}")


# --- small things ----------------------------------------------------------------------------------------------------


def new_seed() -> int:
    return random.SystemRandom().randrange(2**31)


def page_of(panels: Sequence[Image], grid: Grid) -> Image:
    """Join panels in one image, all at the size of the first."""
    size = panels[0].size
    return join([panel if panel.size == size else panel.resize(size, Resampling.LANCZOS) for panel in panels], grid)


def shown_name(model: str, kind: str = "model") -> str:
    """Name a model for a person."""
    return f"the practice {kind}" if model == TINY else model
