"""The studio's models and uploads, and what its jobs do with them: generate and rank candidates, judge uploads."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from pacorl.config.options import StudioModels
from pacorl.data.characters import VALUES, character_prompts
from pacorl.generate.compose import prompt_from
from pacorl.io.decoder import open_upload
from pacorl.io.images import png_bytes
from pacorl.studio.jobs import Job
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from pacorl.engine.generator import Generator
    from pacorl.generate.sets import GeneratedImage
    from pacorl.score.reward import PacoReward

MAX_BYTES = 20 * 1024 * 1024
MAX_PIXELS = 25_000_000
MAX_IMAGES = 12
"""Of one browser: 66 pairs."""
MAX_ALL_IMAGES = 4 * MAX_IMAGES
PREVIEW = 512  # pixels of the longer side


# --- uploads -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Upload:
    """One image as it came, and a small one to show."""

    id: str
    name: str
    data: bytes
    preview: bytes
    size: tuple[int, int]
    owner: str = ""
    """The browser that handed it in."""

    def open(self) -> Image:
        return open_upload(self.data, name=self.name, max_pixels=MAX_PIXELS)


class Uploads:
    """What each browser has handed in and not taken back: few, and in memory only."""

    def __init__(self) -> None:
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def add(self, data: bytes, name: str, *, owner: str = "") -> Upload:
        """Check an image and store it.

        Raises:
            ImageError: if `data` is no image that can be judged; it begins with the name.
            ValueError: if there are too many.
        """
        # A name stands in messages, which are one line.
        name = " ".join(name.split())[:120] or "image"
        image = open_upload(data, name=name, max_pixels=MAX_PIXELS)
        upload = Upload(secrets.token_hex(8), name, data, png_bytes(preview_of(image)), image.size, owner)
        # Decoding took its time outside of the lock, so the count is checked here, where nothing can come between.
        with self._lock:
            if len(self.of(owner)) >= MAX_IMAGES or len(self._uploads) >= MAX_ALL_IMAGES:
                raise ValueError(f"{name}: {len(self._uploads)} images are here already; take one away first")
            self._uploads[upload.id] = upload
        return upload

    def of(self, owner: str) -> list[Upload]:
        """All of one browser."""
        return [upload for upload in list(self._uploads.values()) if upload.owner == owner]

    def find(self, name: str, *, owner: str = "") -> Upload | None:
        return next((upload for upload in self.of(owner) if upload.id == name), None)

    def remove(self, name: str, *, owner: str = "") -> None:
        with self._lock:
            if self.find(name, owner=owner):
                del self._uploads[name]


def preview_of(image: Image) -> Image:
    small = image.copy()
    small.thumbnail((PREVIEW, PREVIEW))
    return small


# --- models ------------------------------------------------------------------------------------------------------


class ModelHost:
    """The models, loaded by the first job that needs them. Only the worker's thread calls its methods."""

    def __init__(self, names: StudioModels) -> None:
        self.names = names
        self.ready = threading.Event()
        self._loaded: tuple[Generator, PacoReward] | None = None

    def load(self, job: Job) -> dict[str, Any]:
        """The first job: imports and weights."""
        self._models(job)
        return {}

    def close(self) -> None:
        if self._loaded:
            self._loaded[1].close()

    def _models(self, job: Job) -> tuple[Generator, PacoReward]:
        if self._loaded is None:
            job.enter("Loading the models")
            self._loaded = load_models(self.names)
            self.ready.set()
        return self._loaded

    def make_set(
        self,
        job: Job,
        prompt: Prompt,
        *,
        candidates: int,
        seed: int,
        size: Size | None = None,
        steps: int | None = None,
        compare: bool = False,
    ) -> dict[str, Any]:
        """Ranked candidates; with `compare` each has the base model's image of the same seed."""
        from pacorl.generate.sets import generate_sets

        generator, reward = self._models(job)
        steps = steps or generator.default_steps

        def generate(phase: str, *, base: bool) -> list[dict[str, Any]]:
            job.enter(phase, total=steps * candidates)
            images = generate_sets(
                generator,
                [prompt],
                seed=seed,
                best_of=candidates,
                judge=reward.judge,
                keep_all=True,
                size=size,
                steps=steps,
                base=base,
                on_step=job.advance,
            )
            return [_candidate_dict(job, image, reward.name) for image in images]

        ranked = generate("Generating", base=False)
        result: dict[str, Any] = {
            "theme": prompt.theme or prompt.text,
            "panels": _panel_texts(prompt),
            "layout": str(prompt.grid),
            "judge": reward.name,
            "adapter": generator.adapter,
            "candidates": [{**candidate, "base": None} for candidate in ranked],
        }
        if compare and generator.adapter:
            job.result = result  # the page shows the ranking while the base model generates
            base_of = {image["seed"]: image for image in generate("Generating with the base", base=True)}
            result = {**result, "candidates": [{**one, "base": base_of[one["seed"]]} for one in ranked]}
        return result

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
        """Every pair of some images, or of the panels of one."""
        from pacorl.score import scores as scoring

        _, reward = self._models(job)
        job.enter("Judging")
        names: tuple[str, ...] = tuple(upload.name for upload in uploads)
        images = tuple(upload.open() for upload in uploads)
        if grid:
            names, images = scoring.panels_of(names[0], images[0], grid)
        questions = scoring.questions_about(theme, {text: text for text in criteria})
        scores = scoring.score_set(reward.judge, images, names=names, questions=questions, symmetric=symmetric)
        for number, image in enumerate(images):
            job.images[str(number)] = png_bytes(preview_of(image))
        return {
            "names": list(scores.names),
            "questions": [[question.label, question.text] for question in scores.questions],
            "mean": scores.mean,
            "matrix": scores.matrix,
            "odd": scores.odd_one_out and asdict(scores.odd_one_out),
            "pairs": [
                {"images": [pair.first, pair.second]}
                | {name: getattr(pair, name) for name in ("p_yes", "by_question", "error")}
                for pair in scores.ranked
            ],
            "judge": reward.name,
            "note": reward.note,
            "images": len(images),
        }


def load_models(names: StudioModels) -> tuple[Generator, PacoReward]:
    from pacorl.engine.generator import Generator
    from pacorl.engine.runtime import use_cores
    from pacorl.io.quiet import quiet_loading
    from pacorl.score.reward import PacoReward

    use_cores()
    quiet_loading()
    generator = Generator.load(names.model, kind=names.kind, adapter=names.adapter)
    return generator, PacoReward.from_pretrained(names.judge, **names.judge_access)


def _candidate_dict(job: Job, image: GeneratedImage, judge: str) -> dict[str, Any]:
    from pacorl.generate.files import recipe_texts

    recipe, judged = image.recipe, image.judged
    name = f"{'adapter' if recipe.adapter else 'base'}-{recipe.seed}"
    job.images[name] = png_bytes(image.image, recipe_texts(image, judge=judge))
    return {
        "image": f"/images/{job.id}/{name}.png",
        "width": image.image.width,
        "height": image.image.height,
        "rank": image.rank,
        "seed": recipe.seed,
        "score": judged.score if judged else None,
        "matrix": judged.matrix if judged else [],
        "error": judged.error if judged else "",
    }


# --- what the page asks for --------------------------------------------------------------------------------------


def prompt_for(names: StudioModels, theme: str, panels: Sequence[str], grid: Grid | None) -> Prompt:
    """The prompt of a form.

    Raises:
        ValueError: for fewer than two panels, and for words that the tiny generator does not know.
    """
    if len(panels) < 2:
        raise ValueError(f"a set has two panels or more, {len(panels)} is described; say what each shows")
    return prompt_from(names.model, theme=theme, panels=panels, grid=grid)


def example(names: StudioModels, number: int) -> dict[str, Any]:
    """Something that the model can be asked for."""
    if names.model != TINY:
        theme, panels = EXAMPLES[number % len(EXAMPLES)]
        return {"theme": theme, "panels": list(panels)}
    rng = random.Random(number)
    prompt = rng.choice(character_prompts("test", 48, seed=number % 7))
    return {"theme": prompt.theme, "panels": _panel_texts(prompt)}


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


def words(names: StudioModels) -> dict[str, list[str]]:
    """All that the tiny generator can be asked for; nothing for others."""
    return {attribute: list(values) for attribute, values in VALUES.items()} if names.model == TINY else {}


def _panel_texts(prompt: Prompt) -> list[str]:
    return [text.removeprefix(f"{prompt.theme}, ") for text in prompt.panels]
