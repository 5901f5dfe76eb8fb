"""Shares instances out among people: each to one, an agreed part to several, control questions to everyone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from pacorl.dataset.records import Instance


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

    def __post_init__(self) -> None:
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

    Raises:
        ValueError: if there are no people.
    """
    if not people:
        raise ValueError("nobody is there to rank; name at least one annotator")
    rng = random.Random(sharing.seed)
    questions = [instance.id for instance in instances if not instance.is_control]
    # Shuffled first: the shared part is then a random sample of all prompts.
    rng.shuffle(questions)
    shared = round(sharing.overlap * len(questions))
    load: dict[str, list[str]] = {person: [] for person in people}
    for position, question in enumerate(questions):
        needed = min(sharing.judges, len(people)) if position < shared else 1
        holders = answered.get(question, ())
        newcomers = sorted(
            (name for name in people if name not in holders), key=lambda name: (len(load[name]), rng.random())
        )
        for person in [*(name for name in people if name in holders), *newcomers[: max(0, needed - len(holders))]]:
            load[person].append(question)
    controls = [instance.id for instance in instances if instance.is_control]
    return {person: _ordered(assigned, controls, sharing.control_every, rng) for person, assigned in load.items()}


def _ordered(assigned: list[str], controls: Sequence[str], every: int, rng: random.Random) -> list[str]:
    """Shuffled, with a control question at a random position in each stretch of `every`."""
    rng.shuffle(assigned)
    if not every or not controls:
        return assigned
    remaining = rng.sample(controls, len(controls))
    for start in range(0, len(assigned), every):
        if not remaining:
            break
        assigned.insert(min(start + start // every + rng.randrange(every), len(assigned)), remaining.pop())
    return assigned


def foreign_controls(instances: Sequence[Instance], count: int, *, seed: int = 0) -> list[Instance]:
    """Control questions made from the data: one candidate is replaced by an image of another prompt.

    `must` says that all candidates of the right prompt come before it.

    Raises:
        ValueError: if there is only one prompt.
    """
    groups: dict[str, list[Instance]] = {}
    for instance in instances:
        groups.setdefault(instance.group, []).append(instance)
    if count and len(groups) < 2:
        raise ValueError("control questions need images of at least two prompts; set their number to 0")
    rng = random.Random(seed)
    originals = rng.sample(list(instances), min(count, len(instances)))
    return [_with_foreigner(instance, groups, rng) for instance in originals]


def _with_foreigner(instance: Instance, groups: Mapping[str, Sequence[Instance]], rng: random.Random) -> Instance:
    other = rng.choice(groups[rng.choice([name for name in groups if name != instance.group])])
    position = rng.randrange(len(instance.candidates))
    candidates = list(instance.candidates)
    candidates[position] = rng.choice(other.candidates)
    must = tuple((better, position) for better in range(len(candidates)) if better != position)
    # The id follows from the images, so that a later start finds the same control question in the database.
    name = hashlib.sha256("\n".join([instance.reference, *candidates]).encode()).hexdigest()[:16]
    return replace(instance, id=f"control:{name}", candidates=tuple(candidates), must=must)
