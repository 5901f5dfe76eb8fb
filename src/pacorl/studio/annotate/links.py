"""Shares instances out among people, and measures how far they agree on what several of them ranked.

Each instance goes to one person, an agreed part to several, control questions to everyone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from pacorl.dataset.folder import Answer, Instance

ORDERS = ("shuffled", "uncertain")
"""shuffled: an order drawn once; uncertain: the question whose answer is most uncertain, given all rankings so far."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How work is shared."""

    overlap: float = 0.1
    """Share of the instances that several people rank."""
    judges: int = 3
    """How many people rank each of these; everyone, if there are fewer."""
    controls: int = 40
    """Control questions made from the data, unless the folder has a controls.jsonl."""
    control_every: int = 20
    """One control question among so many; 0 for none."""
    seed: int = 0
    order: str = "shuffled"
    """What a person is shown next of their share: one of ORDERS."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} must be one of {', '.join(ORDERS)}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap {self.overlap} must be a share between 0 and 1")
        if self.judges < 2:
            raise ValueError(f"{self.judges} judges make no overlap; at least 2 do (or set the overlap to 0)")
        if self.control_every < 0:
            raise ValueError(f"control_every {self.control_every} must be 0 (none) or a number of questions")


def share_out(
    instances: Sequence[Instance],
    people: Sequence[str],
    sharing: Sharing,
    *,
    answered: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, list[str]]:
    """Assigns every instance to people; loads differ by one at most, controls aside. Deterministic in `sharing.seed`.

    Args:
        answered: instance id → who has answered it already; it stays theirs, and needs so many fewer others.

    Returns:
        person → instance ids in the order in which to show them.
    """
    if not people:
        raise ValueError("there are no annotators; name at least one annotator")
    rng = random.Random(sharing.seed)
    questions = [instance.id for instance in instances if not instance.is_control]
    # Shuffled first: the shared part is then a random sample of all prompts.
    rng.shuffle(questions)
    shared = round(sharing.overlap * len(questions))
    load: dict[str, list[str]] = {person: [] for person in people}
    for position, question in enumerate(questions):
        needed = min(sharing.judges, len(people)) if position < shared else 1
        holders = answered.get(question, ())
        # Of equal loads by chance: in the order of names, the first would get every remainder.
        newcomers = sorted(
            (name for name in people if name not in holders), key=lambda name: (len(load[name]), rng.random())
        )
        for person in [*(name for name in people if name in holders), *newcomers[: max(0, needed - len(holders))]]:
            load[person].append(question)
    controls = [instance.id for instance in instances if instance.is_control]
    every = sharing.control_every
    for assigned in load.values():
        rng.shuffle(assigned)
        if every and controls:
            # Each at most once: a control question that is seen again is known.
            remaining = rng.sample(controls, len(controls))
            # One at a random position in each stretch: at a fixed one, people would learn to expect it.
            for start in range(0, len(assigned), every):
                if remaining:
                    position = start + start // every + rng.randrange(every)
                    assigned.insert(min(position, len(assigned)), remaining.pop())
    return load


def foreign_controls(instances: Sequence[Instance], count: int, *, seed: int = 0) -> list[Instance]:
    """Make control questions from the data: one candidate becomes an image of another prompt, and is the worst.

    There are fewer than `count` if prompts share images: a prompt's own image is never a foreign one.

    Raises:
        ValueError: no prompt has an image that another one has not.
    """
    groups: dict[str, list[Instance]] = {}
    images: dict[str, set[str]] = {}
    for instance in instances:
        groups.setdefault(instance.group, []).append(instance)
        images.setdefault(instance.group, set()).update([instance.reference, *instance.candidates])
    if count and len(groups) < 2:
        raise ValueError("control questions need images of at least two prompts; set their number to 0")
    rng = random.Random(seed)
    controls = []
    for instance in rng.sample(list(instances), min(count, len(instances))):
        other = rng.choice(groups[rng.choice([name for name in groups if name != instance.group])])
        position = rng.randrange(len(instance.candidates))
        candidates = list(instance.candidates)
        candidates[position] = rng.choice(other.candidates)
        if candidates[position] in images[instance.group]:
            foreign = sorted(set().union(*images.values()) - images[instance.group])
            if not foreign:
                continue
            candidates[position] = rng.choice(foreign)
        must = tuple((better, position) for better in range(len(candidates)) if better != position)
        # The id follows from the images, so that a later start finds the same control question in the database.
        name = hashlib.sha256("\n".join([instance.reference, *candidates]).encode()).hexdigest()[:16]
        controls.append(replace(instance, id=f"control:{name}", candidates=tuple(candidates), must=must))
    if count and not controls:
        raise ValueError("control questions need an image that is of one prompt alone; set their number to 0")
    return controls


# --- agreement ---------------------------------------------------------------------------------------------------


def kendall_w(rank_MN: Sequence[Sequence[float]]) -> float:
    """Coefficient of concordance of M people who ranked the same N items without ties: 0 for none, 1 for full.

    W = 12·S / (M²(N³ − N)), S the sum of squared deviations of the items' rank sums (Kendall & Babington Smith 1939).
    """
    rank = np.asarray(rank_MN, dtype=float)
    if rank.ndim != 2 or min(rank.shape) < 2:
        raise ValueError(f"Kendall's W needs at least two people and two items, got {rank.shape}")
    people, items = rank.shape
    sums = rank.sum(0)
    return float(12 * ((sums - sums.mean()) ** 2).sum() / (people**2 * (items**3 - items)))


def krippendorff_alpha(units: Sequence[Sequence[int]]) -> float | None:
    """Ordinal α: 1 for perfect agreement, 0 for chance, below 0 for systematic disagreement; None without variation.

    Args:
        units: for each item that was judged, the ordinal values that it was given (Krippendorff, Computing
            Krippendorff's Alpha-Reliability, 2011). Items with one value say nothing and are left out.
    """
    compared = [unit for unit in units if len(unit) > 1]
    values = sorted({value for unit in compared for value in unit})
    if len(values) < 2:
        return None
    # How often two values met in a unit, each unit weighing as many as it has values.
    met_VV = np.zeros((len(values), len(values)))
    for unit in compared:
        counts_V = np.array([unit.count(value) for value in values], dtype=float)
        met_VV += (np.outer(counts_V, counts_V) - np.diag(counts_V)) / (len(unit) - 1)
    totals_V = met_VV.sum(1)
    # δ²(c, k) = (Σ_{g=c..k} n_g − (n_c + n_k)/2)², by differences of the running sum.
    up_to_V, index_V = totals_V.cumsum(), np.arange(len(values))
    low_VV, high_VV = np.minimum.outer(index_V, index_V), np.maximum.outer(index_V, index_V)
    between_VV = up_to_V[high_VV] - up_to_V[low_VV] + totals_V[low_VV]
    distance_VV = (between_VV - (totals_V[low_VV] + totals_V[high_VV]) / 2) ** 2
    np.fill_diagonal(distance_VV, 0)
    expected_VV = np.outer(totals_V, totals_V) - np.diag(totals_V)
    observed, expected = (met_VV * distance_VV).sum(), (expected_VV * distance_VV).sum() / (totals_V.sum() - 1)
    return float(1 - observed / expected)


def agreement(answers: Sequence[Answer]) -> dict[str, float | int | None]:
    """Over the instances that several people ranked: mean W, ordinal α over (instance, candidate), and how many."""
    by_instance: dict[str, list[Answer]] = {}
    for answer in answers:
        if not answer.adjudicated:  # a decision is no second opinion
            by_instance.setdefault(answer.instance, []).append(answer)
    units, concordance = [], []
    for group in by_instance.values():
        if len(group) > 1:
            names = group[0].candidates
            rank_MN = [[answer.candidates.index(name) + 1 for name in names] for answer in group]
            concordance.append(kendall_w(rank_MN))
            units += list(zip(*rank_MN, strict=True))
    return {
        "instances": len(concordance),
        "kendall_w": float(np.mean(concordance)) if concordance else None,
        "krippendorff_alpha": krippendorff_alpha(units),
    }
