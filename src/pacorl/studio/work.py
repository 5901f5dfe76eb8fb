"""The studio's work, without its page: models, one job at a time, and the training of a character.

Every method that draws or judges runs on the worker's thread (`Studio.submit`). A job that fails leaves nothing.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image, Resampling

from pacorl.config import base as configs
from pacorl.config.options import AUTO, StudioModels, UsageError
from pacorl.config.user_files import NO_USER_FILES
from pacorl.core.grid import join, parse_layout, shared_text, split
from pacorl.io.children import start_python
from pacorl.io.documents import parse_json, read_jsonl, read_text, read_yaml
from pacorl.io.files import PRIVATE, free_name, open_regular, safe_name, write_atomic
from pacorl.io.images import open_image
from pacorl.judge import default_judge, judge_for
from pacorl.judge.calibration import read_calibration, threshold
from pacorl.models.policies import POLICIES, kind_of, tiny_spec
from pacorl.records.compose import compose, layout_for, prompt_from
from pacorl.records.panels import write_panels
from pacorl.studio.folder import Draft, Folder, Page, Recipe, Removed, TryLine, Verdict
from pacorl.studio.models import fitted, training_config
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import GeneratedImage, Judged
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Try
    from pacorl.models.policies.spec import PolicySpec

LEAST = 0.5
"""Threshold of a check without a calibration."""
TRIES = 6
"""Most redrawn panels of a repair."""
PATIENCE = 10.0
"""Seconds for a stopping trainer to save; a kill afterwards loses what came after its last checkpoint."""


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
        self._generators: dict[str, Generator] = {}
        self._rewards: dict[str, PacoReward] = {}

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
            if not self.job.ended:
                raise BusyError(f"{self.job.name} is under way; stop it, or wait")
            if self.teacher.name:
                raise BusyError(f"{self.teacher.name} is being taught and has the machine; stop it, it can go on later")
            self.job = job = Job(name)

        def run() -> None:
            try:
                work(job)
            except StoppedError:
                job.error = ""
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

    # --- models ------------------------------------------------------------------------------------------------

    def choose(self, names: StudioModels) -> None:
        """Draw with other models from now on; the next job loads them."""
        if not self.job.ended:
            raise BusyError(f"{self.job.name} is under way; stop it, or wait")
        if (names.judge, names.memory) != (self.names.judge, self.names.memory):
            self.unload()
        self._generators.clear()
        self.names = names
        loras = dict(names.strengths)
        self.keep(model=names.model, editor=names.editor, judge=names.judge, loras=loras)

    def unload(self) -> None:
        self._generators.clear()
        for reward in self._rewards.values():
            reward.close()
        self._rewards.clear()

    @property
    def spec(self) -> PolicySpec:
        """Kind of the model that draws."""
        return POLICIES.named(self.names.kind or kind_of(self.names.model))

    @property
    def editor(self) -> str:
        """The model that changes pictures; empty if there is none."""
        if self.spec.edits:
            return self.names.model
        return self.names.editor or (TINY if self.names.model == TINY else "")

    def _models(self, job: Job, *, edits: bool = False) -> tuple[Generator, PacoReward]:
        from pacorl.gate.paco_reward import PacoReward
        from pacorl.generate.generator import Generator
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        names = self.names
        model, kind, strengths = names.model, self.spec.kind, dict(names.strengths)
        if edits and not self.spec.edits:
            if not self.editor:
                raise ValueError(f"{model} draws from words and changes no picture; choose an editor in the header")
            model, kind = self.editor, kind_of(self.editor, edits=True)
            strengths = {}  # they belong to the model that draws
            if model == TINY:
                # For people who draw, the LoRA that keeps a hero.
                strengths = dict.fromkeys(tiny_spec(edits=True).committed.adapters, 1.0)
        key = f"{kind} {model}"
        judge = judge_for(names.judge, edits=edits)
        if key not in self._generators or judge not in self._rewards:
            job.enter("Loading the models")
            use_cores()
            quiet_loading()
            names = names if names.memory != AUTO else replace(names, memory=fitted(names, model, kind))
        if key not in self._generators:
            if model != TINY:  # two published generators would not fit most cards
                self._generators.clear()
            loaded = Generator.from_pretrained(model, kind=kind, adapter=strengths, memory=names.memory)
            for reward in self._rewards.values():
                loaded.judged_by(reward.judge)
            self._generators[key] = loaded
        generator = self._generators[key]
        if judge not in self._rewards:
            calibration = (names.calibration or "") if judge == names.judge else ""
            with generator.judging():
                access = names.judge_access | {"calibration": calibration}
                self._rewards[judge] = PacoReward.from_pretrained(judge, **access)
            for other in self._generators.values():
                other.judged_by(self._rewards[judge].judge)
        return generator, self._rewards[judge]

    # --- drawing -----------------------------------------------------------------------------------------------

    def unfold(self) -> str:
        """Write the panels of the draft's sentence, unless they were; returns what the writer has to say about it."""
        from pacorl.generate.language_writers import open_writer

        draft = self.draft
        if draft.panels and draft.unfolded == draft.sentence:
            return ""
        cast = {name.replace("_", " "): self.folder.description(name) for name in self.folder.characters()}
        sentence = draft.sentence
        for name in sorted(cast, key=len, reverse=True):
            sentence = sentence.replace(name, cast[name])
        writer = open_writer(self.names.writer)
        written = write_panels(sentence, writer=writer)
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
        from pacorl.generate.sets import generate_sets

        draft = self.draft
        prompt = self.prompt()
        generator, reward = self._models(job, edits=bool(prompt.sources))
        seed = random.SystemRandom().randrange(2**31) if draft.seed is None else draft.seed
        size = Size.parse(draft.size) if draft.size.strip() else None
        options: dict[str, Any] = {"size": size, "on_step": job.advance}
        job.enter("Drawing", generator.default_steps * draft.candidates)
        images = generate_sets(
            generator, prompt, seed=seed, best_of=draft.candidates, judge=reward.judge, keep_all=True, **options
        )
        before = open_image(prompt.sources[0]) if prompt.sources else None
        # The same seed without the LoRA, which the page compares with.
        if generator.adapter and not prompt.sources:
            job.enter("Drawing it without the LoRA", generator.default_steps)
            (plain,) = generate_sets(generator, prompt, seed=images[0].recipe.seed, base=True, **options)
            before = plain.image

        common = Recipe(
            sentence=draft.sentence,
            theme=draft.theme,
            panels=list(draft.panels) if not prompt.sources else [prompt.text],
            layout=str(prompt.grid),
            prompt=prompt.text,
            character=draft.character,
            sources=draft.sources,
            model=self.names.model,
            loras=dict(self.names.strengths),
            size=draft.size,
            judge=reward.name,
        )
        page = self.folder.add_page([_candidate(image, common, reward.name) for image in images], before=before)
        self.keep(page=page.number, candidate=0)

    def restore(self, recipe: Recipe) -> list[str]:
        """Fill the draft in from a recipe; returns how the models of now differ from the recipe's."""
        missing = [digest for digest in recipe.sources if not self.folder.source(digest).is_file()]
        if missing:
            raise ValueError(f"{len(missing)} of the pictures that it changes are not here any more; add them again")
        self.keep(
            sentence=recipe.sentence or recipe.prompt,
            unfolded=recipe.sentence or recipe.prompt,
            theme=recipe.theme,
            panels=[] if recipe.sources else recipe.panels,
            layout=recipe.layout,
            character=recipe.character if recipe.character in self.folder.characters() else "",
            sources=recipe.sources,
            size=recipe.size,
            seed=recipe.seed,
        )
        differing = []
        if recipe.model and recipe.model != self.names.model:
            differing.append(f"drawn by {recipe.model}")
        if recipe.loras != dict(self.names.strengths):
            differing.append(f"with {lora_text(recipe.loras) or 'no LoRA'}")
        if recipe.character and recipe.character not in self.folder.characters():
            differing.append(f"of {recipe.character}, who is not here")
        return differing

    # --- a page that is there ----------------------------------------------------------------------------------

    def add_pictures(self, pictures: Sequence[tuple[Image, str]], layout: str = "") -> Page:
        """Make a page of pictures of any program: one grid image, or one picture per panel."""
        images = [image for image, _ in pictures]
        grid = parse_layout(layout) if len(images) == 1 else layout_for(len(images))
        if grid.count < 2:
            raise ValueError("one picture has nothing to be compared with; add another, or say how to cut it")
        image = images[0] if len(images) == 1 else page_of(images, grid)
        _ = split(image, grid)  # a page with fewer pixels than panels
        recipe = Recipe(layout=str(grid), panels=[""] * grid.count, note=", ".join(name for _, name in pictures))
        page = self.folder.add_page([(image, {}, recipe)])
        self.keep(page=page.number, candidate=0)
        return page

    def redraw(self, job: Job, page: Page, candidate: int, panel: int) -> None:
        """Draw one panel again some times; the new page is the best of these and of the page before."""
        from pacorl.generate.sets import best_first, generate_sets, judge_sets

        recipe, before = page.recipes[candidate], open_image(page.candidates[candidate])
        generator, reward = self._models(job)
        panels = split(before, recipe.grid)
        prompt = self._panel_prompts(recipe)[panel]
        size = None if generator.model == TINY else Size(panels[0].height, panels[0].width)
        seed = random.SystemRandom().randrange(2**31)
        count = self.draft.candidates
        job.enter(f"Drawing panel {panel + 1} again", generator.default_steps * count)
        drawn = generate_sets(generator, prompt, seed=seed, count=count, size=size, on_step=job.advance)
        pages = [before]
        for image in drawn:
            pages.append(page_of([*panels[:panel], image.panels[0], *panels[panel + 1 :]], recipe.grid))

        job.enter("Comparing")
        with generator.judging():
            judged = judge_sets(reward.judge, [_page_prompt(recipe)] * len(pages), pages)
        ranked: list[tuple[Image, Mapping[str, str], Recipe]] = []
        for group in best_first(judged):
            for index in group:
                line = f"panel {panel + 1}, seed {drawn[index - 1].recipe.seed}" if index else "as before"
                changed = _judged(recipe, judged[index], rank=len(ranked) + 1, tied=len(group), judge=reward.name)
                changed = changed.model_copy(update={"note": f"{recipe.note}; {line}".strip("; ")})
                ranked.append((pages[index], _texts(page.candidates[candidate]), changed))
        new = self.folder.add_page(ranked, before=before)
        self.keep(page=new.number, candidate=0)

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
        asked = questions_about(shared_text(recipe.prompt))
        least = LEAST
        if self.calibration:
            least = threshold(self.calibration, None, panels=len(images), plain=not recipe.prompt)
        can_redraw = self.spec.sets and all(text.strip() for text in recipe.panels)
        prompts = self._panel_prompts(recipe) if can_redraw else []
        size = None if generator.model == TINY else Size(images[0].height, images[0].width)
        draw = redraw_by(generator, prompts, seeds=[recipe.seed + 1] * len(prompts), size=size, on_step=job.advance)
        tries: list[Try] = []

        def gate(panels: Sequence[Image]) -> Check:
            job.enter("Checking")
            with generator.judging():
                names = [f"panel {number}" for number in range(1, len(panels) + 1)]
                return check_set(reward.judge, panels, least=least, names=names, questions=asked)

        def redraw(panel: int, number: int) -> tuple[Image, Mapping[str, str]]:
            job.enter(f"Redrawing panel {panel + 1}, try {number} of {TRIES}", generator.default_steps)
            return draw(panel, number)  # type: ignore[return-value]

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
        lines = []
        for attempt in tries:
            seed = attempt.texts.get("seed", "")
            lines.append(
                TryLine(panel=attempt.panel, seed=seed, verdict=_verdict_of(attempt), accepted=attempt.accepted)
            )
        scores = repair.after.scores
        update = {
            "note": "repaired",
            "tries": lines,
            "score": scores.mean,
            "matrix": scores.matrix,
            "rank": 1,
            "tied": 1,
        }
        repaired = Recipe.model_validate(recipe.model_dump() | update | {"judge": reward.name})
        image = page_of(repair.images, recipe.grid)
        drawn = [attempt.image for attempt in tries]
        new = self.folder.add_page([(image, _texts(path), repaired)], before=before, tries=drawn)
        self.folder.keep_verdict(new, _verdict(repair.after))
        self.keep(page=new.number, candidate=0)

    def _panel_prompts(self, recipe: Recipe) -> list[Prompt]:
        """Build the prompts that redraw the panels of a page, each from its text."""
        from pacorl.generate.repair import panel_prompt

        if not self.spec.sets:
            raise ValueError(f"{self.names.model} changes pictures and draws none from words; choose another model")
        references: tuple[Path, ...] = ()
        if recipe.character and self.spec.policy.max_references:
            references = self.folder.character(recipe.character).images
        texts = [f"{recipe.theme}, {text}" if self.names.model == TINY else text for text in recipe.panels]
        model, kind = self.names.model, self.names.kind
        return [panel_prompt(model, text, theme=recipe.theme, kind=kind, references=references) for text in texts]

    # --- a character's sheet -----------------------------------------------------------------------------------

    def draw_sheet(self, job: Job, name: str, lines: Sequence[str]) -> None:
        """Draw pictures of a character by edits of its own; every line becomes a page, the best candidate first."""
        from pacorl.generate.sets import generate_sets

        generator, reward = self._models(job, edits=True)
        sources = self.folder.character(name).images[: generator.policy.max_sources]
        digests = [self.folder.add_source(open_image(path)) for path in sources]
        sources = tuple(map(self.folder.source, digests))
        count = self.draft.candidates
        job.enter("Drawing the sheet", generator.default_steps * count * len(lines))
        prompts = [Prompt(number, line, sources=sources) for number, line in enumerate(lines)]
        seed = random.SystemRandom().randrange(2**31)
        images = generate_sets(
            generator, prompts, seed=seed, best_of=count, judge=reward.judge, keep_all=True, on_step=job.advance
        )
        for number, line in enumerate(lines):
            common = Recipe(
                sentence=line,
                panels=[line],
                layout="1x1",
                prompt=line,
                character=name,
                sources=digests,
                model=self.editor,
                note=f"sheet of {name}",
                judge=reward.name,
            )
            ranked = images[number * count : (number + 1) * count]
            self.folder.add_page([_candidate(image, common, reward.name) for image in ranked])
        self.version += 1

    def teach(self, name: str, *, steps: int | None = None, resume: str = "") -> None:
        """Teach a character to the model that draws, in a process of its own, or let a training go on."""
        if not self.job.ended:
            raise BusyError(f"{self.job.name} is under way; stop it, or wait")
        self.unload()  # two generators would not fit most cards
        self.teacher.start(self.names, name, steps=steps, resume=resume)
        self.version += 1


# --- the training of a character ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Training:
    """A training of a character, as its folder has it."""

    name: str
    character: str
    steps: int
    step: int
    losses: tuple[tuple[int, float], ...]
    """(step, loss on held-out pictures)"""
    finished: bool
    lora: Path | None
    """Folder of the LoRA that is used: of the lowest held-out loss, or else the last."""
    best_step: int
    samples: tuple[tuple[str, Path, Path], ...]
    """(text, image without the LoRA, image with it); while it learns of the newest evaluation, then of `lora`."""
    error: str = ""


class Teacher:
    """At most one trainer, in a process of its own, which can be stopped and goes on from its last checkpoint.

    It executes no file that a config names: the folder may be somebody else's.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._running = ""

    @property
    def name(self) -> str:
        """The training that runs; empty without one."""
        return self._running if self._process and self._process.poll() is None else ""

    def start(self, names: StudioModels, character: str, *, steps: int | None = None, resume: str = "") -> None:
        """Write a training's config and start it, or let an earlier one go on. Raises ValueError if it cannot run."""
        if self.name:
            raise BusyError(f"{self.name} is being taught; stop it, it can go on later")
        source = self.folder.path / "characters" / safe_name(character)
        target = self.folder.path / "loras" / safe_name(resume) if resume else free_name(self.loras / source.name)
        if not resume:
            config = training_config(names, source, target / "run", steps=steps)
            write_atomic(target / "config.yaml", configs.dump(config), mode=PRIVATE)
        arguments = ["train-character", str(source), "--config", str(target / "config.yaml"), "--resume", "auto"]
        with open(open_regular(target / "log.txt", os.O_WRONLY | os.O_TRUNC), "wb") as log:
            # A killed studio cannot end its trainer, which therefore watches its standard input.
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
            environment = os.environ | {NO_USER_FILES: "1"}
            self._process = start_python("-m", "pacorl", *arguments, "--stop-with-stdin", **pipes, env=environment)
        self._running = target.name

    @property
    def loras(self) -> Path:
        return self.folder.path / "loras"

    def stop(self) -> None:
        """End the trainer, which saves."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:  # it still loads, or learns
                self._process.kill()
                self._process.wait()
        if self._process and self._process.stdin:
            self._process.stdin.close()

    def trainings(self, character: str) -> list[Training]:
        """Describe the trainings of a character, the newest last."""
        found = []
        for config in sorted(self.loras.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime_ns):
            document = read_yaml(config)
            if Path(str(document.get("character"))).name == character:
                found.append(self._read(config.parent, character, int(document["steps"])))
        return found

    def _read(self, folder: Path, character: str, steps: int) -> Training:
        run = folder / "run"
        lines: list[Any] = []
        for line in read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []:
            lines.append(line)
        losses = [(line["step"], line["held_out_loss"]) for line in lines if line.get("held_out_loss") is not None]
        done = max((line["step"] for line in lines), default=0)
        if (run / "progress.json").is_file():
            done = max(done, int(parse_json(read_text(run / "progress.json"))["step"]))
        lora = run / "adapter" if (run / "adapter").is_dir() else None
        best = min((pair for pair in losses if pair[0]), key=lambda pair: pair[1], default=(done, 0.0))[0]
        evaluations = sorted((run / "samples").glob("evaluation-*/"))
        samples: list[tuple[str, Path, Path]] = []
        if evaluations:
            records = evaluations[-1].with_suffix(".jsonl")
            for record in read_jsonl(records) if records.is_file() else []:
                file = str(record["image"]).rpartition("/")[2]
                samples.append((str(record["text"]), evaluations[0] / file, evaluations[-1] / file))
        error = ""
        log = folder / "log.txt"
        if self._running == folder.name and self._process and (self._process.poll() or 0) > 0 and log.is_file():
            error = (read_text(log).strip().splitlines() or ["the trainer ended without a word"])[-1]
        finished = (run / "summary.json").is_file()
        return Training(folder.name, character, steps, done, tuple(losses), finished, lora, best, tuple(samples), error)

    def all_loras(self) -> dict[str, str]:
        """Map the names of the LoRAs that were taught here to their folders."""
        return {
            run.parent.name: str(run / "adapter")
            for run in sorted(self.loras.glob("*/run"))
            if (run / "adapter").is_dir()
        }


# --- small things ------------------------------------------------------------------------------------------------


def page_of(panels: Sequence[Image], grid: Grid) -> Image:
    """Join panels in one image, all at the size of the first."""
    size = panels[0].size
    return join([panel if panel.size == size else panel.resize(size, Resampling.LANCZOS) for panel in panels], grid)


def lora_text(loras: Mapping[str, float]) -> str:
    """Name LoRAs with their strengths; those of the studio by the name of their training."""
    named = []
    for source, strength in loras.items():
        path = Path(source)
        name = path.parent.parent.name if path.name == "adapter" and path.parent.name == "run" else source
        named.append(f"{name} {strength:g}")
    return ", ".join(named)


def _candidate(image: GeneratedImage, common: Recipe, judge: str) -> tuple[Image, dict[str, str], Recipe]:
    from pacorl.generate.generated_images import recipe_texts

    recipe = common.model_copy(update={"seed": image.recipe.seed})
    if image.judged:
        recipe = _judged(recipe, image.judged, rank=image.rank, tied=image.tied, judge=judge)
    return image.image, recipe_texts(image, judge=judge), recipe


def _judged(recipe: Recipe, judged: Judged, *, rank: int, tied: int, judge: str) -> Recipe:
    scores = {"score": judged.score, "matrix": judged.matrix, "parts": dict(judged.parts), "judge": judge}
    return Recipe.model_validate(recipe.model_dump() | scores | {"rank": rank, "tied": tied})


def _texts(path: Path) -> dict[str, str]:
    """Texts of a page that hold for a changed page too."""
    from pacorl.io.images import png_texts

    return {key: text for key, text in png_texts(path).items() if key in ("Software", "model", "prompt", "layout")}


def _page_prompt(recipe: Recipe) -> Prompt:
    """The prompt by which a page was ranked; of another program's page its layout alone."""
    if not recipe.prompt:
        texts = [text or "a picture" for text in recipe.panels]
        return compose(recipe.theme or "the same", texts, recipe.grid)
    return Prompt(0, recipe.prompt, theme=recipe.theme, grid=recipe.grid, panels=tuple(recipe.panels))


def _verdict(check: Check) -> Verdict:
    """Word a check for a person."""
    count = len(check.panels)
    failed = check.failed
    lines = [f"All {count} panels belong together."]
    if failed:
        panel = check.panels.index(failed[0]) + 1
        score = "no score" if failed[0].score is None else f"{failed[0].score:.2f} of 1"
        are = "is" if len(failed) == 1 else "are"
        lines = [
            f"Panel {panel} fits the others least ({score}).",
            f"{len(failed)} of {count} {are} below {check.least:g}.",
        ]
    return Verdict(
        passed=check.passed, lines=lines, odd=check.odd_one_out, scores=[panel.score for panel in check.panels]
    )


def _verdict_of(attempt: Try) -> str:
    if attempt.error:
        return "not readable for the judge, left out"
    score = "no score" if attempt.score is None else f"{attempt.score:.2f} of 1"
    return f"{score}, {'better: kept' if attempt.accepted else 'not better: left out'}"
