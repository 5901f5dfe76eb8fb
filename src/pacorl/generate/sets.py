"""Best-of-n generation (`generate_sets`): prompts → images, each the best of its candidates if a judge ranks them.

Candidate j of image i has the seed `seed + i · best_of + j`, so that each is reproducible alone. A judge ranks sets by
the consistency reward, the mean over their pairs of panels, and by their characters' images; edits by the preservation
of each source and by the instruction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from pacorl import __version__
from pacorl.core.batches import in_batches
from pacorl.core.devices import NONE
from pacorl.core.set_scores import tied_groups, whole_mean
from pacorl.generate.generated_images import GeneratedImage, Judged, Recipe
from pacorl.generate.generator import AnySize, Generator, Prompts, Step
from pacorl.generate.separate import sample_separately
from pacorl.io.images import open_image
from pacorl.judge.pairwise import Ask, ask_edits, errors_of, matrix_of
from pacorl.records.characters import characters_of
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reference import Reference
from pacorl.types import Prompt

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.judge.judge import Judge


def generate_sets(
    generator: Generator,
    prompts: Prompts,
    *,
    seed: int = 0,
    count: int = 1,
    best_of: int = 1,
    judge: Judge | PacoReward | None = None,
    ask: Ask = "theme",
    size: AnySize = None,
    steps: int | None = None,
    keep_all: bool = False,
    separate: bool = False,
    on_step: Step = lambda images: None,
) -> list[GeneratedImage]:
    """Generate `count` images per prompt, in order.

    Args:
        prompts: one or several prompts, as in `Generator.sample`.
        seed: seed of the first candidate.
        count: images per prompt.
        judge: a judge, or a `PacoReward` with one; required for several candidates.
        best_of: candidates per image. The judge's best is kept, or all (best first) with `keep_all`. The first of tied
            candidates is the best.
        ask: question about a set: its theme, or its written criteria.
        separate: generate each panel of a set as an image of its own, of `size`, with the references of its characters.
        on_step: callback with the number of images per denoising step.

    Raises:
        ValueError: if a count is below 1, candidates have no judge, or the generator does not support the prompt.
        RuntimeError: if the judge gives no verdict.

    Example:
        generator = Generator.from_pretrained("tiny")
        (best,) = generate_sets(generator, prompt, best_of=4, judge=PacoReward.from_pretrained("tiny"))
        best.image.save("set.png")
    """
    if count < 1 or best_of < 1:
        raise ValueError(f"count {count} and best-of {best_of} must be at least 1")
    if best_of > 1 and judge is None:
        raise ValueError(f"the best of {best_of} needs a judge to choose; give one as judge=")

    plain_judge: Any = getattr(judge, "judge", judge)
    prompts = generator.prompts_of(prompts)

    # One image after another, each with its candidates.
    options: Any = {"size": size, "steps": steps, "on_step": on_step}
    images: list[GeneratedImage] = []
    for number in range(len(prompts) * count):
        prompt = prompts[number // count]
        # Consecutive seeds: no candidate of two images has the same.
        first = seed + number * best_of
        seeds = range(first, first + best_of)
        in_panels = separate and prompt.grid.count > 1
        ranked = _ranked_candidates(
            generator, prompt, seeds, judge=plain_judge, ask=ask, options=options, separate=in_panels
        )
        images += ranked if keep_all else ranked[:1]
    return images


def _ranked_candidates(
    generator: Generator,
    prompt: Prompt,
    seeds: Sequence[int],
    *,
    judge: Judge | None,
    ask: Ask,
    options: Mapping[str, Any],
    separate: bool,
) -> list[GeneratedImage]:
    """Generate one image per seed, best first."""
    # All candidates in one call: the generator batches them, and encodes their prompt once.
    if separate:
        candidates = sample_separately(generator, prompt, seeds, **options)
    else:
        candidates = generator.sample([prompt] * len(seeds), seeds, **options)

    # Their recipes, which differ by the seed.
    settings = generator.policy.options
    true_cfg_scale = float(getattr(settings, "true_cfg_scale", 1.0))
    recipe = Recipe(
        model=generator.model,
        adapter=generator.adapter,
        seed=seeds[0],
        size=generator.size_of(prompt, options["size"]),
        steps=options["steps"] or generator.default_steps,
        guidance_scale=getattr(settings, "guidance_scale", None),
        # A scale of 1 changes nothing.
        true_cfg_scale=None if true_cfg_scale == 1 else true_cfg_scale,
        # None without guidance, where the option has no effect.
        negative_prompt=settings.negative_text,
        # Attention reads the padding, so the length affects short prompts too: from 64 to 128 tokens the tiny
        # generator's pixels change by 8 of 255.
        max_sequence_length=getattr(settings, "max_sequence_length", None),
        version=__version__,
        quantize=None if settings.quantize == NONE else settings.quantize,
        separate=separate,
    )
    recipes = [replace(recipe, seed=seed) for seed in seeds]
    # Without a judge there is one candidate.
    if judge is None:
        return [GeneratedImage(prompt, candidates[0], recipes[0])]

    # Judge all candidates at once, so that the judge shares their prefix.
    with generator.judging():
        if prompt.sources:
            judged = judge_edits(judge, prompt, candidates)
        else:
            judged = judge_sets(judge, prompt, candidates, ask=ask)

    # Tied candidates get different ranks, in the order of their seeds.
    ranked: list[GeneratedImage] = []
    for group in best_first(judged):
        for i in group:
            position = {"rank": len(ranked) + 1, "candidates": len(seeds), "tied": len(group)}
            ranked.append(GeneratedImage(prompt, candidates[i], recipes[i], judged[i], **position))
    return ranked


# --- candidates by a judge -------------------------------------------------------------------------------------


def judge_sets(judge: Judge, prompt: Prompt, images: Sequence[Image], *, ask: Ask = "theme") -> list[Judged]:
    """Score sets of one prompt with the consistency reward: the mean over every pair of panels.

    With characters that have images, half of the score is how well the panels show them (the reward `Reference`).

    Raises:
        ValueError: for a single image, or for a prompt without criteria if `ask` is "criteria".
    """
    reward = Consistency(judge, ask=ask)
    reward.check([prompt])
    # One reference of each character, as in the gate: every one costs questions about each panel.
    characters = tuple(replace(character, images=character.images[:1]) for character in prompt.characters)
    likeness = Reference(judge)
    likenesses = likeness.panel_scores([replace(prompt, characters=characters)] * len(images), images)
    shown = sum(map(bool, characters_of(prompt)))
    judged = []
    for verdicts, alike in zip(reward.pairs([prompt] * len(images), images), likenesses, strict=True):
        matrix = matrix_of(verdicts, prompt.grid.count)
        score = whole_mean([verdict.p_yes for verdict in verdicts.values()])
        parts = {}
        if shown:
            parts = {"together": score, "reference": alike.score}
            score = whole_mean(parts.values())
        # A part is a panel's share of the mean over those that show a character.
        alike_P = [None if part is None else part * shown for part in alike.part_P or ()]
        error = errors_of(verdicts.values()) or likeness.last_error
        judged.append(Judged(score, matrix, parts, error, alike_P))
    return judged


def judge_edits(judge: Judge, prompt: Prompt, images: Sequence[Image]) -> list[Judged]:
    """Score edits of one prompt by √(kept · followed), like the reward `EditConsistency`; of several sources, the mean
    over them."""
    sources = list(map(open_image, prompt.sources))
    # One call for all edits.
    edits = [(source, image, prompt.text) for image in images for source in sources]
    judged = []
    for answers in in_batches(ask_edits(judge, edits), len(sources)):
        parts: dict[str, float | None] = {}
        verdicts = []
        for number, answer in enumerate(answers, 1):
            of_source = f" of source {number}" if len(sources) > 1 else ""
            parts[f"kept{of_source}"] = answer.kept.p_yes
            parts[f"followed{of_source}"] = answer.followed.p_yes
            verdicts += [answer.kept, answer.followed]
        score = whole_mean([answer.score() for answer in answers])
        judged.append(Judged(score, parts=parts, error=errors_of(verdicts)))
    return judged


def best_first(judged: Sequence[Judged]) -> list[list[int]]:
    """Order candidates by score, best first, in groups of ties (`core.set_scores.tied_groups`).

    Raises RuntimeError if no candidate has a score.
    """
    if all(candidate.score is None for candidate in judged):
        raise RuntimeError(f"the judge gave no verdict, so no candidate is the best: {judged[0].error}")
    return tied_groups([candidate.score for candidate in judged])
