"""The studio's models and uploads, and the work of its jobs: generate and rank candidates, judge uploads."""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from PIL.Image import Image, Resampling

from pacorl.config.options import StudioModels, UsageError
from pacorl.core.grid import join, parse_layout, shared_text, split
from pacorl.generate.storyboard import MENTION, Storyboard, pages, parse_storyboard, spoken
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.io.uploads import open_upload, submit_upload
from pacorl.judge import default_judge, judge_for
from pacorl.models.policies import POLICIES, kind_of, tiny_spec
from pacorl.records.compose import layout_for, prompt_from
from pacorl.studio.jobs import Job
from pacorl.studio.model_choice import BUILDING, with_memory
from pacorl.tiny.characters import EDITS, KEPT, VALUES, character_prompts
from pacorl.tiny.characters import INSTRUCTIONS as TINY_INSTRUCTIONS
from pacorl.tiny.words import attributes_in
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from pacorl.gate.check import Check
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.generated_images import GeneratedImage
    from pacorl.generate.generator import Generator
    from pacorl.generate.repair import Try
    from pacorl.models.policies.spec import PolicySpec

MAX_BYTES = 20 * 1024 * 1024
MAX_PIXELS = 25_000_000
MAX_IMAGES = 12
"""Maximum number of a browser's uploads, 66 pairs."""
MAX_ALL_IMAGES = 4 * MAX_IMAGES
PREVIEW = 512  # pixels of the longer side
PRACTICE_JUDGE = "the practice judge knows pictures of the practice model alone"
PAGE = "page"
"""Name of the repaired page among a job's images."""


# --- uploads -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Upload:
    """An uploaded image, and its preview."""

    id: str
    name: str
    data: bytes
    preview: bytes
    size: tuple[int, int]
    owner: str = ""
    """The browser of the upload."""

    def open(self) -> Image:
        return open_upload(self.data, name=self.name, max_pixels=MAX_PIXELS)


class Uploads:
    """The present uploads of each browser: few, and in memory only."""

    def __init__(self) -> None:
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()

    async def add(self, data: bytes, name: str, *, owner: str = "") -> Upload:
        """Check an image and store it. It waits in no thread for its turn to be decoded.

        Raises:
            ImageError: if `data` is no suitable image; it begins with the name.
            ValueError: if there are too many.
        """
        # Messages are one line, and contain the name.
        name = " ".join(name.split())[:120] or "image"
        image = await asyncio.wrap_future(submit_upload(data, name=name, max_pixels=MAX_PIXELS))
        preview = await asyncio.to_thread(lambda: png_bytes(preview_of(image)))
        upload = Upload(secrets.token_hex(8), name, data, preview, image.size, owner)
        # Decoding took its time outside of the lock, so the count is checked here, together with the change.
        with self._lock:
            if len(self.of(owner)) >= MAX_IMAGES or len(self._uploads) >= MAX_ALL_IMAGES:
                raise ValueError(f"{name}: {len(self._uploads)} images are here already; take one away first")
            self._uploads[upload.id] = upload
        return upload

    def of(self, owner: str) -> list[Upload]:
        """List the uploads of one browser."""
        # A copy, because requests on other threads add and remove uploads.
        return [upload for upload in list(self._uploads.values()) if upload.owner == owner]

    def find(self, name: str, *, owner: str = "") -> Upload | None:
        for upload in self.of(owner):
            if upload.id == name:
                return upload
        return None

    def remove(self, name: str, *, owner: str = "") -> None:
        with self._lock:
            if self.find(name, owner=owner):
                del self._uploads[name]


def preview_of(image: Image) -> Image:
    small = image.copy()
    small.thumbnail((PREVIEW, PREVIEW))
    return small


# --- models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling settings of candidates, without their prompt."""

    candidates: int = 4
    seed: int = 0
    size: Size | None = None
    steps: int | None = None
    lora_scale: float = 1.0
    compare: bool = False
    """Whether each candidate has the base model's image of the same seed, if there is an adapter."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Guidance and negative prompt; None for the checkpoint's default."""


class ModelHost:
    """The models, loaded by the first job that needs them. Only the worker's thread calls its methods."""

    def __init__(self, names: StudioModels) -> None:
        self.names = names
        self._generators: dict[str, Generator] = {}
        """Checkpoint and kind → the generator. Embedded models stay together, of others one at a time."""
        self._rewards: dict[str, PacoReward] = {}
        """Judge → its reward; the practice judge of edits is another one."""
        self._sources = TemporaryDirectory(prefix="pacorl-studio-")

    def load(self, job: Job) -> dict[str, Any]:
        """Import the libraries and load the weights, as the first job."""
        self._models(job)
        return {}

    def choose(self, job: Job, names: StudioModels) -> dict[str, Any]:
        """Load other models in place of the former ones."""
        # An unchanged judge stays, since loading a large one takes minutes.
        if (names.judge, names.memory) == (self.names.judge, self.names.memory):
            self._generators.clear()
        else:
            self.unload()
        self.names = names
        return self.load(job)

    def close(self) -> None:
        self.unload()
        self._sources.cleanup()

    def unload(self) -> None:
        """Release the models; the next job loads them again."""
        self._generators.clear()
        for reward in self._rewards.values():
            reward.close()
        self._rewards.clear()

    @property
    def modes(self) -> dict[str, str]:
        """Unsupported mode → reason and fix."""
        names = self.names
        modes = {}
        if not spec_of(names).sets:
            modes["set"] = modes["storyboard"] = (
                f"{names.model} changes pictures and makes no sets from words. Start from a picture, or choose a model "
                "that draws under Models."
            )
        if not editor_of(names):
            modes["edit"] = f"{names.model} draws from words alone and sees no picture. Choose an editor under Models."
        return modes

    def _models(self, job: Job, *, edits: bool = False) -> tuple[Generator, PacoReward]:
        names = self.names
        model = names.model
        kind = spec_of(names).kind
        strengths = names.strengths
        if edits and not POLICIES[kind].edits:
            model = editor_of(names)
            if not model:
                raise ValueError(self.modes["edit"])
            kind = kind_of(model, edits=True)
            strengths = {}  # they belong to the generator
        if model == TINY and POLICIES[kind].edits and not strengths:
            # For people who draw, the LoRA that keeps a hero.
            strengths = dict.fromkeys(tiny_spec(edits=True).committed.adapters, 1.0)

        key = f"{kind} {model}"
        judge = judge_for(names.judge, names.judge_adapter, edits=edits)
        if key not in self._generators or judge not in self._rewards:
            job.enter("Loading the models")
            with BUILDING:
                fitted = with_memory(names, model, kind)
                if key not in self._generators:
                    # Two published generators would not fit most cards; embedded models are small.
                    if model != TINY:
                        self._generators.clear()
                    self._generators[key] = self._load(fitted, model, kind, strengths)
                if judge not in self._rewards:
                    self._rewards[judge] = self._load_judge(fitted, judge, self._generators[key])
        return self._generators[key], self._rewards[judge]

    def _load(self, names: StudioModels, model: str, kind: str, strengths: Mapping[str, float]) -> Generator:
        from pacorl.generate.generator import Generator
        from pacorl.io.quiet import quiet_loading
        from pacorl.runtime.cores import use_cores

        use_cores()
        quiet_loading()
        generator = Generator.from_pretrained(model, kind=kind, adapter=strengths, memory=names.memory)
        for reward in self._rewards.values():
            generator.judged_by(reward.judge)
        return generator

    def _load_judge(self, names: StudioModels, judge: str, generator: Generator) -> PacoReward:
        """Load a judge, which serves all generators: they are exchanged more often."""
        from pacorl.gate.paco_reward import PacoReward

        calibration = (names.calibration or "") if judge == names.judge else ""
        with generator.judging():
            reward = PacoReward.from_pretrained(judge, **names.judge_access, calibration=calibration)
        for other in self._generators.values():
            other.judged_by(reward.judge)
        return reward

    def make_set(
        self, job: Job, prompt: Prompt, sampling: Sampling, *, sources: Sequence[Upload] = ()
    ) -> dict[str, Any]:
        """Generate and rank candidates of a set, or of an edit of `sources`."""
        from pacorl.generate.sets import generate_sets

        generator, reward = self._models(job, edits=bool(sources))

        # The sources of an edit.
        if sources:
            sampling = self._of_editor(sampling)
            prompt = replace(prompt, sources=self._files_of(sources))
        for number, path in enumerate(prompt.sources, 1):
            job.images[f"source-{number}"] = path.read_bytes()

        # The candidates.
        options = _options(job, generator, reward, sampling)

        def generate(phase: str, *, base: bool) -> list[dict[str, Any]]:
            job.enter(phase, total=(sampling.steps or generator.default_steps) * sampling.candidates)
            images = generate_sets(generator, [prompt], **options, keep_all=True, base=base)
            ranked = [_candidate_dict(job, image, reward.name) for image in images]
            # A tie is in the order of its seeds, and the page shows its scores.
            ranked.sort(key=lambda line: -1.0 if line["score"] is None else line["score"], reverse=True)
            return [{**one, "rank": rank} for rank, one in enumerate(ranked, 1)]

        ranked = generate("Generating", base=False)
        result = _result(job, "edit" if prompt.sources else "set", generator, reward, sampling)
        result["theme"] = prompt.theme or prompt.text
        result["candidates"] = ranked

        # The base model's images of the same seeds; the page shows the ranking meanwhile.
        if sampling.compare and generator.adapter:
            job.result = result
            options["lora_scale"] = 1.0
            base_of = {image["seed"]: image for image in generate("Generating without LoRA", base=True)}
            compared = [{**candidate, "base": base_of[candidate["seed"]]} for candidate in ranked]
            result = {**result, "candidates": compared}
        return result

    def describe(self, job: Job, pictures: Sequence[Path]) -> dict[str, str]:
        """Caption pictures of a character by the judge's words: file name → caption."""
        from pacorl.character_training.pictures import describe_picture

        _, reward = self._models(job)
        job.enter("Describing the pictures", total=len(pictures))
        captions = {}
        for path in pictures:
            captions[path.name] = describe_picture(path, reward.judge)
            job.advance(1)
        return captions

    def make_storyboard(self, job: Job, board: Storyboard, sampling: Sampling) -> dict[str, Any]:
        """Generate the pages of a storyboard, each the best of its candidates."""
        from pacorl.generate.storyboard import generate_storyboard

        generator, reward = self._models(job)
        pages = -(-len(board.scenes) // board.layout.count)
        job.enter("Generating", total=(sampling.steps or generator.default_steps) * sampling.candidates * pages)
        options = _options(job, generator, reward, sampling)
        images = generate_storyboard(generator, board, **options)
        result = _result(job, "storyboard", generator, reward, sampling)
        result["theme"] = board.title
        result["candidates"] = []
        for page, image in enumerate(images, 1):
            result["candidates"].append({**_candidate_dict(job, image, reward.name), "rank": page})
        return result

    def make_sheet(
        self,
        job: Job,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        *,
        sources: Sequence[Path],
        earlier: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """Draw pictures of a character by edits of its own, each with ranked candidates.

        Args:
            prompts: picture of the sheet → its instruction.
            sampling: settings; the seeds of all pictures follow each other.
            sources: the character's images, of which the editor takes as many as it can.
            earlier: candidates of the other pictures, whose images the job has.
        """
        from pacorl.generate.sets import generate_sets

        generator, reward = self._models(job, edits=True)
        sampling = self._of_editor(sampling)
        sources = tuple(sources[: generator.policy.max_sources])
        job.images["source-1"] = sources[0].read_bytes()
        steps = sampling.steps or generator.default_steps
        job.enter("Drawing the sheet", total=steps * sampling.candidates * len(prompts))
        edits = [replace(prompt, sources=sources) for prompt in prompts.values()]
        images = generate_sets(generator, edits, **_options(job, generator, reward, sampling), keep_all=True)

        drawn = []
        for index, image in enumerate(images):
            position = list(prompts)[index // sampling.candidates]
            drawn.append({**_candidate_dict(job, image, reward.name), "picture": position})
        result = _result(job, "sheet", generator, reward, sampling)
        # Ties are ordered by score too, which the page shows.
        result["candidates"] = sorted([*drawn, *earlier], key=lambda line: (line["picture"], -(line["score"] or 0)))
        return result

    def _of_editor(self, sampling: Sampling) -> Sampling:
        """Drop the strength and the comparison if another model edits: they belong to the one that draws."""
        if spec_of(self.names).edits:
            return sampling
        return replace(sampling, lora_scale=1.0, compare=False)

    def _files_of(self, sources: Sequence[Upload]) -> tuple[Path, ...]:
        """Write uploads as files for policies; equal uploads are one file, so that each is encoded once."""
        paths = []
        for number, upload in enumerate(sources, 1):
            folder = Path(self._sources.name) / sha256(upload.data).hexdigest()
            paths.append(folder / f"source-{number}.png")
            if not paths[-1].exists():
                write_atomic(paths[-1], png_bytes(upload.open()))
        return tuple(paths)

    def _check_known(self, uploads: Sequence[Upload]) -> None:
        """Raise ValueError for images of which the practice judge can say nothing: any but the practice model's."""
        if self.names.judge == TINY:
            try:
                default_judge(upload.data for upload in uploads)
            except UsageError:
                raise ValueError(f"{PRACTICE_JUDGE}; choose another judge under Models") from None

    def judge(
        self,
        job: Job,
        uploads: Sequence[Upload],
        *,
        theme: str = "",
        criteria: Sequence[str] = (),
        grid: Grid | None = None,
        symmetric: bool = False,
    ) -> dict[str, Any]:
        """Judge every pair of some images, or of the panels of one grid image."""
        from pacorl.gate import score_set as scoring

        # The models of this job, loaded by the first job.
        self._check_known(uploads)
        generator, reward = self._models(job)
        job.enter("Judging")

        # Images and questions.
        names, images = _panels(uploads, grid)
        questions = scoring.questions_about(theme, {text: text for text in criteria})
        # The judge takes the generator's place on a small card.
        with generator.judging():
            scores = scoring.score_set(reward.judge, images, names=names, questions=questions, symmetric=symmetric)
        # Previews for the page, which may be smaller than the uploads.
        for number, image in enumerate(images):
            job.images[str(number)] = png_bytes(preview_of(image))

        # The result for the page.
        pairs = []
        for pair in scores.ranked:
            answer = {"p_yes": pair.p_yes, "by_question": pair.by_question, "error": pair.error}
            pairs.append({"images": [pair.first, pair.second], **answer})
        return {
            "names": list(scores.names),
            "questions": [[question.label, question.text] for question in scores.questions],
            "mean": scores.mean,
            "matrix": scores.matrix,
            "odd": scores.odd_one_out and asdict(scores.odd_one_out),
            "pairs": pairs,
            "judge": reward.name,
            "note": reward.note,
            "images": len(images),
        }

    def check(
        self,
        job: Job,
        uploads: Sequence[Upload],
        *,
        least: float,
        theme: str = "",
        criteria: Sequence[str] = (),
        grid: Grid | None = None,
        symmetric: bool = False,
        prompts: Sequence[Prompt] = (),
        tries: int = 0,
    ) -> dict[str, Any]:
        """Check a set as `pacorl repair` does, and redraw its worst panels.

        Args:
            least: threshold of a panel's score.
            prompts: prompt of each panel, if there are tries.
            tries: most redrawn panels.

        Raises:
            ValueError: if the judge can read none of the images.
        """
        from pacorl.gate.check import ControlError, check_set
        from pacorl.gate.score_set import questions_about
        from pacorl.generate.repair import redraw_by, repair_set

        # Models and images. New panels have the size of the first.
        self._check_known(uploads)
        generator, reward = self._models(job)
        names, images = _panels(uploads, grid)
        size = None if generator.model == TINY else Size(images[0].height, images[0].width)
        generator.check(prompts, size)
        # The controls and the page's own state of the repair.
        draw = redraw_by(generator, prompts, size=size, on_step=job.advance)
        questions = questions_about(theme, {text: text for text in criteria})
        job.images = {str(index): png_bytes(image) for index, image in enumerate(images)}
        result: dict[str, Any] = {"judge": reward.name, "note": reward.note, "images": list(job.images), "tries": []}
        panels = list(images)
        strict_check = partial(check_set, symmetric=symmetric)

        def publish(check: Check) -> None:
            result.update(check.to_dict(), odd=check.odd_one_out, verdict=_verdict(check))
            result.update(matrix=check.scores.matrix, mean=check.scores.mean)
            job.result = dict(result)  # a copy: requests read it meanwhile

        def gate(panels: Sequence[Image]) -> Check:
            job.enter("Checking")
            with generator.judging():
                check = strict_check(reward.judge, panels, least=least, names=names, questions=questions)
            # The first check is shown at once; later checks only if the new panel is accepted.
            if not job.result:
                publish(check)
            return check

        def redraw(panel: int, number: int) -> tuple[Image, Mapping[str, str]] | None:
            job.enter(f"Redrawing image {panel + 1}, try {number} of {tries}", total=generator.default_steps)
            return draw(panel, number)

        # The page shows each attempt as soon as it is judged.
        def show(attempt: Try) -> None:
            name = f"try-{attempt.number}"
            verdict = attempt.error or "no score, left out"
            if attempt.score is not None:
                outcome = "better, kept" if attempt.accepted else "not better, left out"
                verdict = f"{attempt.score:.2f} of 1, {outcome}"
            job.images[name] = png_bytes(attempt.image, {**attempt.texts, "verdict": verdict})
            result["tries"].append({**attempt.to_dict(), "image": name, "verdict": verdict})
            if attempt.check and attempt.accepted:
                result["images"][attempt.panel] = name
                panels[attempt.panel] = attempt.image
                # The whole page of now, at the size of the first: a cancelled repair has one too.
                origin = {key: attempt.texts[key] for key in ("Software", "model") if key in attempt.texts}
                job.images[PAGE] = png_bytes(page_of(panels, grid), origin)
                publish(attempt.check)

        # Check, and redraw.
        try:
            repair_set(images, gate=gate, redraw=redraw, tries=tries, on_try=show)
        except ControlError:
            judge = "The practice judge" if self.names.judge == TINY else f"The judge {reward.name}"
            raise ValueError(
                f"{judge} cannot read these {'panels' if grid else 'images'}. Pick another candidate in Make, another "
                "judge under Models, or a lower least score."
            ) from None
        return result

    def redraw_panel(
        self, job: Job, candidate: Mapping[str, Any], page: Image, *, panel: int, prompt: Prompt, sampling: Sampling
    ) -> dict[str, Any]:
        """Draw one panel of a made page again, whatever the judge says about it, and score the new page.

        Args:
            candidate: the page in the result on the page.
            page: its image.
            panel: index of the panel.
            prompt: of the panel (`panel_prompt`).
            sampling: settings; the seed is the new panel's.

        Returns:
            The result of a set with the new page, and the page before as its source.
        """
        from pacorl.gate.score_set import questions_about, score_set
        from pacorl.generate.sets import generate_sets

        generator, reward = self._models(job)
        grid = parse_layout(candidate["layout"])
        panels = split(page, grid)
        size = None if generator.model == TINY else Size(panels[0].height, panels[0].width)

        # The panel, with the settings of the page.
        generator.check([prompt], size)
        options = _options(job, generator, reward, sampling) | {"size": size, "judge": None}
        job.enter(f"Drawing panel {panel + 1} again", total=sampling.steps or generator.default_steps)
        (made,) = generate_sets(generator, [prompt], **options)
        panels[panel] = made.panels[0]

        # The new page, by the question of its ranking.
        job.enter("Judging")
        new = page_of(panels, grid)
        with generator.judging():
            scores = score_set(reward.judge, split(new, grid), questions=questions_about(candidate["shared"]))
        former = candidate["recipe"].get("redrawn")
        redrawn = f"panel {panel + 1}, seed {sampling.seed}"
        recipe = {**candidate["recipe"], "redrawn": f"{former}; {redrawn}" if former else redrawn}
        job.images |= {PAGE: png_bytes(new, recipe), "source-1": png_bytes(page)}
        result = _result(job, "set", generator, reward, sampling)
        error = scores.missing[0].error if scores.missing else ""
        scored = {"score": scores.mean, "matrix": scores.matrix, "error": error}
        result["candidates"] = [redrawn_page(candidate, new, recipe) | scored]
        return result


def redrawn_page(candidate: Mapping[str, Any], page: Image, recipe: Mapping[str, str]) -> dict[str, Any]:
    """Describe a page with redrawn panels as the only candidate of a set, of the texts and layout of a `candidate`."""
    described = {key: candidate[key] for key in ("panels", "shared", "layout")}
    size = {"width": page.width, "height": page.height}
    return described | size | {"image": PAGE, "base": None, "recipe": recipe, "rank": 1, "tied": 1, "seed": None}


def page_of(panels: Sequence[Image], grid: Grid | None) -> Image:
    """Join panels in one image, all at the size of the first."""
    size = panels[0].size
    same = [panel if panel.size == size else panel.resize(size, Resampling.LANCZOS) for panel in panels]
    return join(same, grid or layout_for(len(panels)))


def _verdict(check: Check) -> list[str]:
    """Word the result of a check for a person: who fits least, how many fail, and the pairs that say otherwise."""
    names = check.scores.names
    count = len(check.panels)
    verdict = [f"All {count} belong together.", f"Each has a median of {check.least:g} or more with the others."]
    if low := check.failed:
        name = names[low[0].panel]
        score = "no score" if low[0].score is None else f"{low[0].score:.2f} of 1"
        least = f"{name} fits the others least ({score})."
        if len(low) == count > 2:
            least = f"No image fits most of the others: {least}"
        verdict = [
            least[0].upper() + least[1:],
            f"{len(low)} of {count} {'is' if len(low) == 1 else 'are'} below {check.least:g}.",
        ]

    # One pair of several does not move a median, and the table shows it.
    failed = {panel.panel for panel in check.failed}
    against = []
    for pair in check.scores.pairs:
        if pair.p_yes is not None and failed.isdisjoint((pair.first, pair.second)) != (pair.p_yes >= check.least):
            text = f"But {names[pair.first]} and {names[pair.second]} have {pair.p_yes:.2f} together."
            against.append((abs(pair.p_yes - check.least), text))
    return [*verdict, *(text for _, text in sorted(against, reverse=True)[:2])]


def _panels(uploads: Sequence[Upload], grid: Grid | None) -> tuple[tuple[str, ...], tuple[Image, ...]]:
    """Open uploads, or cut the one upload; names and images."""
    from pacorl.gate.score_set import panels_of

    names = tuple(upload.name for upload in uploads)
    images = tuple(upload.open() for upload in uploads)
    if not grid:
        return names, images
    _, panels = panels_of(names[0], images[0], grid)
    return tuple(f"panel {number}" for number in range(1, grid.count + 1)), panels


def _options(job: Job, generator: Generator, reward: PacoReward, sampling: Sampling) -> dict[str, Any]:
    """Collect the options that sets and storyboards share, and set those of the generator's kind."""
    with page_terms():
        generator.set_options(**sampling.options)
    return {
        "seed": sampling.seed,
        "best_of": sampling.candidates,
        "judge": reward.judge,
        "size": sampling.size,
        "steps": sampling.steps,
        "lora_scale": sampling.lora_scale if generator.adapter else 1.0,
        "on_step": job.advance,
    }


def _result(job: Job, kind: str, generator: Generator, reward: PacoReward, sampling: Sampling) -> dict[str, Any]:
    """Describe a set for the page and the history; the caller adds its theme and candidates."""
    return {
        "kind": kind,
        "images": f"/images/{job.id}",
        "judge": reward.name,
        "model": generator.model,
        "adapter": generator.adapter,
        "lora_scale": sampling.lora_scale,
        "sources": [name for name in job.images if name.startswith("source-")],
    }


def _candidate_dict(job: Job, image: GeneratedImage, judge: str) -> dict[str, Any]:
    from pacorl.generate.generated_images import recipe_texts

    recipe = image.recipe
    judged = image.judged

    # The image stays on the server, under this name.
    name = f"{'adapter' if recipe.adapter else 'base'}-{recipe.seed}"
    texts = recipe_texts(image, judge=judge)
    job.images[name] = png_bytes(image.image, texts)
    return {
        "image": name,
        "base": None,
        "recipe": texts,
        "panels": _panel_texts(image.prompt) or [image.prompt.text],
        "shared": shared_text(image.prompt.text),
        "layout": str(image.prompt.grid),
        "width": image.image.width,
        "height": image.image.height,
        "rank": image.rank,
        "tied": image.tied,
        "seed": recipe.seed,
        "score": judged.score if judged else None,
        "matrix": judged.matrix if judged else [],
        "error": judged.error if judged else "",
    }


def spec_of(names: StudioModels) -> PolicySpec:
    """Return the kind of the model that draws."""
    return POLICIES.named(names.kind or kind_of(names.model))


def editor_of(names: StudioModels) -> str:
    """Return the model that changes pictures, which may be the one that draws; empty if there is none."""
    if spec_of(names).edits:
        return names.model
    return names.editor or (TINY if names.model == TINY else "")


# --- requests of the page ----------------------------------------------------------------------------------------


def prompt_for(names: StudioModels, theme: str, panels: Sequence[str], grid: Grid | None) -> Prompt:
    """Build the prompt of a set.

    Raises:
        ValueError: for fewer than two panels, and for words outside of the tiny generator's vocabulary.
    """
    if len(panels) < 2:
        raise ValueError(f"a set has two panels or more, {len(panels)} is described; describe each")
    with page_terms("“What all panels share”"):
        return prompt_from(names.model, theme=theme, panels=panels, grid=grid)


def panel_prompts(
    names: StudioModels, texts: Sequence[str], *, theme: str = "", references: Sequence[Path] = ()
) -> list[Prompt]:
    """Build the prompts that redraw the panels of a set, each from its text.

    Raises:
        ValueError: for an editor, and for words outside of the tiny generator's vocabulary.
    """
    from pacorl.generate.repair import panel_prompt

    kind = names.kind
    with page_terms():
        return [panel_prompt(names.model, text, theme=theme, kind=kind, references=references) for text in texts]


def edit_prompt(names: StudioModels, instruction: str) -> Prompt:
    """Build the prompt of an edit, to which the caller adds the sources.

    Raises:
        ValueError: for no instruction, and for words outside of the tiny editor's vocabulary.
    """
    if not instruction.strip():
        raise ValueError("the instruction is empty; describe the change of the image")
    prompt = Prompt(id=0, text=instruction.strip())
    if editor_of(names) == TINY:
        with page_terms():
            tiny_spec(edits=True).committed.check(prompt)
    return prompt


def board_for(names: StudioModels, document: Mapping[str, Any]) -> Storyboard:
    """Parse the storyboard of a form.

    Raises:
        ValueError: naming the faulty field, or the page that the model cannot generate.
    """
    board = parse_storyboard(document)
    with page_terms("the first character with the style"):
        pages(board, names.model)
    return board


def example(names: StudioModels, number: int) -> dict[str, Any]:
    """Return an example request for each mode of the model."""
    if names.model != TINY:
        theme, panels = EXAMPLES[number % len(EXAMPLES)]
        return {
            "theme": theme,
            "panels": list(panels),
            "instruction": INSTRUCTIONS[number % len(INSTRUCTIONS)],
            "board": STORYBOARDS[number % len(STORYBOARDS)],
        }

    # The tiny world's own words.
    rng = random.Random(number)
    prompt = rng.choice(character_prompts("test", 48, seed=number % 7))
    instruction = rng.choice(TINY_INSTRUCTIONS)
    subject, palette = prompt.theme.rsplit(", ", 1)
    hero = {"title": "A hero's day", "style": palette, "characters": {"hero": subject}}
    scenes = [f"{{hero}}, {text}" for text in _panel_texts(prompt)]
    return {
        "theme": prompt.theme,
        "panels": _panel_texts(prompt),
        "instruction": instruction,
        "board": {**hero, "scenes": scenes},
    }


EXAMPLES = (
    (
        "the same young dentist in light-blue scrubs with round glasses, in one soft watercolour style",
        ("explains oral hygiene to a child", "studies an X-ray", "cleans a patient's teeth", "fills a tooth"),
    ),
    (
        "a café's chalkboard in one hand-drawn white chalk font with the same ornaments",
        ("reads 'Fresh Brew'", "reads 'Daily Specials'", "reads 'Homemade'", "reads 'Sweet Treats'"),
    ),
)


def sheet_example(names: StudioModels) -> list[str]:
    """Return instructions for the pictures of a character's sheet, of which the page takes four."""
    if editor_of(names) == TINY:
        return [
            "Change the scene to sunset.",
            "Put a boat beside the hero.",
            "Put a tree beside the hero.",
            "Change the scene to day.",
            "Put a lamp beside the hero.",
            "Change the scene to night.",
        ]
    return list(SHEET)


SHEET = (
    "the same character from the side, walking",
    "the same character from the front, full body, plain background",
    "the same character from behind, looking back",
    "the same character, close-up of the face, smiling",
)
INSTRUCTIONS = ("make it a rainy evening", "give the person a red scarf", "draw it in soft watercolour")
STORYBOARDS = (
    {
        "title": "A day at the practice",
        "style": "soft watercolour, morning light",
        "characters": {"dentist": "a young dentist in light-blue scrubs with round glasses"},
        "scenes": [
            "{dentist} explains oral hygiene to a child",
            "{dentist} studies an X-ray",
            "{dentist} cleans a patient's teeth",
            "{dentist} waves goodbye at the door",
        ],
    },
)


def words(names: StudioModels) -> dict[str, list[str]]:
    """Return the tiny generator's vocabulary by attribute; empty for other generators."""
    if names.model != TINY:
        return {}
    return {attribute: list(values) for attribute, values in VALUES.items()}


def instructions(names: StudioModels) -> dict[str, list[str]]:
    """Return the tiny editor's instructions by attribute; empty for other editors."""
    if editor_of(names) != TINY:
        return {}
    texts = {}
    for attribute, form in EDITS.items():
        texts[attribute] = [form.format(value) for value in VALUES[attribute]]
    return texts


def description_note(names: StudioModels, description: str) -> str:
    """Name what the tiny generator cannot draw of a character; empty for other generators."""
    if names.model == TINY:
        try:
            with page_terms():
                attributes_in(description, where="“What it looks like”", required=KEPT)
        except ValueError as fault:
            return f"The practice model cannot draw this character in Make: {fault}. {OWN_WORLD}"
    return ""


OWN_WORLD = "It draws only heroes of its own small world; for a character of your own load a model under Models."
PAGE_TERMS = {
    "the tiny generator": "the practice model",
    "the tiny editor": "the practice model",
    "true_cfg_scale": "strict guidance",
    "guidance_scale": "guidance",
    "name a real --model, e.g. black-forest-labs/FLUX.1-dev": "choose another model under Models",
}
"""Words of the commands' messages → those of the page."""


@contextmanager
def page_terms(theme: str = "the theme") -> Iterator[None]:
    """Word a ValueError in the page's terms, where `theme` names the field of the common theme."""
    try:
        yield
    except ValueError as fault:
        text = str(fault)
        for term, page_word in (PAGE_TERMS | {"the theme": theme}).items():
            text = text.replace(term, page_word)
        raise ValueError(text) from None


def with_descriptions(text: str, cast: Mapping[str, str]) -> str:
    """Replace the names of characters in a text by their descriptions, as a storyboard does with `{name}`.

    Raises:
        ValueError: for braces around another name.
    """
    # The longest first: one character's name may begin another's.
    names = "|".join(map(re.escape, sorted(cast, key=len, reverse=True)))
    mentioned = re.sub(rf"\{{?\b({names})\b\}}?", r"{\1}", text) if cast else ""
    return spoken(mentioned, cast) if MENTION.search(mentioned) else text


def _panel_texts(prompt: Prompt) -> list[str]:
    return [text.removeprefix(f"{prompt.theme}, ") for text in prompt.panels]
