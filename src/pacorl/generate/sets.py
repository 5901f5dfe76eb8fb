"""`generate_sets`: prompts → images, each the best of its candidates if a judge ranks them.

Candidate j of image i has the noise of seed + i · best_of + j, so that each can be generated again alone. A judge
ranks sets by their pairs of panels, edits by what was kept and followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.engine.generator import AnySize, Generator, Prompts, Step
from pacorl.io.images import open_image
from pacorl.judges.pairwise import Ask, Matrix, ask_edits, ask_pairs, errors_of, matrix_of, texts_about
from pacorl.quantize import NONE
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import mean_of
from pacorl.types import Prompt, Size, Verdict

if TYPE_CHECKING:
    from pacorl.judges.judge import Judge


@dataclass(frozen=True, slots=True)
class Recipe:
    """What generates an image again, beside its prompt; None is what the model does not read."""

    model: str
    """Checkpoint folder or hub name."""
    adapter: str
    """Folder, file or hub name; empty without one."""
    lora_scale: float | None
    """The adapter's strength: 1 is as it was trained."""
    seed: int
    """Of the initial noise."""
    size: Size
    """Of the image."""
    steps: int
    """Denoising steps."""
    guidance_scale: float | None
    """Under the name that the model's pipeline has for it."""
    true_cfg_scale: float | None
    """Of classifier-free guidance; 1 is without."""
    negative_prompt: str | None
    """What classifier-free guidance leads away from."""
    max_sequence_length: int | None
    """Most tokens that are read of a prompt."""
    version: str
    """pacorl's."""
    quantize: str | None = None
    """How the model's blocks were packed, by little memory."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a judge says of one image."""

    score: float | None
    """0..1; None if an answer is missing."""
    matrix: Matrix = ()
    """P(Yes) of every two panels of a set, None on the diagonal; empty for an edit."""
    parts: tuple[tuple[str, float | None], ...] = ()
    """What the score is made of, by name."""
    error: str = ""
    """Why there is no score."""


@dataclass(frozen=True, slots=True, repr=False)
class GeneratedImage:
    """An image with its recipe, and the judgement of it if there is a judge."""

    prompt: Prompt
    """What it shows."""
    image: Image
    """A grid image for a set."""
    recipe: Recipe
    """What makes it again."""
    judged: Judged | None = None
    """None without a judge."""
    rank: int = 1
    """Among its candidates, from 1."""
    candidates: int = 1
    """How many there were to choose from."""

    @property
    def panels(self) -> list[Image]:
        """The grid image cut apart; one image for an edit."""
        return split(self.image, self.prompt.grid)

    def __repr__(self) -> str:
        recipe, judged = self.recipe, self.judged
        facts = [repr(self.prompt.theme or self.prompt.text[:60]), str(recipe.size), f"seed {recipe.seed}"]
        facts += [f"score {judged.score:.4f}"] if judged and judged.score is not None else []
        facts += [f"number {self.rank} of {self.candidates}"] if self.candidates > 1 else []
        return f"GeneratedImage({', '.join(facts)})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of `pacorl generate --report`."""
        from pacorl.generate.files import SavedImage, page_of  # which imports this module
        from pacorl.report.page import notebook_frame

        return notebook_frame(page_of([SavedImage(self, Path("image"), ())], title=self.prompt.theme or "An image"))


@runtime_checkable
class HoldsJudge(Protocol):
    """What has a judge, as `PacoReward` does."""

    judge: Judge
    """Who ranks."""


Rank = Callable[[Sequence[Prompt], Sequence[Image]], list[Judged]]
"""The candidates of one prompt → a judgement of each."""


def generate_sets(
    generator: Generator,
    prompts: Prompts,
    *,
    seed: int = 0,
    count: int = 1,
    best_of: int = 1,
    judge: Judge | HoldsJudge | None = None,
    ask: Ask = "theme",
    rank: Rank | None = None,
    size: AnySize = None,
    steps: int | None = None,
    keep_all: bool = False,
    base: bool = False,
    lora_scale: float = 1.0,
    on_step: Step = lambda images: None,
) -> list[GeneratedImage]:
    """Generate `count` images per prompt, in order.

    Args:
        generator: what samples.
        prompts: one or several, as `Generator.sample` takes them.
        seed: of the first candidate.
        count: images per prompt.
        judge: a judge, or a `PacoReward` with one; needed if there are candidates to choose from.
        best_of: candidates per image, of which the judge's best is kept, or all (best first) with `keep_all`.
        ask: whether the judge is asked about a set's theme or about its written criteria.
        rank: another way to judge candidates.
        base: whether the adapter is left off.
        lora_scale: the adapter's strength.
        on_step: is told how many images took each denoising step.

    Raises:
        ValueError: if a count is below 1, candidates have no judge, or the generator cannot make what is asked for.
        RuntimeError: if the judge answers nothing.

    Example:
        generator = Generator.from_pretrained("tiny")
        (best,) = generate_sets(generator, prompt, best_of=4, judge=PacoReward.from_pretrained("tiny"))
        best.image.save("set.png")
    """
    if count < 1 or best_of < 1:
        raise ValueError(f"count {count} and best-of {best_of} must be at least 1")
    if best_of > 1 and judge is None and rank is None:
        raise ValueError(f"the best of {best_of} needs a judge to say which; give one as judge=")
    ranking_judge = judge.judge if isinstance(judge, HoldsJudge) else judge
    prompts = generator.prompts_of(prompts)
    options: Any = {"size": size, "steps": steps, "base": base, "lora_scale": lora_scale}
    images: list[GeneratedImage] = []
    for number in range(len(prompts) * count):
        prompt = prompts[number // count]
        rank_by = rank or (_rank_by(ranking_judge, prompt, ask=ask) if ranking_judge else None)
        seeds = [seed + number * best_of + candidate for candidate in range(best_of)]
        ranked = _ranked_candidates(generator, prompt, seeds, rank_by=rank_by, options=options, on_step=on_step)
        images += ranked if keep_all else ranked[:1]
    return images


def _ranked_candidates(
    generator: Generator,
    prompt: Prompt,
    seeds: Sequence[int],
    *,
    rank_by: Rank | None,
    options: Mapping[str, Any],
    on_step: Step,
) -> list[GeneratedImage]:
    """An image of each seed, best first; the first one alone if nobody ranks."""
    # All candidates in one call: the generator samples them in batches, and encodes their prompt once.
    candidates = generator.sample([prompt] * len(seeds), seeds, **options, on_step=on_step)
    recipes = [_recipe(generator, prompt, seed, **options) for seed in seeds]
    judged: Sequence[Judged | None] = [None]
    order = [0]
    if rank_by:
        with generator.judging():
            judged = judgements = rank_by([prompt] * len(seeds), candidates)
        order = best_first(judgements)
    return [
        GeneratedImage(prompt, candidates[i], recipes[i], judged[i], rank=position, candidates=len(seeds))
        for position, i in enumerate(order, 1)
    ]


def _rank_by(judge: Judge, prompt: Prompt, *, ask: Ask) -> Rank:
    """How a judge ranks the candidates of a prompt."""
    return partial(judge_edits, judge) if prompt.sources else partial(judge_sets, judge, ask=ask)


def _recipe(
    generator: Generator,
    prompt: Prompt,
    seed: int,
    *,
    size: AnySize,
    steps: int | None,
    base: bool,
    lora_scale: float,
) -> Recipe:
    options = generator.policy.options
    return Recipe(
        model=generator.model,
        adapter=(adapter := "" if base else generator.adapter),
        lora_scale=lora_scale if adapter else None,
        seed=seed,
        size=generator.size_of(prompt, size),
        steps=steps or generator.default_steps,
        guidance_scale=generator.guidance_scale,
        true_cfg_scale=generator.true_cfg_scale,
        # What a second forward reads: without guidance the option is there, and changes nothing.
        negative_prompt=options.negative_text,
        # Changes the image of a short prompt too, because attention reads the padding: from 64 to 128 tokens the tiny
        # generator's pixels change by 8 of 255.
        max_sequence_length=getattr(options, "max_sequence_length", None),
        version=version("pacorl"),
        quantize=None if options.quantize == NONE else options.quantize,
    )


# --- candidates by a judge -------------------------------------------------------------------------------------


def judge_sets(judge: Judge, prompts: Sequence[Prompt], images: Sequence[Image], *, ask: Ask = "theme") -> list[Judged]:
    """The consistency reward's own questions about every pair of panels, their mean the score.

    Raises:
        ValueError: for a single image, and if criteria are to be asked for and a prompt has none.
    """
    reward = Consistency(judge, ask=ask)
    reward.check(prompts)
    pairs = reward.pairs(prompts, images)
    return [
        Judged(score, matrix_of(verdicts, prompt.grid.count), error=errors_of(verdicts.values()))
        for score, verdicts, prompt in zip(reward.reduce(pairs), pairs, prompts, strict=True)
    ]


def judge_with_earlier(
    judge: Judge,
    prompts: Sequence[Prompt],
    images: Sequence[Image],
    earlier: Sequence[Image],
    *,
    ask: Ask = "theme",
) -> list[Judged]:
    """As `judge_sets`, with every pair of an earlier page's panel and a panel counted too."""
    alone = judge_sets(judge, prompts, images, ask=ask)
    if not earlier:
        return alone
    before = range(len(earlier))
    # Pairs among the earlier panels are the same for every candidate, and are not asked again.
    answers = ask_pairs(
        judge,
        [[*earlier, *split(image, prompt.grid)] for prompt, image in zip(prompts, images, strict=True)],
        [texts_about(prompt, ask) for prompt in prompts],
        pairs=lambda count: product(before, range(len(earlier), count)),
    )
    return [
        _with_earlier(page, [verdict for verdicts in pairs.values() for verdict in verdicts.values()])
        for page, pairs in zip(alone, answers, strict=True)
    ]


def _with_earlier(alone: Judged, across: Sequence[Verdict]) -> Judged:
    across_score = mean_of(across)
    parts = (("this page", alone.score), ("with earlier pages", across_score))
    if alone.score is None or across_score is None:
        return Judged(None, alone.matrix, parts, alone.error or errors_of(across))
    # Each pair counts alike, whichever pages its panels are of.
    pair_count = len(alone.matrix) * (len(alone.matrix) - 1) // 2
    score = (alone.score * pair_count + across_score * len(across)) / (pair_count + len(across))
    return Judged(score, alone.matrix, parts)


def judge_edits(judge: Judge, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[Judged]:
    """√(kept · followed) by the judge's two questions about an edit and its first source, as `EditConsistency`."""
    sources = {path: open_image(path) for prompt in prompts for path in prompt.sources[:1]}
    edits = [(sources[prompt.sources[0]], image, prompt.text) for prompt, image in zip(prompts, images, strict=True)]
    return [
        Judged(
            verdicts.score(),
            parts=(("kept", verdicts.kept.p_yes), ("followed", verdicts.followed.p_yes)),
            error=errors_of([verdicts.kept, verdicts.followed]),
        )
        for verdicts in ask_edits(judge, edits)
    ]


def best_first(judged: Sequence[Judged]) -> list[int]:
    """Indices by score, best first; of equal ones the earlier, those without a score last.

    Raises RuntimeError if none has a score: there is nothing to choose by.
    """
    if all(candidate.score is None for candidate in judged):
        raise RuntimeError(f"the judge gave no verdict, so no candidate is the best: {judged[0].error}")
    return sorted(range(len(judged)), key=lambda i: (judged[i].score is None, -(judged[i].score or 0.0), i))
