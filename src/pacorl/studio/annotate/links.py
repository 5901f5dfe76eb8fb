"""Assignment of instances to people, and agreement on the instances ranked by several of them.

Each instance goes to one person, an agreed part to several, control questions to everyone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from pacorl.dataset.folder import Instance
from pacorl.dataset.rules import mean_ranks, shared_rankings
from pacorl.io.files import text_digest
from pacorl.records.rankings import Ranking

ORDERS = ("shuffled", "uncertain")
"""shuffled: an order drawn once; uncertain: the question whose answer is most uncertain, given all rankings so far."""

LONGEST_QUESTION = 300
"""Characters that fit the page."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Rules for the assignment of questions, and their wording."""

    overlap: float = 0.1
    """Share of the instances that several people rank."""
    judges: int = 3
    """Number of people for each of these; everyone, if there are fewer."""
    controls: int = 40
    """Control questions made from the data, unless the folder has a controls.jsonl."""
    control_every: int = 20
    """Questions per control question; 0 for no control questions."""
    seed: int = 0
    order: str = "shuffled"
    """Order of a person's questions: one of ORDERS."""
    question: str = ""
    """The wording on the page; empty for the page's own."""

    def __post_init__(self) -> None:
        if len(self.question) > LONGEST_QUESTION:
            raise ValueError(f"the question has {len(self.question)} characters; write at most {LONGEST_QUESTION}")
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r} must be one of {', '.join(ORDERS)}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap {self.overlap} must be a share between 0 and 1")
        if self.judges < 2:
            raise ValueError(f"{self.judges} judges make no overlap; at least 2 do (or set the overlap to 0)")
        if self.control_every < 0:
            raise ValueError(f"control_every {self.control_every} must be 0 (none) or a number of questions")

    def with_options(self, options: Sharing | Mapping[str, Any] | None) -> Sharing:
        """Replace the named options; all of them, if `options` is a whole sharing."""
        return options if isinstance(options, Sharing) else replace(self, **(options or {}))

    def divides_as(self, other: Sharing) -> bool:
        """Whether both divide alike: their order and their question may differ."""
        return replace(self, order=other.order, question=other.question) == other


def share_out(
    instances: Sequence[Instance],
    people: Sequence[str],
    sharing: Sharing,
    *,
    answered: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, list[str]]:
    """Assign every instance to people; loads differ by one at most, controls aside. Deterministic in `sharing.seed`.

    Args:
        answered: instance id → people who have answered it; they keep it, and count towards its number of judges.
            A person's answered control questions count towards one in `control_every`.

    Returns:
        person → instance ids in the order in which to show them.
    """
    if not people:
        raise ValueError("there are no annotators; name at least one annotator")
    rng = random.Random(sharing.seed)

    # Questions, shuffled first: the shared part is then a random sample of all prompts.
    questions = [instance.id for instance in instances if not instance.is_control]
    rng.shuffle(questions)
    shared = round(sharing.overlap * len(questions))
    load: dict[str, list[str]] = {person: [] for person in people}
    for position, question in enumerate(questions):
        needed = min(sharing.judges, len(people)) if position < shared else 1
        holders = answered.get(question, ())
        # Equal loads are sorted by chance: in the order of names, the first would get every remainder.
        newcomers = [(len(load[name]), rng.random(), name) for name in people if name not in holders]
        assignees = [name for name in people if name in holders]
        assignees += [name for *_, name in sorted(newcomers)[: max(0, needed - len(holders))]]
        for person in assignees:
            load[person].append(question)

    # Control questions. Answered ones may be of an earlier set of controls, which `instances` no longer have.
    controls = [instance.id for instance in instances if instance.is_control]
    every = sharing.control_every
    dealt = set(questions)
    for person, assigned in load.items():
        rng.shuffle(assigned)
        done = [name for name, holders in answered.items() if person in holders]
        unanswered = [name for name in assigned if person not in answered.get(name, ())]
        if every and controls:
            wanted = math.ceil(len(assigned) / every) - sum(name not in dealt for name in done)
            # Each at most once: a repeated control question would be recognised.
            remaining = [name for name in rng.sample(controls, len(controls)) if name not in done]
            # A random position in each stretch: people would learn to expect a fixed position.
            for start in range(0, len(unanswered), every)[: max(0, wanted)]:
                if remaining:
                    position = start + start // every + rng.randrange(every)
                    unanswered.insert(min(position, len(unanswered)), remaining.pop())
        assigned[:] = [*done, *unanswered]
    return load


def describe_change(before: Mapping[str, Collection[str]], after: Mapping[str, Collection[str]]) -> str:
    """Describe what another division changes for each person; empty if nothing changes, or nothing was divided."""
    changes = []
    for person, assigned in after.items():
        old = set(before.get(person, ()))
        new = set(assigned) - old
        if before and old != set(assigned):
            changes.append(f"{person} {len(old)} → {len(assigned)} questions, {len(new)} of them new")
    return "; ".join(changes)


def foreign_controls(instances: Sequence[Instance], count: int, *, seed: int = 0) -> list[Instance]:
    """Make control questions from the data: one candidate becomes an image of another prompt, and is the worst.

    There are fewer than `count` if prompts share images: a prompt's own image is never a foreign one.

    Raises:
        ValueError: all prompts have the same images.
    """
    # Instances and images of each prompt.
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
        # A foreign image; prompts may share images, so one from outside of the group if need be.
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
        name = text_digest("\n".join([instance.reference, *candidates]))[:16]
        controls.append(replace(instance, id=f"control:{name}", candidates=tuple(candidates), must=must))
    if count and not controls:
        raise ValueError("control questions need an image of a single prompt; set their number to 0")
    return controls


# --- agreement ---------------------------------------------------------------------------------------------------


def kendall_w(rank_MN: Sequence[Sequence[float]]) -> float | None:
    """Compute the coefficient of concordance of M rankings of N items: 0 for none, 1 for full.

    W = 12·S / (M²(N³ − N) − M·ΣT), S the sum of squared deviations of the items' rank sums, and T the sum of t³ − t
    over the ties of a ranking (Kendall, Rank Correlation Methods, 1948). Tied items share the mean of their ranks. None
    if everybody ties all items.
    """
    rank = np.asarray(rank_MN, dtype=float)
    if rank.ndim != 2 or min(rank.shape) < 2:
        raise ValueError(f"Kendall's W needs at least two people and two items, got {rank.shape}")
    people, items = rank.shape
    sums = rank.sum(0)
    ties = 0
    for rank_N in rank:
        _, count = np.unique(rank_N, return_counts=True)
        ties += int((count**3 - count).sum())
    most = people**2 * (items**3 - items) - people * ties
    return float(12 * ((sums - sums.mean()) ** 2).sum() / most) if most else None


def krippendorff_alpha(units: Sequence[Sequence[float]]) -> float | None:
    """Compute ordinal α: 1 for perfect agreement, 0 for chance, below 0 for disagreement; None without variation.

    Args:
        units: for each judged item, its ordinal values (Krippendorff, Computing Krippendorff's Alpha-Reliability,
            2011). Items with one value are left out.
    """
    # A unit with a single value says nothing about agreement.
    compared = [unit for unit in units if len(unit) > 1]
    values = sorted(set().union(*compared))
    if len(values) < 2:
        return None

    # Coincidences of two values in a unit; the weight of a unit is its number of values.
    met_VV = np.zeros((len(values), len(values)))
    for unit in compared:
        counts_V = np.array([unit.count(value) for value in values], dtype=float)
        met_VV += (np.outer(counts_V, counts_V) - np.diag(counts_V)) / (len(unit) - 1)
    totals_V = met_VV.sum(1)

    # δ²(c, k) = (Σ_{g=c..k} n_g − (n_c + n_k)/2)², by differences of the running sum.
    up_to_V = totals_V.cumsum()
    index_V = np.arange(len(values))
    low_VV = np.minimum.outer(index_V, index_V)
    high_VV = np.maximum.outer(index_V, index_V)
    between_VV = up_to_V[high_VV] - up_to_V[low_VV] + totals_V[low_VV]
    distance_VV = (between_VV - (totals_V[low_VV] + totals_V[high_VV]) / 2) ** 2
    np.fill_diagonal(distance_VV, 0)

    # Observed against expected disagreement.
    expected_VV = np.outer(totals_V, totals_V) - np.diag(totals_V)
    observed = (met_VV * distance_VV).sum()
    expected = (expected_VV * distance_VV).sum() / (totals_V.sum() - 1)
    return float(1 - observed / expected)


def agreement(answers: Sequence[Ranking]) -> dict[str, float | int | None]:
    """Compute agreement on the instances that several people ranked.

    Returns:
        Their number, mean W, the mean W of random orders (1/M for M people), and ordinal α over (instance, candidate).
        Tied candidates share the mean of their ranks.
    """
    units: list[tuple[float, ...]] = []
    concordance: list[float] = []
    chance = []
    shared = shared_rankings(answers)
    for group in shared:
        rank_MN = []
        for answer in group:
            ranks = mean_ranks(answer.tiers)
            rank_MN.append([ranks[name] for name in group[0].candidates])
        w = kendall_w(rank_MN)
        if w is not None:
            concordance.append(w)
            # Random orders of M people reach 1/M, so each group has its own level of chance.
            chance.append(1 / len(group))
        units += list(zip(*rank_MN, strict=True))
    return {
        "instances": len(shared),
        "kendall_w": float(np.mean(concordance)) if concordance else None,
        "kendall_chance": float(np.mean(chance)) if chance else None,
        "krippendorff_alpha": krippendorff_alpha(units),
    }
