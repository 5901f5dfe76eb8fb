"""`generate_sets`: prompts → images, each the best of its candidates if a judge ranks them.

Candidate j of image i has the noise of seed + i · best_of + j, so that each can be generated again alone.
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
"""The candidates of one prompt → a judgement of each."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What generates an image again."""

    model: str
    adapter: str
    seed: int
    size: Size
    steps: int
    guidance_scale: float | None
    true_cfg_scale: float | None
    version: str


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """An image with its recipe, and the judgement of it if there is a judge."""

    prompt: Prompt
    image: Image
    """A grid image for a set."""
    recipe: Recipe
    judged: Judged | None = None
    rank: int = 1
    """Among its candidates, from 1."""
    candidates: int = 1

    @property
    def panels(self) -> list[Image]:
        """The grid image cut apart; one image for an edit."""
        return split(self.image, self.prompt.grid)


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
    on_step: Step = lambda images: None,
) -> list[GeneratedImage]:
    """Generates `count` images per prompt, in order.

    Args:
        best_of: candidates per image, of which the judge's best is kept, or all (best first) with `keep_all`.
        ask: whether the judge is asked about a set's theme or about its written criteria.
        rank: another way to judge candidates.
        base: whether the adapter is left off.
        on_step: is told how many images took each denoising step.

    Raises:
        ValueError: if a count is below 1, candidates have no judge, or the generator cannot make what is asked for.
        RuntimeError: if the judge answers nothing.

    Example:
        generator = Generator.load("tiny")
        (image,) = generate_sets(generator, [prompt], best_of=4, judge=judge)
        image.image.save("set.png")
    """
    if count < 1 or best_of < 1:
        raise ValueError(f"count {count} and best-of {best_of} must be at least 1")
    if best_of > 1 and judge is None and rank is None:
        raise ValueError(f"the best of {best_of} needs a judge to say which; name one with --judge")
    rank = rank or (_judge_rank(judge, generator, ask) if judge else None)
    images: list[GeneratedImage] = []
    for number in range(len(prompts) * count):
        prompt = prompts[number // count]
        seeds = [seed + number * best_of + candidate for candidate in range(best_of)]
        candidates = generator.sample([prompt] * best_of, seeds, size=size, steps=steps, base=base, on_step=on_step)
        recipes = [recipe_of(generator, prompt, one, size=size, steps=steps, base=base) for one in seeds]
        ranked = _ranked(prompt, candidates, recipes, rank)
        images += ranked if keep_all else ranked[:1]
    return images


def recipe_of(
    generator: Generator, prompt: Prompt, seed: int, *, size: Size | None, steps: int | None, base: bool = False
) -> Recipe:
    """The recipe of an image of these settings."""
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


def _judge_rank(judge: Judge, generator: Generator, ask: Ask) -> Rank:
    if generator.edits:
        return lambda prompts, images: judge_edits(judge, prompts, images)
    return lambda prompts, images: judge_sets(judge, prompts, images, ask=ask)


def _ranked(
    prompt: Prompt, images: Sequence[Image], recipes: Sequence[Recipe], rank: Rank | None
) -> list[GeneratedImage]:
    if rank is None:
        return [GeneratedImage(prompt, images[0], recipes[0])]
    judged = rank([prompt] * len(images), images)
    return [
        GeneratedImage(prompt, images[i], recipes[i], judged[i], rank=number, candidates=len(images))
        for number, i in enumerate(best_first(judged), 1)
    ]
