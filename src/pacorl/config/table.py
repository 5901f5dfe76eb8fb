"""Tables of the entries of a config: policies, judges, rewards, objectives and others.

    POLICIES: Table[PolicySpec] = Table("generator", {"flux": "pacorl.models.policies.flux:FLUX", …}, key="kind")
    POLICIES["flux"].options      # imports the file of this entry alone

An entry is a *spec*: a value in the entry's own file with its options and its interface to other packages. It has one
of three places:

    in this package     its file, and one line of the table
    in a file           named in full: `path/to/file.py:NAME`, which is executed
    in another package  an entry point in the table's group, such as `pacorl.objectives`, named as the built-in ones
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from pacorl.config.user_files import FAULTS, FORM, is_in_file, value_in_file

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Spec = TypeVar("Spec")


class Table(Mapping[str, Spec], Generic[Spec]):
    """Name → spec, built-in entries first. Iteration does not include entries of files."""

    # A table equals itself alone: Mapping's own comparison would import every file, and would forbid hashing.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, noun: str, homes: Mapping[str, str], *, group: str = "", key: str = "") -> None:
        """
        Args:
            noun: word for an entry in messages, e.g. "objective".
            homes: name → "module:ATTRIBUTE" of its spec.
            group: entry points of other packages. A built-in entry takes precedence over one of the same name.
            key: field with the entry's name, in its options, or in the entry if it has none.
        """
        self.noun = noun
        self.group = group
        self.key = key
        self._homes = dict(homes)
        self._loaded: dict[str, Spec] = {}
        """Entries of files and of other packages."""

    @cached_property
    def _points(self) -> Mapping[str, EntryPoint]:
        from importlib.metadata import entry_points  # some milliseconds

        return {point.name: point for point in entry_points(group=self.group) if point.name not in self._homes}

    def __getitem__(self, name: str) -> Spec:
        """Return the spec of that name. Imports its module, and executes no file that `named` has not executed.

        Raises:
            KeyError: if the table has no such entry. The message of `named` is for users.
            ValueError: if the entry of another package cannot be used.
        """
        if name in self._homes:
            module, _, attribute = self._homes[name].partition(":")
            return cast(Spec, getattr(import_module(module), attribute))
        if name not in self._loaded:
            point = self._points[name]
            try:
                entry = point.load()
            except FAULTS as error:
                package = point.dist.name if point.dist else point.value
                fault = f"{type(error).__name__}: {error}"
                raise ValueError(f"{self.noun} {name!r} of the package {package}: {fault}") from error
            self._loaded[name] = self._checked(name, entry)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._homes
        yield from self._points

    def __len__(self) -> int:
        return len(self._homes) + len(self._points)

    def __contains__(self, name: object) -> bool:
        return name in self._homes or name in self._loaded or name in self._points

    def named(self, name: str) -> Spec:
        """Return the spec of a user's name; execute the file of `path/to/file.py:NAME` at its first use.

        Raises:
            ValueError: if the entry does not exist, with all names and the nearest one, or cannot be used.
        """
        # Once: a second execution would make classes that differ.
        if is_in_file(name) and name not in self._loaded:
            self._loaded[name] = self._checked(name, value_in_file(name))
        if name not in self:
            near = difflib.get_close_matches(name, self, n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown {self.noun} {name!r}; {guess}there are {', '.join(self)}, or your own as {FORM}")
        return self[name]

    def _checked(self, name: str, entry: Any) -> Spec:
        """An entry from outside the package under the name that selects it."""
        # The last entry: the file of the first one may import torch.
        kind = type(self[next(reversed(self._homes))])
        if not isinstance(entry, kind):
            raise ValueError(
                f"{self.noun} {name!r} is of type {type(entry).__name__}; give an object of type {kind.__name__}"
            )
        if not self.key:
            return entry
        options = getattr(entry, "options", None)
        if options is None:
            return cast(Spec, replace(cast(Any, entry), **{self.key: name}))
        if options.model_fields[self.key].default == name:
            return entry
        # A subclass of an options model whose `key` is `name`, as a config and its dump have it.
        from pydantic import create_model

        field: Any = {self.key: (Literal[name], name)}
        model = create_model(
            options.__name__, __base__=options, __module__=options.__module__, __doc__=options.__doc__, **field
        )
        return cast(Spec, replace(cast(Any, entry), options=model))
