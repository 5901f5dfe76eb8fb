"""What the studio does: loads the models once, paints and ranks candidates, judges uploads."""

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
    from pacorl.generate.sets import Made
    from pacorl.score.reward import PacoReward, Scores


@dataclass(frozen=True, slots=True)
class Models:
    """What the studio works with, by the names that the command line takes."""

    model: str = TINY
    kind: str = ""
    adapter: str = ""
    judge: str = TINY
    judge_model: str = ""
    judge_adapter: str = ""
    api_key_env: str = ""


@dataclass(frozen=True, slots=True)
class SetOrder:
    """Candidates that somebody wants."""

    prompt: Prompt
    candidates: int
    seed: int
    size: Size | None
    steps: int | None
    compare: bool
    """Whether the base also paints each seed."""


class Bench:
    """The models, loaded by the first job that needs them, and the jobs' work. Only the worker's thread calls it."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.ready = threading.Event()
        self._painter: Generator | None = None
        self._reward: PacoReward | None = None

    def load(self, job: Job) -> dict[str, Any]:
        """The first job: imports and weights."""
        self._tools(job)
        return {}

    def close(self) -> None:
        if self._reward:
            self._reward.close()

    def _tools(self, job: Job) -> tuple[Generator, PacoReward]:
        if self._painter is None or self._reward is None:
            job.enter("Loading the models")
            self._painter, self._reward = load_tools(self.models)
            self.ready.set()
        return self._painter, self._reward

    def paint(self, job: Job, order: SetOrder) -> dict[str, Any]:
        """Ranked candidates, each with the base's picture of the same seed where that is wanted."""
        from pacorl.generate.sets import generate_sets

        painter, reward = self._tools(job)
        steps = order.steps or painter.default_steps

        def paint(*, base: bool) -> list[Made]:
            return generate_sets(
                painter,
                [order.prompt],
                seed=order.seed,
                best_of=order.candidates,
                judge=reward.judge,
                keep_all=True,
                size=order.size,
                steps=steps,
                base=base,
                on_step=job.advance,
            )

        job.enter("Painting", total=steps * order.candidates)
        made = paint(base=False)
        result = _result(job, order, made, reward.name)
        if order.compare and painter.adapter:
            job.result = result  # the ranking can be looked at while the base paints
            job.enter("Painting with the base", total=steps * order.candidates)
            based = {one.recipe.seed: _candidate(job, one, reward.name) for one in paint(base=True)}
            candidates = [{**one, "base": based[one["seed"]]} for one in result["candidates"]]
            result = {**result, "candidates": candidates}
        return result

    def judge(self, job: Job, order: JudgeOrder) -> dict[str, Any]:
        """Every pair of some pictures."""
        from pacorl.score import reward as scoring

        _, reward = self._tools(job)
        job.enter("Judging")
        names: tuple[str, ...] = tuple(upload.name for upload in order.uploads)
        images = tuple(upload.open() for upload in order.uploads)
        if order.grid:
            names, images = scoring.cut(names[0], images[0], order.grid)
        asked = scoring.questions_about(order.theme, {text: text for text in order.criteria})
        scores = scoring.score_set(reward.judge, images, names=names, asked=asked, symmetric=order.symmetric)
        for number, image in enumerate(images):
            job.pictures[str(number)] = png_bytes(preview_of(image))
        return {**_score_dict(scores), "judge": reward.name, "note": reward.note, "pictures": len(images)}


@dataclass(frozen=True, slots=True)
class JudgeOrder:
    """Pictures that somebody wants judged."""

    uploads: Sequence[Upload]
    theme: str
    criteria: Sequence[str]
    grid: Grid | None
    symmetric: bool


def load_tools(models: Models) -> tuple[Generator, PacoReward]:
    from pacorl.engine.generator import Generator
    from pacorl.engine.threads import use_cores
    from pacorl.io.quiet import quiet_loading
    from pacorl.score.reward import PacoReward

    use_cores()
    quiet_loading()
    painter = Generator.load(models.model, kind=models.kind, adapter=models.adapter)
    reward = PacoReward.from_pretrained(
        models.judge, adapter=models.judge_adapter, model=models.judge_model, api_key_env=models.api_key_env
    )
    return painter, reward


def prompt_for(models: Models, theme: str, panels: Sequence[str], grid: Grid | None) -> Prompt:
    """Raises ValueError where the model does not know what is asked for."""
    if len(panels) < 2:
        raise ValueError(f"a set has two panels or more, {len(panels)} is described; say what each shows")
    return prompt_from(models.model, theme=theme, panels=panels, grid=grid)


def example(models: Models, number: int) -> dict[str, Any]:
    """Something that the model can be asked for."""
    if models.model != TINY:
        one = EXAMPLES[number % len(EXAMPLES)]
        return {"theme": one[0], "panels": list(one[1])}
    rng = random.Random(number)
    prompt = rng.choice(character_prompts("test", 48, seed=number % 7))
    panels = [text.removeprefix(f"{prompt.theme}, ") for text in prompt.panels]
    return {"theme": prompt.theme, "panels": panels}


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


def words(models: Models) -> dict[str, list[str]]:
    """All that the tiny generator can be asked for; nothing for others."""
    return {name: list(values) for name, values in VALUES.items()} if models.model == TINY else {}


def _result(job: Job, order: SetOrder, made: Sequence[Made], judge: str) -> dict[str, Any]:
    prompt = order.prompt
    return {
        "theme": prompt.theme or prompt.text,
        "panels": [text.removeprefix(f"{prompt.theme}, ") for text in prompt.panels],
        "layout": str(prompt.grid),
        "judge": judge,
        "adapter": made[0].recipe.adapter,
        "candidates": [{**_candidate(job, one, judge), "base": None} for one in made],
    }


def _candidate(job: Job, made: Made, judge: str) -> dict[str, Any]:
    from pacorl.generate.files import recipe_texts

    name = f"{'adapter' if made.recipe.adapter else 'base'}-{made.recipe.seed}"
    job.pictures[name] = png_bytes(made.sheet, recipe_texts(made, judge=judge))
    judged = made.judged
    return {
        "picture": f"/pictures/{job.id}/{name}.png",
        "width": made.sheet.width,
        "height": made.sheet.height,
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
        "questions": [[one.label, one.text] for one in scores.asked],
        "mean": scores.mean,
        "matrix": scores.matrix,
        "odd": odd and {"image": odd.image, "with_others": odd.with_others, "among_others": odd.among_others},
        "pairs": [
            {"images": [one.first, one.second], "p_yes": one.p_yes, "by_question": one.by_question, "error": one.error}
            for one in scores.ranked
        ],
    }
