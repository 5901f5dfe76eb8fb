"""`generate_sets`: prompts → images, each the best of its candidates if a judge ranks them.

Candidate j of image i has the noise of seed + i · best_of + j, so that each can be generated again alone. A judge
ranks sets by their pairs of panels, edits by what was kept of each source and followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import combinations, islice, product
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.core.set_scores import Statistic, set_score, tied_groups
from pacorl.generate.generated_images import GeneratedImage, Judged, Recipe
from pacorl.generate.generator import AnySize, Generator, Prompts, Step
from pacorl.io.images import open_image
from pacorl.judge.pairwise import (
    Ask,
    EditVerdicts,
    Pair,
    ask_edits,
    ask_pairs,
    errors_of,
    matrix_of,
    mean_over_dimensions,
    texts_about,
)
from pacorl.models.quantize import NONE
from pacorl.rewards.consistency import Consistency
from pacorl.types import Prompt, Verdict

if TYPE_CHECKING:
    from pacorl.judge.judge import Judge


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
    statistic: Statistic = "mean",
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
        best_of: candidates per image, of which the judge's best is kept, or all (best first) with `keep_all`. Of tied
            candidates the first is the best.
        ask: whether the judge is asked about a set's theme or about its written criteria.
        statistic: whether the mean over all pairs of panels ranks a set, or the lowest panel's median; of an edit with
            several sources, the mean over them or the lowest.
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
        rank_by = rank or (_rank_by(ranking_judge, prompt, ask=ask, statistic=statistic) if ranking_judge else None)
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
    if rank_by is None:
        return [GeneratedImage(prompt, candidates[0], recipes[0], candidates=len(seeds))]
    with generator.judging():
        judged = rank_by([prompt] * len(seeds), candidates)
    ranked: list[GeneratedImage] = []
    for group in best_first(judged):
        for i in group:
            place = {"rank": len(ranked) + 1, "candidates": len(seeds), "tied": len(group)}
            ranked.append(GeneratedImage(prompt, candidates[i], recipes[i], judged[i], **place))
    return ranked


def _rank_by(judge: Judge, prompt: Prompt, *, ask: Ask, statistic: Statistic) -> Rank:
    """Choose how a judge ranks the candidates of a prompt."""
    if prompt.sources:
        return partial(judge_edits, judge, statistic=statistic)
    return partial(judge_sets, judge, ask=ask, statistic=statistic)


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


def judge_sets(
    judge: Judge,
    prompts: Sequence[Prompt],
    images: Sequence[Image],
    *,
    ask: Ask = "theme",
    statistic: Statistic = "mean",
) -> list[Judged]:
    """Ask the consistency reward's own questions about every pair of panels, and score each set as the reward does.

    Raises:
        ValueError: for a single image, and if criteria are to be asked for and a prompt has none.
    """
    reward = Consistency(judge, ask=ask, statistic=statistic)
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
    statistic: Statistic = "mean",
) -> list[Judged]:
    """As `judge_sets`, with every pair of an earlier page's panel and a panel counted too."""
    alone = judge_sets(judge, prompts, images, ask=ask, statistic=statistic)
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
        _with_earlier(page, {pair: mean_over_dimensions(verdicts) for pair, verdicts in pairs.items()}, statistic)
        for page, pairs in zip(alone, answers, strict=True)
    ]


def _with_earlier(alone: Judged, across: Mapping[Pair, Verdict], statistic: Statistic) -> Judged:
    """Score a page by its own pairs and those with earlier panels, each pair alike, whichever pages its panels are of.

    The earlier panels are the same for every candidate, so only the page's own can be the lowest.
    """
    between = {pair: verdict.p_yes for pair, verdict in across.items()}
    page = sorted({panel for _, panel in between})
    own = {(page[a], page[b]): alone.matrix[a][b] for a, b in combinations(range(len(page)), 2)}
    parts = (("this page", alone.score), ("with earlier pages", set_score(between, statistic, among=page)))
    score = set_score(own | between, statistic, among=page)
    return Judged(score, alone.matrix, parts, alone.error or errors_of(across.values()))


def judge_edits(
    judge: Judge, prompts: Sequence[Prompt], images: Sequence[Image], *, statistic: Statistic = "mean"
) -> list[Judged]:
    """√(kept · followed) by the judge's two questions about an edit and each of its sources, as `EditConsistency`.

    The score of an edit with several sources is the mean over them, or the lowest: forgetting one must cost.
    """
    opened = {path: open_image(path) for prompt in prompts for path in prompt.sources}
    shown = zip(prompts, images, strict=True)
    edits = [(opened[path], image, prompt.text) for prompt, image in shown for path in prompt.sources]
    answers = iter(ask_edits(judge, edits))
    return [_judged_edit(list(islice(answers, len(prompt.sources))), statistic) for prompt in prompts]


def _judged_edit(answers: Sequence[EditVerdicts], statistic: Statistic) -> Judged:
    """Score one edit from the answers about each of its sources."""
    sources = range(1, len(answers) + 1)
    # Pairs of the edit, 0, with its sources.
    score_of_pair = {(0, source): verdicts.score() for source, verdicts in zip(sources, answers, strict=True)}
    parts: list[tuple[str, float | None]] = []
    for source, verdicts in zip(sources, answers, strict=True):
        of_source = f" of source {source}" if len(answers) > 1 else ""
        parts += [(f"kept{of_source}", verdicts.kept.p_yes), (f"followed{of_source}", verdicts.followed.p_yes)]
    error = errors_of(verdict for verdicts in answers for verdict in (verdicts.kept, verdicts.followed))
    return Judged(set_score(score_of_pair, statistic, among=sources), parts=tuple(parts), error=error)


def best_first(judged: Sequence[Judged]) -> list[list[int]]:
    """Order candidates by score, best first, in groups of ties (`core.set_scores.tied_groups`).

    Raises RuntimeError if none has a score: there is nothing to choose by.
    """
    if all(candidate.score is None for candidate in judged):
        raise RuntimeError(f"the judge gave no verdict, so no candidate is the best: {judged[0].error}")
    return tied_groups([candidate.score for candidate in judged])
