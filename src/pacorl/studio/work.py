"""The studio's work, without its page: models, and one job at a time.

Every method that draws or judges runs on the worker's thread (`Studio.submit`). A job that fails leaves nothing.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image, Resampling

from pacorl.config.options import StudioModels, UsageError
from pacorl.core.grid import join, parse_layout, shared_text, split
from pacorl.io.images import open_image
from pacorl.judge import default_judge, judge_for
from pacorl.judge.calibration import read_calibration, threshold
from pacorl.models.policies import POLICIES, kind_of, tiny_spec
from pacorl.records.compose import compose, layout_for, prompt_from
from pacorl.records.panels import write_panels
from pacorl.studio.folder import Draft, Folder, Page, Recipe, Removed, TryLine, Verdict
from pacorl.studio.models import memory_for
from pacorl.studio.teaching import Teacher
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import GeneratedImage
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Try
    from pacorl.models.policies.spec import PolicySpec

LEAST = 0.5
"""Threshold of a check without a calibration."""
TRIES = 6
"""Most redrawn panels of a repair."""


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
    shown: list[tuple[Image, str]] = field(default_factory=list)
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
    """One person's studio: folder, models, draft, the job that runs and the training that runs."""

    def __init__(self, folder: Path, names: StudioModels | None = None) -> None:
        self.folder = Folder(folder)
        self.draft = draft = self.folder.draft
        self.names = names or StudioModels()
        # The models of the last time, unless the command names others.
        if self.names == StudioModels() and draft.model:
            chosen = replace(self.names, model=draft.model, editor=draft.editor)
            self.names = replace(chosen, judge=draft.judge, loras=draft.loras)
        self.calibration = read_calibration(self.names.calibration or "")
        self.job = Job("", ended=True)
        self.version = 0
        """Counts changes, so that every open window shows them."""
        self.removed: Removed | None = None
        """What was removed last, for its undo."""
        self.teacher = Teacher(self.folder)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._lock = threading.Lock()
        self._generator: tuple[StudioModels, Generator] | None = None
        self._reward: tuple[str, PacoReward] | None = None

    def close(self) -> None:
        self.job.stopped = True
        self.teacher.stop()
        self._worker.shutdown(wait=True)
        self.unload()
        self.folder.close()

    def keep(self, **changes: Any) -> None:
        """Change the draft and keep it."""
        self.draft = Draft.model_validate(self.draft.model_dump() | changes)
        self.folder.keep_draft(self.draft)
        self.version += 1

    def submit(self, name: str, work: Callable[[Job], object]) -> Job:
        """Start a job. Raises BusyError while another one, or a training, runs."""
        with self._lock:
            self._check_idle()
            if self.teacher.name:
                raise BusyError(f"{self.teacher.name} is being taught and has the machine; stop it, it can go on later")
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

    def remove(self, what: str, *paths: Path) -> None:
        """Move files into the trash; `undo` brings the last ones back."""
        self.removed = self.folder.remove(what, *paths)
        self.version += 1

    def undo(self) -> None:
        if self.removed:
            self.folder.undo(self.removed)
            self.removed = None
            self.version += 1

    # --- models ------------------------------------------------------------------------------------------------------

    def choose(self, names: StudioModels) -> None:
        """Draw with other models from now on; the next job loads them."""
        self._check_idle()
        if names.model != TINY and names.judge == TINY:
            raise ValueError("the practice judge knows pictures of the practice model alone; choose another judge")
        self.unload()
        self.names = names
        self.keep(model=names.model, editor=names.editor, judge=names.judge, loras=dict(names.strengths))

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

    # --- drawing -----------------------------------------------------------------------------------------------------

    def unfold(self) -> str:
        """Write the panels of the draft's sentence, unless they were; returns what the writer has to say about it."""
        from pacorl.generate.language_writers import open_writer

        draft = self.draft
        if draft.panels and draft.unfolded == draft.sentence:
            return ""
        sentence = draft.sentence
        cast = {name.replace("_", " "): self.folder.description(name) for name in self.folder.characters()}
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
        grid = parse_layout(draft.layout) if draft.layout else None
        prompt = prompt_from(self.names.model, theme=draft.theme, panels=draft.panels, grid=grid)
        most = self.spec.policy.max_references
        if draft.character and most:
            character = self.folder.character(draft.character)
            prompt = replace(prompt, characters=(character,), references=character.images[:most])
        return prompt

    def draw(self, job: Job) -> None:
        """Draw and rank candidates of the draft, and open them as a new page."""
        draft, names = self.draft, self.names
        prompt = self.prompt()
        recipe = Recipe(
            sentence=draft.sentence,
            theme=draft.theme,
            panels=list(draft.panels) if not prompt.sources else [prompt.text],
            layout=str(prompt.grid),
            prompt=prompt.text,
            character=draft.character,
            sources=draft.sources,
            model=names.model,
            loras=dict(names.strengths),
        )
        (ranked,) = self._ranked(job, [(prompt, recipe)], seed=draft.seed)
        before = open_image(prompt.sources[0]) if prompt.sources else None
        self._open(self.folder.add_page(ranked, before=before))

    def draw_sheet(self, job: Job, name: str, lines: Sequence[str]) -> None:
        """Draw pictures of a character by edits of its own; every line becomes a page, the best candidate first."""
        images = self.folder.character(name).images[: POLICIES[kind_of(self.editor, edits=True)].policy.max_sources]
        digests = [self.folder.add_source(open_image(path)) for path in images]
        sources = tuple(map(self.folder.source, digests))
        wanted = []
        for number, line in enumerate(lines):
            recipe = Recipe(sentence=line, panels=[line], layout="1x1", prompt=line, character=name, sources=digests)
            recipe = recipe.model_copy(update={"model": self.editor, "note": f"sheet of {name}"})
            wanted.append((Prompt(number, line, sources=sources), recipe))
        for ranked in self._ranked(job, wanted, seed=None):
            self.folder.add_page(ranked)

    def _ranked(
        self, job: Job, wanted: Sequence[tuple[Prompt, Recipe]], *, seed: int | None
    ) -> list[list[tuple[Image, Recipe]]]:
        """Draw candidates of each prompt, the best first, with their recipes."""
        from pacorl.generate.sets import generate_sets

        generator, reward = self._models(job, edits=bool(wanted[0][0].sources))
        count = self.draft.candidates
        seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        job.enter("Drawing", generator.default_steps * count * len(wanted))
        prompts = [prompt for prompt, _ in wanted]
        images = generate_sets(
            generator, prompts, seed=seed, best_of=count, judge=reward.judge, keep_all=True, on_step=job.advance
        )
        pages = []
        for number, (_, recipe) in enumerate(wanted):
            of_prompt = images[number * count : (number + 1) * count]
            pages.append([(image.image, _judged(recipe, image, judge=reward.name)) for image in of_prompt])
        return pages

    def _open(self, page: Page) -> Page:
        self.keep(page=page.number, candidate=0)
        return page

    def restore(self, recipe: Recipe) -> list[str]:
        """Fill the draft in from a recipe; returns how the models of now differ from the recipe's."""
        missing = [digest for digest in recipe.sources if not self.folder.source(digest).is_file()]
        if missing:
            raise ValueError(f"{len(missing)} of the pictures that it changes are not here any more; add them again")
        sentence = recipe.sentence or recipe.prompt
        who_is_here = recipe.character in self.folder.characters()
        self.keep(
            sentence=sentence,
            unfolded=sentence,
            theme=recipe.theme,
            panels=[] if recipe.sources else recipe.panels,
            layout=recipe.layout,
            character=recipe.character if who_is_here else "",
            sources=recipe.sources,
            seed=recipe.seed,
        )
        differing = []
        if recipe.model and recipe.model != self.names.model:
            differing.append(f"drawn by {recipe.model}")
        if recipe.loras != dict(self.names.strengths):
            differing.append(f"with {lora_text(recipe.loras) or 'no LoRA'}")
        if recipe.character and not who_is_here:
            differing.append(f"of {recipe.character}, who is not here")
        return differing

    # --- a page that is there ----------------------------------------------------------------------------------------

    def add_pictures(self, pictures: Sequence[tuple[Image, str]]) -> Page:
        """Make a page of pictures of any program, a panel each."""
        grid = layout_for(len(pictures)) if len(pictures) > 1 else Grid(1, 1)
        image = page_of([image for image, _ in pictures], grid)
        recipe = Recipe(layout=str(grid), panels=[""] * grid.count, note=", ".join(name for _, name in pictures))
        return self._open(self.folder.add_page([(image, recipe)]))

    def describe(self, page: Page, layout: str, theme: str, panels: Sequence[str]) -> Page:
        """Say how a picture of another program is cut into panels, and what these show; it becomes a new page."""
        grid = parse_layout(layout)
        image = open_image(page.candidates[0])
        _ = split(image, grid)  # a picture with fewer pixels than panels
        texts = [*panels, *[""] * grid.count][: grid.count]
        recipe = page.recipes[0].model_copy(update={"layout": layout, "theme": theme, "panels": texts})
        return self._open(self.folder.add_page([(image, recipe)]))

    def redraw(self, job: Job, page: Page, candidate: int, panel: int) -> None:
        """Draw one panel again some times; the new page is the best of these and of the page before."""
        from pacorl.generate.sets import best_first, generate_sets, judge_sets

        recipe, before = page.recipes[candidate], open_image(page.candidates[candidate])
        generator, reward = self._models(job)
        panels = split(before, recipe.grid)
        prompt = self._panel_prompts(recipe)[panel]
        count = self.draft.candidates
        job.enter(f"Drawing panel {panel + 1} again", generator.default_steps * count)
        seed = random.SystemRandom().randrange(2**31)
        drawn = generate_sets(
            generator, prompt, seed=seed, count=count, size=_size(generator, panels), on_step=job.advance
        )
        pages = [before]
        for image in drawn:
            pages.append(page_of([*panels[:panel], image.panels[0], *panels[panel + 1 :]], recipe.grid))

        job.enter("Comparing")
        with generator.judging():
            judged = judge_sets(reward.judge, [_page_prompt(recipe)] * len(pages), pages)
        ranked: list[tuple[Image, Recipe]] = []
        for group in best_first(judged):
            for index in group:
                note = f"panel {panel + 1} redrawn" if index else "as before"
                scores = {"score": judged[index].score, "matrix": judged[index].matrix, "judge": reward.name}
                place = {"rank": len(ranked) + 1, "tied": len(group), "note": note}
                ranked.append((pages[index], Recipe.model_validate(recipe.model_dump() | scores | place)))
        self._open(self.folder.add_page(ranked, before=before))

    def check(self, job: Job, page: Page, candidate: int) -> None:
        """Check whether the panels of a page belong together, and redraw the ones that do not.

        The verdict is kept beside the page. A repaired page is a new one. Panels without words are checked alone.
        """
        from pacorl.gate.check import ControlError, check_set
        from pacorl.gate.score_set import questions_about
        from pacorl.generate.repair import redraw_by, repair_set

        recipe, path = page.recipes[candidate], page.candidates[candidate]
        if self.names.judge == TINY:
            try:
                default_judge([path])
            except UsageError:
                raise ValueError(
                    "the practice judge knows pictures of the practice model alone; choose another judge in the header"
                ) from None
        generator, reward = self._models(job)
        before = open_image(path)
        images = split(before, recipe.grid)
        least = LEAST
        if self.calibration:
            least = threshold(self.calibration, None, panels=len(images), plain=not recipe.prompt)
        can_redraw = self.spec.sets and all(text.strip() for text in recipe.panels)
        prompts = self._panel_prompts(recipe) if can_redraw else []
        seeds = [recipe.seed + 1] * len(prompts)
        draw = redraw_by(generator, prompts, seeds=seeds, size=_size(generator, images), on_step=job.advance)
        asked = questions_about(shared_text(recipe.prompt))
        tries: list[Try] = []

        def gate(panels: Sequence[Image]) -> Check:
            job.enter("Checking")
            with generator.judging():
                names = [f"panel {number}" for number in range(1, len(panels) + 1)]
                return check_set(reward.judge, panels, least=least, names=names, questions=asked)

        def redraw(panel: int, number: int) -> tuple[Image, Mapping[str, str]] | None:
            job.enter(f"Redrawing panel {panel + 1}, try {number} of {TRIES}", generator.default_steps)
            return draw(panel, number)

        def show(attempt: Try) -> None:
            tries.append(attempt)
            job.shown.append((attempt.image, _verdict_of(attempt)))

        try:
            repair = repair_set(images, gate=gate, redraw=redraw, tries=TRIES * can_redraw, on_try=show)
        except ControlError as fault:
            raise ValueError(f"{reward.name} cannot read these pictures: {fault}") from None
        self.folder.keep_verdict(page, _verdict(repair.before))
        self.version += 1
        if not tries:
            return

        lines = [TryLine(panel=one.panel, verdict=_verdict_of(one), accepted=one.accepted) for one in tries]
        scores = {"score": repair.after.scores.mean, "matrix": repair.after.scores.matrix, "judge": reward.name}
        changes = {"note": "repaired", "tries": lines, "rank": 1, "tied": 1}
        repaired = Recipe.model_validate(recipe.model_dump() | scores | changes)
        image = page_of(repair.images, recipe.grid)
        drawn = [attempt.image for attempt in tries]
        new = self.folder.add_page([(image, repaired)], before=before, tries=drawn)
        self.folder.keep_verdict(new, _verdict(repair.after))
        self._open(new)

    def _panel_prompts(self, recipe: Recipe) -> list[Prompt]:
        """Build the prompts that redraw the panels of a page, each from its text."""
        from pacorl.generate.repair import panel_prompt

        model, kind = self.names.model, self.names.kind
        if not self.spec.sets:
            raise ValueError(f"{model} changes pictures and draws none from words; choose another model")
        references: tuple[Path, ...] = ()
        if recipe.character and self.spec.policy.max_references:
            references = self.folder.character(recipe.character).images
        texts = [f"{recipe.theme}, {text}" if model == TINY else text for text in recipe.panels]
        return [panel_prompt(model, text, theme=recipe.theme, kind=kind, references=references) for text in texts]

    def teach(self, name: str, *, steps: int | None = None, resume: str = "") -> None:
        """Teach a character to the model that draws, in a process of its own, or let a training go on."""
        self._check_idle()
        if self.teacher.name:
            raise BusyError(f"{self.teacher.name} is being taught; stop it, it can go on later")
        self.unload()  # two generators would not fit most cards
        self.teacher.start(self.names, name, steps=steps, resume=resume)
        self.version += 1


# --- small things ----------------------------------------------------------------------------------------------------


def page_of(panels: Sequence[Image], grid: Grid) -> Image:
    """Join panels in one image, all at the size of the first."""
    size = panels[0].size
    return join([panel if panel.size == size else panel.resize(size, Resampling.LANCZOS) for panel in panels], grid)


def lora_text(loras: Mapping[str, float]) -> str:
    """Name LoRAs with their strengths; those of the studio by the name of their training."""
    named = []
    for source, strength in loras.items():
        path = Path(source)
        name = path.parent.parent.name if path.parts[-2:] == ("run", "adapter") else source
        named.append(f"{name} {strength:g}")
    return ", ".join(named)


def _size(generator: Generator, panels: Sequence[Image]) -> Size | None:
    """Size of a redrawn panel: the page's, and the practice model's own."""
    return None if generator.model == TINY else Size(panels[0].height, panels[0].width)


def _judged(recipe: Recipe, image: GeneratedImage, *, judge: str) -> Recipe:
    """Add a candidate's seed and rank to a recipe."""
    update: dict[str, Any] = {"seed": image.recipe.seed, "rank": image.rank, "tied": image.tied, "judge": judge}
    if image.judged:
        update |= {"score": image.judged.score, "matrix": image.judged.matrix, "parts": dict(image.judged.parts)}
    return Recipe.model_validate(recipe.model_dump() | update)


def _page_prompt(recipe: Recipe) -> Prompt:
    """The prompt by which a page was ranked; of another program's page its layout alone."""
    if not recipe.prompt:
        texts = [text or "a picture" for text in recipe.panels]
        return compose(recipe.theme or "the same", texts, recipe.grid)
    return Prompt(0, recipe.prompt, theme=recipe.theme, grid=recipe.grid, panels=tuple(recipe.panels))


def _verdict(check: Check) -> Verdict:
    """Word a check for a person."""
    count, failed = len(check.panels), check.failed
    lines = [f"All {count} panels belong together."]
    if failed:
        panel = check.panels.index(failed[0]) + 1
        score = "no score" if failed[0].score is None else f"{failed[0].score:.2f} of 1"
        lines = [f"Panel {panel} fits the others least ({score})."]
        lines.append(f"{len(failed)} of {count} {'is' if len(failed) == 1 else 'are'} below {check.least:g}.")
    return Verdict(passed=check.passed, lines=lines, odd=check.odd_one_out)


def _verdict_of(attempt: Try) -> str:
    if attempt.error:
        return "not readable for the judge, left out"
    score = "no score" if attempt.score is None else f"{attempt.score:.2f} of 1"
    return f"{score}, {'better: kept' if attempt.accepted else 'not better: left out'}"
