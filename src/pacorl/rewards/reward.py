"""The seam of a reward: prompts and images in, a score per image out; and the table of them all."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from PIL.Image import Image, fromarray

from pacorl.io.terminal import excerpt
from pacorl.runtime.workers import CallTimeout, Workers, outcome_of
from pacorl.types import Prompt, Size, places

RewardFunction = Callable[[Sequence[Prompt], Sequence[Image]], Sequence[float | None]]
"""Prompts and images → one score per image, None if there is none."""


class RewardError(ValueError):
    """Unavailable reward or invalid score; the message names the reward and the record."""


class Reward(Protocol):
    """Scorer of images. A missing score is None, never 0.

    Making one is cheap. One with weights may load them in a method `load()`, or else on its first call. A reward whose
    score of a set is a sum of parts has a method `panel_scores(prompts, images)`, which returns `PanelScores`.

    Example:
        reward = PanelMatch(judge)
        reward.check(prompts)
        scores = reward(prompts, images)
    """

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError, naming the record, if prompts lack required fields."""

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        """Return one score per image, in order."""


@dataclass(frozen=True, slots=True)
class PanelScores:
    """Score of a set, and the parts of it that contain each panel."""

    score: float | None
    """None if it is missing."""
    part_P: Sequence[float | None] | None
    """Per panel the part of the score that depends on it (`core.set_scores.panel_shares`); None for a score without
    parts, which counts for every panel."""


class PanelReward:
    """Base class of rewards with parts: a subclass implements `panel_scores`."""

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Any]) -> list[float | None]:
        return [result.score for result in self.panel_scores(prompts, images)]

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Any]) -> list[PanelScores]:
        """Score each image, with its parts."""
        raise NotImplementedError


def listed(
    name: str, result: Any, count: int, prompts: Sequence[Prompt], *, what: tuple[str, str] = ("scores", "images")
) -> list[Any]:
    """Return a reward's result as a list of `count` values; raises RewardError naming the reward otherwise."""
    values, items = what
    try:
        results = list(result)
    except TypeError:  # a number, or none: a reward that forgets `return`
        returned = repr(result)
    else:
        if len(results) == count:
            return results
        returned = f"{len(results)} {values}"
    raise RewardError(
        f"reward {name!r} returned {returned} for {count} {items} ({named(prompts)}); it must return a list of "
        f"one per {items[:-1]}, None if there is none"
    )


def scores_of(
    name: str, reward: RewardFunction, prompts: Sequence[Prompt], images: Sequence[Image], *, masked: bool = False
) -> list[float | None]:
    """Compute one reward's scores, each a finite number or None; see `panel_scores_of`."""
    return [result.score for result in panel_scores_of(name, reward, prompts, images, masked=masked)]


def panel_scores_of(
    name: str, reward: RewardFunction, prompts: Sequence[Prompt], images: Sequence[Image], *, masked: bool = False
) -> list[PanelScores]:
    """Compute one reward's scores, with their parts if it has `panel_scores`.

    A score is missing if one of its parts is, and NaN if one of its parts is. With `masked`, numbers that are not
    finite become NaN, for callers that exclude them.

    Raises:
        RewardError: naming the reward and the record, if a score or its parts are invalid.
    """
    scorer: Any = reward
    has_parts = hasattr(scorer, "panel_scores")
    returned = scorer.panel_scores(prompts, images) if has_parts else scorer(prompts, images)
    results = listed(name, returned, len(prompts), prompts)
    if not has_parts:
        results = [PanelScores(score, None) for score in results]
    checked = []
    for prompt, result in zip(prompts, results, strict=True):
        # A user's class may return plain numbers here.
        if not isinstance(result, PanelScores):
            raise RewardError(
                f"reward {name!r} returned {result!r} for {named([prompt])}; panel_scores must return PanelScores"
            )
        score, part_P = _finite(name, result.score, prompt, masked=masked), None
        if result.part_P is not None:
            raw_parts = listed(name, result.part_P, prompt.grid.count, [prompt], what=("parts", "panels"))
            part_P = [_finite(name, share, prompt, masked=masked) for share in raw_parts]
            if None in part_P:
                score = None
            elif score is not None and not all(map(math.isfinite, filter(None, part_P))):
                score = math.nan
        checked.append(PanelScores(score, part_P))
    return checked


def _finite(name: str, value: object, prompt: Prompt, *, masked: bool) -> float | None:
    if value is None:
        return None
    # A truth value or a text is a slip of the reward's, though Python would read both as numbers.
    is_number = not isinstance(value, bool | str)
    try:
        number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
        is_number = False
    if math.isfinite(number):
        return number
    if masked and is_number:
        return math.nan
    raise RewardError(
        f"reward {name!r} returned {value!r} for {named([prompt])}; a score is a finite number, "
        "or None if there is none"
    )


def smoke_test(name: str, reward: Reward, prompts: Sequence[Prompt], *, size: Size, seconds: float = math.inf) -> None:
    """Make a reward ready and have it score two grid images of noise, before anything is generated.

    Two, since one image hides a reward that returns one score for the whole batch.

    Args:
        prompts: to choose the images' from.
        seconds: time limit of the scores, but not of loading weights, which may have to be downloaded.

    Raises:
        RewardError: if it raises, does not return, or returns a wrong number of scores, an invalid score or part.
    """
    # The largest grid has the most questions and panels.
    prompt = max(prompts, key=attrgetter("grid.count"))
    # Seeded, so that a reward scores the trial images equally each time.
    pixels = np.random.default_rng(0).integers(0, 256, (2, size.height, size.width, 3), dtype=np.uint8)
    images = [fromarray(pixels[0]), fromarray(pixels[1])]
    if hasattr(reward, "load"):
        reward.load()
    # The thread computes on this process's card.
    card = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
    trial = Workers(1, name="pacorl-reward", context=partial(torch.cuda.device, card))
    scores = trial.submit(partial(scores_of, name, reward, [prompt, prompt], images))
    try:
        outcome_of(scores, f"reward {name!r}, asked about trial images,", seconds=seconds, check_stop=lambda: None)
    except CallTimeout as fault:
        raise RewardError(str(fault)) from None


def refuse(prompts: Sequence[Prompt], fault: str) -> None:
    """Raise RewardError for prompts that a reward cannot score, if there are any; `fault` is the first one's."""
    if prompts:
        raise RewardError(f"{places(prompts)}: {excerpt(prompts[0].text)} {fault}")


def check_panels(name: str, prompts: Sequence[Prompt]) -> None:
    """Raise RewardError if a prompt does not have one text per panel."""
    unlike = [prompt for prompt in prompts if len(prompt.panels) != prompt.grid.count]
    refuse(unlike, f"has no text for each panel, and {name} needs one; describe each behind its tag, or under 'panels'")


def named(prompts: Sequence[Prompt]) -> str:
    """Name records for a message: one with its text, several by their places."""
    distinct = list({prompt.id: prompt for prompt in prompts}.values())
    if len(distinct) == 1:
        return f"{distinct[0].place}, {excerpt(distinct[0].text)}"
    return places(distinct)


def tempered(probability: float | None, temperature: float) -> float | None:
    """σ(logit(p) / temperature); None if there is no probability."""
    if probability is None or temperature == 1:
        return probability  # to the bit, as without a temperature
    # By powers and not by the logit, which is infinite at the 0 and 1 that a sure judge gives.
    yes = probability ** (1 / temperature)
    no = (1 - probability) ** (1 / temperature)
    return float(yes / (yes + no))
