"""`generate_sets`: prompts → pictures, each the best of its candidates where a judge ranks them.

Candidate j of picture i has the noise of seed + i · best_of + j, so that each can be painted again alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from pacorl.core.grid import split
from pacorl.engine.generator import Generator, Step
from pacorl.generate.ranking import Judged, best_first, judge_edits, judge_sets
from pacorl.judges.pairwise import Ask
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judges.judge import Judge

Rank = Callable[[Sequence[Prompt], Sequence["Image"]], list[Judged]]
"""Candidates of one prompt → what is said of each."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What paints a picture again."""

    model: str
    adapter: str
    seed: int
    size: Size
    steps: int
    guidance_scale: float | None
    true_cfg_scale: float | None
    version: str


@dataclass(frozen=True, slots=True)
class Made:
    """One picture, with what made it and what the judge says."""

    prompt: Prompt
    sheet: Image
    recipe: Recipe
    judged: Judged | None = None
    rank: int = 1
    """Among its candidates, from 1."""
    candidates: int = 1

    @property
    def panels(self) -> list[Image]:
        """The sheet cut apart; one picture for an edit."""
        return split(self.sheet, self.prompt.grid)


def generate_sets(
    generator: Generator,
    prompts: Sequence[Prompt],
    *,
    seed: int = 0,
    count: int = 1,
    best_of: int = 1,
    judge: Judge | None = None,
    ask: Ask = "theme",
    rank: Rank | None = None,
    size: Size | None = None,
    steps: int | None = None,
    keep_all: bool = False,
    base: bool = False,
    on_step: Step = lambda pictures: None,
) -> list[Made]:
    """`count` pictures per prompt, in order.

    best_of: candidates per picture, of which the judge's best is kept, or all (best first) with `keep_all`.
    ask: whether the judge is asked about a set's theme or about its written criteria.
    rank: another way to judge them.
    on_step: hears of every denoising step (`steps` × candidates of them in all).
    Raises ValueError for counts below 1, candidates without a judge, and what the generator cannot paint; RuntimeError
    where the judge answers nothing.
    """
    if count < 1 or best_of < 1:
        raise ValueError(f"count {count} and best-of {best_of} must be at least 1")
    if best_of > 1 and judge is None and rank is None:
        raise ValueError(f"the best of {best_of} needs a judge to say which; name one with --judge")
    how = rank or (_judging(judge, generator, ask) if judge else None)
    made = []
    for number in range(len(prompts) * count):
        prompt = prompts[number // count]
        seeds = [seed + number * best_of + candidate for candidate in range(best_of)]
        same = [prompt] * best_of
        sheets = generator.sample(same, seeds, size=size, steps=steps, base=base, on_step=on_step)
        recipes = [recipe_of(generator, prompt, one, size=size, steps=steps, base=base) for one in seeds]
        ranked = _ranked(same, sheets, recipes, how)
        made += ranked if keep_all else ranked[:1]
    return made


def recipe_of(
    generator: Generator, prompt: Prompt, seed: int, *, size: Size | None, steps: int | None, base: bool = False
) -> Recipe:
    return Recipe(
        model=generator.model,
        adapter="" if base else generator.adapter,
        seed=seed,
        size=generator.size_of(prompt, size),
        steps=steps or generator.default_steps,
        guidance_scale=generator.guidance_scale,
        true_cfg_scale=generator.true_cfg_scale,
        version=version("pacorl"),
    )


def _judging(judge: Judge, generator: Generator, ask: Ask) -> Rank:
    if generator.edits:
        return lambda prompts, images: judge_edits(judge, prompts, images)
    return lambda prompts, sheets: judge_sets(judge, prompts, sheets, ask=ask)


def _ranked(
    prompts: Sequence[Prompt], sheets: Sequence[Image], recipes: Sequence[Recipe], how: Rank | None
) -> list[Made]:
    if how is None:
        return [Made(prompts[0], sheets[0], recipes[0])]
    judged = how(prompts, sheets)
    return [
        Made(prompts[i], sheets[i], recipes[i], judged[i], rank=place, candidates=len(sheets))
        for place, i in enumerate(best_first(judged), 1)
    ]
