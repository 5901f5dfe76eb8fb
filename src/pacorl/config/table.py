"""Tables of the implementations that a config selects by name: policies, judges, rewards, objectives.

    POLICIES: Table[PolicySpec] = Table("generator", {"flux": "pacorl.models.policies.flux:FLUX", …})
    POLICIES["flux"].options      # the file is imported here, and not before

An entry is a *spec*, a value in the entry's file with its options and everything that other packages need of it. To add
an entry, write its file and one line of its table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar, cast

Spec = TypeVar("Spec")


class Table(Mapping[str, Spec], Generic[Spec]):
    """Name → spec, in the order in which the names are offered to people."""

    # A table equals itself alone: Mapping's own comparison would import every file, and would forbid hashing.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, noun: str, homes: Mapping[str, str]) -> None:
        """
        Args:
            noun: word for an entry in messages, e.g. "objective".
            homes: name → "module:ATTRIBUTE" of its spec.
        """
        self.noun = noun
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> Spec:
        """Import the file of an entry and return its spec.

        Raises:
            KeyError: if the table has no such entry. `named` gives users a message.
        """
        module, _, attribute = self._homes[name].partition(":")
        return cast(Spec, getattr(import_module(module), attribute))

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, name: object) -> bool:
        return name in self._homes  # Mapping's own would import the file

    def named(self, name: str) -> Spec:
        """Return the spec of a name.

        Raises:
            ValueError: if the name is unknown; the message lists the nearest entry and all entries.
        """
        if name not in self._homes:
            near = difflib.get_close_matches(name, self._homes, n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown {self.noun} {name!r}; {guess}there are {', '.join(self._homes)}")
        return self[name]
