"""The studio's models, and what its jobs do with them: generate and rank candidates, judge uploads."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pacorl.data.characters import VALUES, character_prompts
from pacorl.generate.compose import prompt_from
from pacorl.io.images import png_bytes
from pacorl.studio.jobs import Job
from pacorl.studio.uploads import Upload, preview_of
from pacorl.types import TINY, Grid, Prompt, Size

if TYPE_CHECKING:
    from pacorl.engine.generator import Generator
    from pacorl.generate.sets import GeneratedImage
    from pacorl.score.reward import PacoReward
    from pacorl.score.scores import Scores


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The generator and the judge, by the names that the command line takes."""

    model: str = TINY
    kind: str = ""
    adapter: str = ""
    judge: str = TINY
    judge_model: str = ""
    judge_adapter: str = ""
    api_key_env: str = ""


@dataclass(frozen=True, slots=True)
class SetRequest:
    """Candidates to generate for one prompt."""

    prompt: Prompt
    candidates: int
    seed: int
    size: Size | None
    steps: int | None
    compare: bool
    """Whether the base model also generates each seed."""


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """Images to judge."""

    uploads: Sequence[Upload]
    theme: str
    criteria: Sequence[str]
    grid: Grid | None
    symmetric: bool


class ModelHost:
    """The models, loaded by the first job that needs them. Only the worker's thread calls its methods."""

    def __init__(self, names: ModelNames) -> None:
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

    def make_set(self, job: Job, request: SetRequest) -> dict[str, Any]:
        """Ranked candidates, each with the base model's image of the same seed if the request compares them."""
        from pacorl.generate.sets import generate_sets

        generator, reward = self._models(job)
        steps = request.steps or generator.default_steps

        def generate(*, base: bool) -> list[GeneratedImage]:
            return generate_sets(
                generator,
                [request.prompt],
                seed=request.seed,
                best_of=request.candidates,
                judge=reward.judge,
                keep_all=True,
                size=request.size,
                steps=steps,
                base=base,
                on_step=job.advance,
            )

        job.enter("Generating", total=steps * request.candidates)
        result = _set_dict(job, request.prompt, generate(base=False), reward.name)
        if request.compare and generator.adapter:
            job.result = result  # the page shows the ranking while the base model generates
            job.enter("Generating with the base", total=steps * request.candidates)
            base_of = {made.recipe.seed: _candidate_dict(job, made, reward.name) for made in generate(base=True)}
            candidates = [{**candidate, "base": base_of[candidate["seed"]]} for candidate in result["candidates"]]
            result = {**result, "candidates": candidates}
        return result

    def judge(self, job: Job, request: JudgeRequest) -> dict[str, Any]:
        """Every pair of some images."""
        from pacorl.score import scores as scoring

        _, reward = self._models(job)
        job.enter("Judging")
        names: tuple[str, ...] = tuple(upload.name for upload in request.uploads)
        images = tuple(upload.open() for upload in request.uploads)
        if request.grid:
            names, images = scoring.panels_of(names[0], images[0], request.grid)
        questions = scoring.questions_about(request.theme, {text: text for text in request.criteria})
        scores = scoring.score_set(reward.judge, images, names=names, questions=questions, symmetric=request.symmetric)
        for number, image in enumerate(images):
            job.images[str(number)] = png_bytes(preview_of(image))
        return {**_score_dict(scores), "judge": reward.name, "note": reward.note, "images": len(images)}


def load_models(names: ModelNames) -> tuple[Generator, PacoReward]:
    from pacorl.engine.generator import Generator
    from pacorl.engine.runtime import use_cores
    from pacorl.io.quiet import quiet_loading
    from pacorl.score.reward import PacoReward

    use_cores()
    quiet_loading()
    generator = Generator.load(names.model, kind=names.kind, adapter=names.adapter)
    reward = PacoReward.from_pretrained(
        names.judge, adapter=names.judge_adapter, model=names.judge_model, api_key_env=names.api_key_env
    )
    return generator, reward


# --- what the page asks for --------------------------------------------------------------------------------------


def prompt_for(names: ModelNames, theme: str, panels: Sequence[str], grid: Grid | None) -> Prompt:
    """The prompt of a form.

    Raises:
        ValueError: for fewer than two panels, and for words that the tiny generator does not know.
    """
    if len(panels) < 2:
        raise ValueError(f"a set has two panels or more, {len(panels)} is described; say what each shows")
    return prompt_from(names.model, theme=theme, panels=panels, grid=grid)


def example(names: ModelNames, number: int) -> dict[str, Any]:
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


def words(names: ModelNames) -> dict[str, list[str]]:
    """All that the tiny generator can be asked for; nothing for others."""
    return {attribute: list(values) for attribute, values in VALUES.items()} if names.model == TINY else {}


def _panel_texts(prompt: Prompt) -> list[str]:
    return [text.removeprefix(f"{prompt.theme}, ") for text in prompt.panels]


# --- what the page shows -----------------------------------------------------------------------------------------


def _set_dict(job: Job, prompt: Prompt, made: Sequence[GeneratedImage], judge: str) -> dict[str, Any]:
    return {
        "theme": prompt.theme or prompt.text,
        "panels": _panel_texts(prompt),
        "layout": str(prompt.grid),
        "judge": judge,
        "adapter": made[0].recipe.adapter,
        "candidates": [{**_candidate_dict(job, candidate, judge), "base": None} for candidate in made],
    }


def _candidate_dict(job: Job, made: GeneratedImage, judge: str) -> dict[str, Any]:
    from pacorl.generate.files import recipe_texts

    name = f"{'adapter' if made.recipe.adapter else 'base'}-{made.recipe.seed}"
    job.images[name] = png_bytes(made.image, recipe_texts(made, judge=judge))
    judged = made.judged
    return {
        "image": f"/images/{job.id}/{name}.png",
        "width": made.image.width,
        "height": made.image.height,
        "rank": made.rank,
        "seed": made.recipe.seed,
        "score": judged.score if judged else None,
        "matrix": judged.matrix if judged else [],
        "error": judged.error if judged else "",
    }


def _score_dict(scores: Scores) -> dict[str, Any]:
    odd = scores.odd_one_out
    return {
        "names": list(scores.names),
        "questions": [[question.label, question.text] for question in scores.questions],
        "mean": scores.mean,
        "matrix": scores.matrix,
        "odd": odd and {"image": odd.image, "with_others": odd.with_others, "among_others": odd.among_others},
        "pairs": [
            {
                "images": [pair.first, pair.second],
                "p_yes": pair.p_yes,
                "by_question": pair.by_question,
                "error": pair.error,
            }
            for pair in scores.ranked
        ],
    }
