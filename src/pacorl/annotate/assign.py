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
    """How many of them each of these gets (everyone, where there are fewer)."""
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
    """person → instance ids in the order in which to show them; loads differ by one at most, controls aside.

    answered: instance id → who has answered it already; they keep it, and it needs so many fewer others.
    Deterministic in `sharing.seed`. Raises ValueError where nobody is there.
    """
    if not people:
        raise ValueError("nobody is there to rank; name at least one annotator")
    rng = random.Random(sharing.seed)
    questions = [one.id for one in instances if not one.is_control]
    rng.shuffle(questions)
    shared = round(sharing.overlap * len(questions))
    load: dict[str, list[str]] = {person: [] for person in people}
    for place, question in enumerate(questions):
        wanted = min(sharing.judges, len(people)) if place < shared else 1
        holders = answered.get(question, ())
        others = sorted(
            (name for name in people if name not in holders), key=lambda name: (len(load[name]), rng.random())
        )
        for person in [*(name for name in people if name in holders), *others[: max(0, wanted - len(holders))]]:
            load[person].append(question)
    controls = [one.id for one in instances if one.is_control]
    return {person: _ordered(own, controls, sharing.control_every, rng) for person, own in load.items()}


def _ordered(own: list[str], controls: Sequence[str], every: int, rng: random.Random) -> list[str]:
    """Shuffled, with a control question at a random place in each stretch of `every`."""
    rng.shuffle(own)
    if not every or not controls:
        return own
    mine = rng.sample(controls, len(controls))
    for start in range(0, len(own), every):
        if not mine:
            break
        own.insert(min(start + start // every + rng.randrange(every), len(own)), mine.pop())
    return own


def foreign_controls(instances: Sequence[Instance], count: int, *, seed: int = 0) -> list[Instance]:
    """Control questions made from the data: one candidate is replaced by a picture of another prompt.

    `must` says that all candidates of the right prompt come before it. Raises ValueError where there is only one
    prompt.
    """
    groups: dict[str, list[Instance]] = {}
    for one in instances:
        groups.setdefault(one.group, []).append(one)
    if count and len(groups) < 2:
        raise ValueError("control questions need pictures of at least two prompts; set their number to 0")
    rng = random.Random(seed)
    chosen = rng.sample(list(instances), min(count, len(instances)))
    return [_with_foreigner(one, groups, rng) for one in chosen]


def _with_foreigner(one: Instance, groups: Mapping[str, Sequence[Instance]], rng: random.Random) -> Instance:
    other = rng.choice(groups[rng.choice([name for name in groups if name != one.group])])
    place = rng.randrange(len(one.candidates))
    candidates = list(one.candidates)
    candidates[place] = rng.choice(other.candidates)
    must = tuple((better, place) for better in range(len(candidates)) if better != place)
    name = hashlib.sha256("\n".join([one.reference, *candidates]).encode()).hexdigest()[:16]
    return replace(one, id=f"control:{name}", candidates=tuple(candidates), must=must)
