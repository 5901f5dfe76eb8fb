"""The studio's work, without its page: models, and one job at a time.

The methods from `use` on run as jobs on the worker's thread (`Studio.submit`). A failed job leaves no files.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from PIL.Image import Image

from pacorl.config.options import StudioModels
from pacorl.config.user_files import NO_USER_FILES
from pacorl.core.grid import shared_text
from pacorl.io.children import start_python
from pacorl.io.documents import write_json
from pacorl.io.images import open_image
from pacorl.judge import judge_for
from pacorl.judge.calibration import LEAST
from pacorl.models.adapters import adapter_names, read_adapters
from pacorl.models.policies import POLICIES, kind_of
from pacorl.records.compose import check_for, layout_for, prompt_from
from pacorl.records.panels import write_panels
from pacorl.report.html import render
from pacorl.studio.folder import Drawing, Folder, Recipe, page_of, plain
from pacorl.studio.models import PRACTICE, PRACTICE_ONLY, download, fit_of, is_here, judge_of, offers, shown_name
from pacorl.studio.teaching import Training, training_recipe
from pacorl.tiny.generators import STEADY
from pacorl.types import TINY, Character, Prompt, Size

if TYPE_CHECKING:
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import GeneratedImage
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Redraw
    from pacorl.models.policies.spec import PolicySpec

DRAWINGS = 4
"""Drawings of a page or a panel, of which the best comes first."""
TRIES = 6
"""Most redrawn panels of a repair."""
NO_BETTER = "No try makes the page better; it stays as it was"
PRACTICE_STRENGTH = 0.5
"""Strength of a LoRA of the practice model, which learns single pictures and draws pages."""


class Studio:
    """One person's studio: folder, draft, models, and the job that runs."""

    def __init__(self, folder: Path, names: StudioModels = PRACTICE) -> None:
        self.folder = Folder(folder)
        self.draft = self.folder.read_draft()
        self._saved = self.draft.model_dump()
        # The model that was chosen on the page, unless the command names one.
        self.names = (self.draft.chosen if names == PRACTICE else None) or names
        self.version = 0
        """Counts changes, so that every open window shows them."""
        self.phase = ""
        """Phase of the job that runs; empty without one."""
        self.fault = ""
        """Fault of the last job or action."""
        self.fits = dict.fromkeys(offers(), "")
        """Listed model → whether it fits this machine; empty before it is planned."""
        self._stopped = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="studio")
        self._loaded: tuple[tuple[str, Mapping[str, float]], Generator, PacoReward] | None = None
        """Kind and LoRAs of the loaded generator, the generator, and the judge."""

    def close(self) -> None:
        self.stop()
        self.save()
        self._worker.shutdown(wait=True)
        self.unload()
        self.folder.close()

    def keep(self, **changes: Any) -> None:
        """Change the draft, and show it in every window."""
        for name, value in changes.items():
            setattr(self.draft, name, value)
        self.version += 1

    def save(self) -> None:
        """Write the draft if it has changed: fields of the page are bound to it."""
        document = self.draft.model_dump()
        if document != self._saved:
            write_json(self.folder.path / "draft.json", document)
            self._saved = document

    # --- jobs --------------------------------------------------------------------------------------------------------

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        """Start a job. Raises ValueError while another one runs."""
        if self.phase:
            raise ValueError(f"{self.phase} is under way; stop it, or wait")
        self.phase, self.fault, self._stopped = "Beginning", "", False

        def run() -> None:
            try:
                work(*arguments)
            except CancelledError:
                pass
            except Exception as error:
                # Messages of these classes are for users; anything else is a fault of ours, logged in full.
                if not isinstance(error, ValueError | OSError | RuntimeError):
                    logging.getLogger(__name__).exception("a job of the studio failed")
                self.fault = str(error).strip() or type(error).__name__
            finally:
                self.phase = ""

        self._worker.submit(run)

    def stop(self) -> None:
        """Stop the job that runs, at its next step."""
        self._stopped = True

    def enter(self, phase: str) -> None:
        """Name the phase of the job. Raises CancelledError if a person stopped it."""
        self.phase = phase
        self.go_on()

    def go_on(self, images: int = 0) -> None:
        """Raise CancelledError if a person stopped the job; generators call it with their number of `images`."""
        if self._stopped:
            raise CancelledError

    def _run_child(self, command: Sequence[str], phase: Callable[[], str], **environment: str) -> None:
        """Run Python until it ends, or the job is stopped. Raises RuntimeError with its last line if it fails."""
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            # Its standard input ends with this process, however that ends: a trainer saves, and stops.
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
            with start_python(*command, **pipes, env=os.environ | environment) as process:
                try:
                    while process.poll() is None:
                        time.sleep(0.5)
                        self.enter(phase())
                except CancelledError:
                    process.terminate()  # a trainer saves
                    raise
            if process.returncode:
                log.seek(0)
                raise RuntimeError(log.read().strip().rpartition("\n")[2] or f"it ended with {process.returncode}")

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
            # The practice editor is another model than the practice generator, with a LoRA of its own.
            return {STEADY: 1.0}
        adapters = read_adapters(self.names.adapter)
        training = self.training(character)
        if character and training.is_finished:
            adapters[str(training.lora)] = PRACTICE_STRENGTH if self.names.model == TINY else 1.0
        return adapters

    def _models(self, character: str, *, edits: bool = False) -> tuple[Generator, PacoReward]:
        """Load the generator with a character's LoRA, and the judge; both stay loaded until another choice."""
        from pacorl.gate.paco_reward import PacoReward
        from pacorl.generate.generator import Generator
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        names, key = self.names, (self.spec(edits=edits).kind, self.adapters(character, edits=edits))
        if self._loaded and self._loaded[0] == key:
            return self._loaded[1:]
        # The old models leave first: both together may not fit.
        self.enter("Loading the models")
        self.unload()
        use_cores()
        quiet_loading()
        generator = Generator.from_pretrained(names.model, kind=key[0], adapter=key[1], memory=names.memory)
        with generator.judging():
            reward = PacoReward.from_pretrained(judge_for(names.judge, edits=edits), memory=names.memory)
        generator.judged_by(reward.judge)
        self._loaded = (key, generator, reward)
        return generator, reward

    def plan_models(self) -> None:
        """Plan each listed model for this machine, so that the page shows which of them fit."""
        for name in self.fits:
            self.enter(f"Planning {shown_name(name)} for this machine")
            self.fits[name] = fit_of(name)[1]

    def use(self, name: str, token: str = "") -> None:
        """Draw with another model from now on, without the command's LoRA; fetch the model and its judge if absent.

        The token is written nowhere, and is no argument, which other users could read.

        Raises:
            ValueError: it is no model of this machine or of the list, or does not fit the machine.
        """
        self.enter(f"Planning {shown_name(name)} for this machine")
        # A typed name may be anything, and is to download nothing.
        if not is_here(name) and name not in offers():
            raise ValueError(f"{name} is not on this machine; take a model of the list, or give the path of its file")
        # Plan first: a load that does not fit would exhaust the machine.
        (memory, fit), judge = fit_of(name), judge_of(name)
        if not memory:
            raise ValueError(f"{shown_name(name)} {fit}")
        secret = {"HF_TOKEN": token} if token else {}
        for each in (name, judge):
            if not is_here(each):
                self._run_child(download(each), partial(str, f"Downloading {each}"), **secret)
        POLICIES.named(kind_of(name)).check_source(name)
        self.unload()
        self.names = StudioModels(model=name, memory=memory, judge=judge)
        self.keep(chosen=self.names)

    def undo(self) -> None:
        """Undo the last removal, and choose the character that is back."""
        before = self.folder.characters()
        self.folder.undo()
        for name in self.folder.characters():
            if name not in before:
                self.keep(character=name)

    # --- words -------------------------------------------------------------------------------------------------------

    def make_character(self) -> None:
        """Make the character that the draft describes. Raises ValueError if its name cannot be used."""
        name = self.folder.new_character(self.draft.name, self.draft.description)
        self.keep(character=name, name="", description="")

    @property
    def looks(self) -> str:
        """The chosen character in words; empty without one."""
        name = self.draft.character
        if not name:
            return ""
        description = self.folder.description(name)
        # A LoRA learned the name too; the practice model knows no names.
        return description if self.names.model == TINY else f"{name}, {description}"

    @property
    def panels(self) -> tuple[str, list[str]]:
        """Shared description of the draft, and a line per panel; no line before `unfold`.

        The chosen character's description replaces its name, and precedes a text without it.
        """
        words, looks = self.draft.words, self.looks
        if looks:
            name = re.escape(plain(self.draft.character))
            words = re.sub(rf"(?<!\w){name}(?!\w)", lambda _: looks, normalize("NFC", words))
        theme, *lines = words.split("\n")
        if looks not in theme:
            theme = f"{looks}, {theme}"
        return theme.strip(), lines_of(lines)

    def unfold(self) -> None:
        """Turn the draft's sentence into a shared description and a line per panel, unless it has lines.

        Raises:
            ValueError: it is no such sentence.
        """
        if self.panels[1]:
            return
        written = write_panels(self.draft.words)
        panels = [text.removeprefix(f"{written.theme}, ") for text in written.panels]
        self.keep(words="\n".join([written.theme, *panels]))

    def prompt(self) -> Prompt:
        """Build the prompt of the draft. Raises ValueError if the model does not know a word."""
        theme, panels = self.panels
        prompt = prompt_from(self.names.model, theme=theme, panels=panels)
        if self.draft.character:
            character = self.folder.character(self.draft.character)
            references = character.images[: self.spec().policy.max_references]
            prompt = replace(prompt, characters=(character,), references=references)
        return prompt

    def cast(self, recipe: Recipe) -> tuple[Character, ...]:
        """Read the character of a recipe, if it has one, and it is here and has pictures."""
        name = recipe.character
        if name not in self.folder.characters() or not self.folder.pictures(name):
            return ()
        return (self.folder.character(name),)

    def set_of(self, recipe: Recipe) -> Prompt:
        """Return the prompt of a page."""
        return Prompt(
            0,
            recipe.prompt,
            theme=recipe.theme,
            grid=recipe.grid,
            panels=tuple(recipe.panels),
            characters=self.cast(recipe),
        )

    def restore(self, recipe: Recipe) -> None:
        """Fill in the form from a recipe, to draw its picture again; `fault` states why the picture would differ."""
        is_here = recipe.character in self.folder.characters()
        self.keep(seed=recipe.seed, character=recipe.character if is_here else "")
        if recipe.sources:
            self.keep(sheet=recipe.words, tab="Characters")
        else:
            self.keep(words=recipe.words)
        # Compare what it was drawn with and what it would be drawn with today.
        edits = bool(recipe.sources)
        spec = self.spec(edits=edits)
        most = spec.policy.max_sources if edits else spec.policy.max_references
        pictures = [path.name for character in self.cast(recipe) for path in character.images[:most]]
        loras = spec.adapters_of(self.names.model, self.adapters(self.draft.character, edits=edits))
        then_and_today = {
            "model": (recipe.model, self.names.model),
            "LoRA": (recipe.adapter, adapter_names(loras)),
            "character": (", ".join(recipe.characters), self.draft.character),
            "character's description": (recipe.looks, self.looks),
            "character's pictures": (", ".join(recipe.sources or recipe.references), ", ".join(pictures)),
        }
        self.fault = render("differs.txt", then_and_today=then_and_today)

    # --- drawing -----------------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw and rank candidates of the draft, and open them as a page."""
        self.unfold()
        self._open(self._candidates([self.prompt()], form=self.draft.words))

    def sheet(self) -> None:
        """Draw more pictures of the draft's character: its own, changed by each line of the sheet."""
        name = self.draft.character
        lines = lines_of(self.draft.sheet.splitlines())
        if not lines:
            raise ValueError("say what should change, a line for each new picture")
        # At least one, so that a model that changes no pictures refuses it.
        most = max(self.spec(edits=True).policy.max_sources, 1)
        pictures = self.folder.character(name, least=1).images[:most]
        prompts = []
        for number, line in enumerate(lines):
            prompts.append(check_for(self.names.model, Prompt(number, line, sources=pictures)))
        self.keep(tab="Pages")  # where it opens
        self._open(self._candidates(prompts, characters=[name]))

    def redraw(self, drawing: Drawing, panel: int) -> None:
        """Draw one panel again some times, and rank the pages."""
        from pacorl.generate.generated_images import GeneratedImage
        from pacorl.generate.separate import panel_prompts
        from pacorl.generate.sets import ranked

        recipe, panels = drawing.recipe, drawing.panels
        generator, reward = self._models(recipe.character)
        prompt = self.set_of(recipe)
        draw = self._redrawing(generator, panel_prompts(prompt, self.names.model), panels[panel], seed=randbits(31))
        self.enter(f"Drawing panel {panel + 1} again")
        pages = []
        size = panels[panel].size
        for number in range(DRAWINGS):
            panels[panel], texts = draw(panel, number)
            pages.append(GeneratedImage(prompt, page_of(panels, recipe.grid, size), texts))
        # Whole pages are judged: a panel is consistent only with its neighbours.
        with generator.judging():
            in_order = ranked(reward.judge, pages)
        changed = recipe.updated(note=f"Panel {panel + 1} drawn again", judge=self.names.judge, checked=[], odd=None)
        drawings = []
        for page in in_order:
            redrawn = recipe.redrawn | {str(panel + 1): page.recipe["seed"]}
            drawings.append(_judged(page, changed, redrawn=redrawn))
        self._open(drawings)

    def _candidates(self, prompts: Sequence[Prompt], **fields: object) -> list[tuple[Image, Recipe]]:
        """Draw candidates of each prompt, best first, by the draft's seed; `fields` enter their recipes."""
        from pacorl.generate.generated_images import recipe_texts
        from pacorl.generate.sets import generate_sets
        from pacorl.models.policies.policy import check_images

        edits = bool(prompts[0].sources)
        # Before the models are loaded, which takes minutes.
        for prompt in prompts:
            check_images(self.spec(edits=edits).policy, prompt, shown_name(self.names.model))
        generator, reward = self._models(self.draft.character, edits=edits)
        seed = randbits(31) if self.draft.seed is None else self.draft.seed
        self.enter(f"Drawing {prompts[0].theme or prompts[0].text}")
        drawings = []
        # `go_on` stops a drawing between two of its steps.
        for each in generate_sets(
            generator, prompts, seed=seed, best_of=DRAWINGS, judge=reward, keep_all=True, on_step=self.go_on
        ):
            recipe = Recipe.model_validate(recipe_texts(each, judge=self.names.judge))
            note = recipe.prompt.rstrip(".") if recipe.sources else ""
            drawings.append(_judged(each, recipe, note=note, looks=self.looks, **fields))
        self.draft.seed = None
        return drawings

    def _open(self, drawings: Sequence[tuple[Image, Recipe]]) -> None:
        self.keep(page=self.folder.add_page(drawings), drawing=0)
        self.folder.removal = ""  # the undo of an old one would be a surprise

    # --- an existing page -------------------------------------------------------------------------------------------

    def add_pictures(self, pictures: Sequence[tuple[Image, str]], texts: Mapping[str, str]) -> None:
        """Make a page of pictures of any program, a panel each, or of one with the texts of its recipe."""
        grid = layout_for(len(pictures))
        image = page_of([image for image, _ in pictures], grid)
        note = ", ".join([name for _, name in pictures])
        self._open([(image, Recipe.model_validate({"layout": str(grid), "note": note, **texts}))])

    def check(self, drawing: Drawing) -> None:
        """Check whether the panels of a page belong together, and redraw the odd panels.

        The verdict is in the drawing's recipe. The page after the repair and its tries are a new page. Panels of
        another program, which has no recipe, are those of the draft, if it has as many, and of the draft's character;
        without texts they are checked alone.
        """
        from pacorl.gate.check import check_set
        from pacorl.generate.repair import repair_set
        from pacorl.generate.separate import panel_prompts

        recipe, panels = drawing.recipe, drawing.panels
        if self.names.judge == TINY and recipe.model != TINY:
            raise ValueError(PRACTICE_ONLY)
        # A picture of another program has no texts: the form describes it.
        theme, lines = self.panels
        if not recipe.panels and len(lines) == recipe.grid.count:
            recipe = recipe.updated(theme=theme, panels=lines)
        if not recipe.prompt and self.draft.character:
            recipe = recipe.updated(characters=[self.draft.character])
        generator, reward = self._models(recipe.character)
        names = [f"panel {number}" for number in range(1, len(panels) + 1)]
        theme = shared_text(recipe.prompt)

        def gate(images: Sequence[Image]) -> Check:
            self.enter("Checking")
            with generator.judging():
                check = check_set(reward.judge, images, least=LEAST, names=names, theme=theme)
                # With one picture, and by the description, as in the ranking.
                for hero in self.cast(recipe):
                    first = [(hero.name, [open_image(hero.images[0])])]
                    beside = check_set(
                        reward.judge, images, least=LEAST, names=names, characters=first, theme=hero.text
                    )
                    check = check.with_lower(beside)
            return check

        # Without a text no panel can be drawn again, and an editor draws none from a text alone.
        can_redraw = bool(recipe.panels) and self.spec().sets
        prompts = panel_prompts(self.set_of(recipe), self.names.model) if can_redraw else []
        redraw = self._redrawing(generator, prompts, panels[0], seed=recipe.seed + 1)
        repair = repair_set(panels, gate=gate, redraw=redraw, tries=TRIES if can_redraw else 0)
        # The verdict stays with the page that was checked, also if nothing was repaired.
        drawing.rewrite(**_fields_of(repair.before), judge=self.names.judge)
        if not repair.tries:
            return
        seeds = {str(panel + 1): each.texts["seed"] for panel, each in repair.replaced.items()}
        after = recipe.updated(
            note=f"Drawn again: panel {', '.join(seeds)}" if seeds else NO_BETTER,
            redrawn=recipe.redrawn | seeds,
            tied=1,
            judge=self.names.judge,
            **_fields_of(repair.after),
        )
        pages = [(page_of(repair.images, recipe.grid, panels[0].size), after)]
        for each in repair.tries:
            pages.append((each.image, Recipe(note=f"Panel {each.panel + 1}: {each.verdict}")))
        self._open(pages)

    def _redrawing(self, generator: Generator, prompts: Sequence[Prompt], panel: Image, *, seed: int) -> Redraw:
        """Return the function that redraws a panel of a page by its prompt, in the size of `panel`."""
        from pacorl.generate.repair import redraw_by

        # The practice model has a size of its own.
        size = None
        if self.names.model != TINY:
            size = generator.policy.nearest_size(Size(panel.height, panel.width))
        return redraw_by(generator, prompts, seed=seed, size=size, on_step=self.go_on)

    # --- characters --------------------------------------------------------------------------------------------------

    def training(self, character: str) -> Training:
        """Return a character's training for the model that draws: a LoRA fits one model only."""
        return Training(self.folder.path / "loras" / re.sub(r"\W+", "-", self.names.model) / character)

    def teach(self, character: str) -> None:
        """Teach a character to the model that draws, in a process of its own, or let a stopped training go on.

        The process executes no file that a config names: the folder may be somebody else's.
        """
        self.unload()  # two generators would not fit most cards
        self.folder.removal = ""  # the former teaching could not return beside this one
        training = self.training(character)
        command = ["-m", "pacorl", "train-character", str(self.folder.character_folder(character))]
        command += [f"out={training.run}", *training_recipe(self.names), "--resume", "auto", "--stop-with-stdin"]

        def phase() -> str:
            words = f"Teaching {plain(character)}"
            if training.step >= 0:
                words += f", step {training.step} of at most {training.config['steps']}"
            return words

        self._run_child(command, phase, **{NO_USER_FILES: "1"})


def lines_of(lines: Sequence[str]) -> list[str]:
    return [line.strip() for line in lines if line.strip()]


def _fields_of(check: Check) -> dict[str, Any]:
    """Return the fields that a check gives to a recipe, in place of those of a ranking."""
    return {
        "checked": render("checked.txt", check=check).splitlines(),
        "odd": check.failed[0] if check.failed else None,
        "score": check.scores.mean,
        "likeness": None,
        "matrix": check.scores.matrix,
    }


def _judged(image: GeneratedImage, recipe: Recipe, **changes: object) -> tuple[Image, Recipe]:
    """Add the judgement of an image to its recipe; the score is that of the panels with each other."""
    assert image.judged, "a candidate"
    parts = image.judged.parts
    scores = {"score": parts.get("together", image.judged.score), "likeness": parts.get("reference")}
    return image.image, recipe.updated(tied=image.tied, matrix=image.judged.matrix, **scores, **changes)
