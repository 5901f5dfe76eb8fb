"""Grades of an evaluation: agreement within sets, across them, and κ, of the themes that name no look."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from PIL import Image

from pacorl.core.grid import split
from pacorl.core.ranking import Interval, t_interval
from pacorl.core.set_scores import kappa
from pacorl.tiny.oracle import agreement, evenness, grade, majority, read_panels
from pacorl.tiny.words import asked_in
from pacorl.tiny.world import LOOKS, Panel
from pacorl.types import Prompt

Sets = Sequence[Sequence[Panel | None]]


def names_no_look(prompt: Prompt) -> bool:
    """Tell whether a prompt leaves all looks open. A named look agrees across sets by chance of the theme."""
    return not set(LOOKS) & set(asked_in(prompt)[0])


def read_sets(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[list[Panel | None]]:
    """Recognise the panels of each image; None for an invalid panel."""
    return [read_panels(split(image, prompt.grid)) for prompt, image in zip(prompts, images, strict=True)]


def looks(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> dict[str, float]:
    """Grade the images of an evaluation by `grades_of`."""
    return grades_of(prompts, read_sets(prompts, images))


def grades_of(prompts: Sequence[Prompt], sets: Sets) -> dict[str, float]:
    """Compute the means of `grade` over all sets, and `of_all_sets` of the sets whose prompt names no look."""
    graded = []
    free = []
    for prompt, shown in zip(prompts, sets, strict=True):
        graded.append(grade(asked_in(prompt), shown))
        if names_no_look(prompt):
            free.append(shown)
    means = {name: fmean([grades[name] for grades in graded]) for name in graded[0]}
    return {**means, **of_all_sets(free)}


def of_all_sets(sets: Sets) -> dict[str, float]:
    """Measure `within` and `across`, the means over the looks of `agreement`, κ of each and their mean `kappa`.

    And `diversity`: `evenness` of the majorities.
    """
    shares = agreement(sets)
    of_looks = {f"kappa/{name}": kappa(within, across) for name, (within, across) in shares.items()}
    within, across = np.mean(list(shares.values()), axis=0)
    return {
        "within": float(within),
        "across": float(across),
        "kappa": float(np.mean(list(of_looks.values()))),
        **of_looks,
        "diversity": evenness([majority(panels) for panels in sets]),
    }


def jackknife(sets_before: Sets, sets_after: Sets, name: str) -> Interval:
    """Estimate the change of a measure `of_all_sets` between sets of the same prompts, leaving out a prompt at a time.

    The interval is Student's of the pseudo-values. A bootstrap would compare a set with its own copies (Efron &
    Tibshirani 1993, ch. 11).
    """

    def change(indices: Sequence[int]) -> float:
        before = of_all_sets([sets_before[index] for index in indices])
        after = of_all_sets([sets_after[index] for index in indices])
        return after[name] - before[name]

    count = len(sets_before)
    whole = change(range(count))
    without = []
    for left_out in range(count):
        without.append(change([index for index in range(count) if index != left_out]))
    pseudo_values = [count * whole - (count - 1) * value for value in without]
    return replace(t_interval(pseudo_values), mean=whole)
