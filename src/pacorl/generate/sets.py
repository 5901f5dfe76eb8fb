"""Best-of-n generation (`generate_sets`): prompts → images, each the best of its candidates if a judge ranks them.

Candidate j of image i has the seed `seed + i · best_of + j`, so that each is reproducible alone. A judge ranks sets by
the consistency reward, the mean over their pairs of panels, and by their characters' images; edits by the preservation
of each source and by the instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from pacorl.core.batches import in_batches
from pacorl.core.set_scores import tied_groups, whole_mean
from pacorl.generate.generated_images import GeneratedImage, Judged
from pacorl.generate.generator import AnySize, Generator, Prompts, Step
from pacorl.generate.separate import sample_separately
from pacorl.io.images import open_image
from pacorl.judge.pairwise import ask_edits, edit_score, errors_of, matrix_of
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
    best_of: int = 1,
    judge: Judge | PacoReward | None = None,
    size: AnySize = None,
    steps: int | None = None,
    keep_all: bool = False,
    separate: bool = False,
    on_step: Step = lambda images: None,
) -> list[GeneratedImage]:
    """Generate an image of each prompt, in order.

    Args:
        prompts: one or several prompts, as in `Generator.sample`.
        seed: seed of the first candidate.
        judge: a judge, or a `PacoReward` with one; required for several candidates.
        best_of: candidates per image. The judge's best is kept, or all (best first) with `keep_all`. The first of tied
            candidates is the best.
        separate: generate each panel of a set as an image of its own, of `size`, with the references of its characters.
        on_step: callback with the number of images per denoising step.

    Raises:
        ValueError: if `best_of` is below 1, candidates have no judge, or the generator does not support the prompt.
        RuntimeError: if the judge gives no verdict.

    Example:
        generator = Generator.from_pretrained("tiny")
        (best,) = generate_sets(generator, prompt, best_of=4, judge=PacoReward.from_pretrained("tiny"))
        best.image.save("set.png")
    """
    if best_of < 1:
        raise ValueError(f"best-of {best_of} must be at least 1")
    if best_of > 1 and judge is None:
        raise ValueError(f"the best of {best_of} needs a judge to choose; give one as judge=")

    # A `PacoReward` wraps its judge.
    plain_judge: Any = getattr(judge, "judge", judge)
    prompts = generator.prompts_of(prompts)

    # One image after another, each with its candidates.
    images: list[GeneratedImage] = []
    for number, prompt in enumerate(prompts):
        # Consecutive seeds: no candidate of two images has the same.
        first = seed + number * best_of
        seeds = range(first, first + best_of)

        # All candidates in one call: the generator batches them, and encodes their prompt once.
        in_panels = separate and prompt.grid.count > 1
        if in_panels:
            made = sample_separately(generator, prompt, seeds, size=size, steps=steps, on_step=on_step)
        else:
            made = generator.sample([prompt] * best_of, seeds, size=size, steps=steps, on_step=on_step)

        # Their recipes, which differ by the seed.
        recipe = generator.recipe(prompt, size=size, steps=steps) | {"separate": in_panels}
        candidates = []
        for image, own_seed in zip(made, seeds, strict=True):
            candidates.append(GeneratedImage(prompt, image, {**recipe, "seed": own_seed}))
        if plain_judge is not None:
            with generator.judging():
                candidates = ranked(plain_judge, candidates)
        images += candidates if keep_all else candidates[:1]
    return images


def ranked(judge: Judge, candidates: Sequence[GeneratedImage]) -> list[GeneratedImage]:
    """Judge candidates of one prompt, and order them, best first.

    Raises RuntimeError if the judge gives no verdict.
    """
    # All candidates at once, so that the judge shares their prefix.
    prompt, images = candidates[0].prompt, [candidate.image for candidate in candidates]
    judged = judge_edits(judge, prompt, images) if prompt.sources else judge_sets(judge, prompt, images)

    if all(each.score is None for each in judged):
        raise RuntimeError(f"the judge gave no verdict, so no candidate is the best: {judged[0].error}")

    # Tied candidates are in the order of their seeds.
    in_order = []
    for group in tied_groups([each.score for each in judged]):
        for index in group:
            in_order.append(replace(candidates[index], judged=judged[index], tied=len(group)))
    return in_order


def judge_sets(judge: Judge, prompt: Prompt, images: Sequence[Image]) -> list[Judged]:
    """Score sets of one prompt with the consistency reward: the mean over every pair of panels.

    With characters that have images, half of the score is how well the panels show them (the reward `Reference`).

    Raises:
        ValueError: for a single image.
    """
    reward = Consistency(judge)
    reward.check([prompt])
    # One reference of each character, as in the gate: every one costs questions about each panel.
    characters = tuple(replace(character, images=character.images[:1]) for character in prompt.characters)
    likeness = Reference(judge)
    likenesses = likeness.panel_scores([replace(prompt, characters=characters)] * len(images), images)
    shown = any(characters_of(prompt))
    judged = []
    for verdicts, alike in zip(reward.pairs([prompt] * len(images), images), likenesses, strict=True):
        matrix = matrix_of(verdicts, prompt.grid.count)
        score = whole_mean([verdict.p_yes for verdict in verdicts.values()])
        parts = {}
        # Half for the panels among themselves, half for their likeness to the references.
        if shown:
            parts = {"together": score, "reference": alike.score}
            score = whole_mean(parts.values())
        error = errors_of(verdicts.values()) or likeness.last_error
        judged.append(Judged(score, matrix, parts, error))
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
        scores = []
        for number, verdicts in enumerate(answers, 1):
            p_yes = {name: verdict.p_yes for name, verdict in verdicts.items()}
            scores.append(edit_score(p_yes))
            of_source = f" of source {number}" if len(sources) > 1 else ""
            parts |= {f"{name}{of_source}": value for name, value in p_yes.items()}
        error = errors_of(verdict for verdicts in answers for verdict in verdicts.values())
        judged.append(Judged(whole_mean(scores), parts=parts, error=error))
    return judged
