"""Tables of the entries of a config: policies, judges, rewards, objectives and so on.

    POLICIES: Table[PolicySpec] = Table("generator", {"flux": "pacorl.models.policies.flux:FLUX", …}, key="kind")
    POLICIES["flux"].options      # imports the file of this entry alone

An entry is a *spec*: a value in the entry's own file with its options and its interface to other packages. To add one:
its file, and one line of the table. Open tables also take a user's own entry, `path/to/file.py:NAME`, whose code is
executed.

A table is also the type of a config's section whose other keys depend on the key that names an entry:

    model: Annotated[PolicyOptions, POLICIES] = Field(default_factory=POLICIES.default_options)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pacorl.config.user_files import FORM, is_in_file, users_value
from pacorl.io.terminal import did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler
    from pydantic_core import CoreSchema

Spec = TypeVar("Spec")


class Table(Mapping[str, Spec], Generic[Spec]):
    """Name → spec, the default first. Iteration does not include users' entries."""

    # A table equals itself alone: Mapping's own comparison would import every file, and would forbid hashing.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, noun: str, homes: Mapping[str, str], *, key: str = "", is_open: bool = False) -> None:
        """
        Args:
            noun: word for an entry in messages, e.g. "objective".
            homes: name → "module:ATTRIBUTE" of its spec.
            key: the option that names the entry, by default the first.
            is_open: whether users may name entries of their own, which have options.
        """
        self.noun = noun
        self.key = key
        self.is_open = is_open
        self._homes = dict(homes)
        self.users: dict[str, Spec] = {}
        """Users' entries that configs have named."""

    def __getitem__(self, name: str) -> Spec:
        """Return the spec of that name. Imports its module, and executes no code that `named` has not executed.

        Raises:
            KeyError: if the table has no such entry. The message of `named` is for users.
        """
        if name in self._homes:
            spec: Spec = resolve_name(self._homes[name])
            return spec
        return self.users[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._homes

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, name: object) -> bool:
        return name in self._homes or name in self.users

    def named(self, name: str) -> Spec:
        """Return the spec of a user's name; execute the code of a user's own entry at its first use.

        Raises:
            ValueError: if the entry does not exist, with all names and the nearest one, or cannot be used.
        """
        # Once: a second execution would make classes that differ.
        if self.is_open and is_in_file(name) and name not in self.users:
            entry = users_value(name)
            # The last entry: the file of the first one may import torch.
            kind = type(self[next(reversed(self._homes))])
            if not isinstance(entry, kind):
                raise ValueError(
                    f"{self.noun} {name!r} is of type {type(entry).__name__}; give an object of type {kind.__name__}"
                )
            # A subclass of its options whose `key` is `name`, as a config and its dump have it.
            from pydantic import create_model

            spec: Any = entry
            options = spec.options
            field: Any = {self.key: (Literal[name], name)}
            self.users[name] = replace(spec, options=create_model(options.__name__, __base__=options, **field))
        if name not in self:
            guess = f"{did_you_mean(name, self)} there are {', '.join(self)}".strip()
            if self.is_open:
                guess += f", or your own as {FORM}"
            raise ValueError(f"unknown {self.noun} {name!r}; {guess}")
        return self[name]

    # --- a section of a config ---------------------------------------------------------------------------------

    def default_options(self) -> Any:
        """Return the first entry's options."""
        return self.options_of({})

    def options_of(self, section: Any) -> BaseModel:
        """Validate a section by the options of the entry that it names; an options object passes as it is.

        Raises:
            ValueError: the section is invalid, or the table has no such entry.
        """
        from pydantic import BaseModel

        if isinstance(section, BaseModel):
            return section
        name = next(iter(self))
        if isinstance(section, Mapping):
            name = str(section.get(self.key, name))
        spec: Any = self.named(name)
        options: BaseModel = spec.options.model_validate(section)
        return options

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        dump = core_schema.plain_serializer_function_ser_schema(
            lambda section, info: section.model_dump(mode=info.mode), info_arg=True
        )
        # Not pydantic's own discriminated union: that would import the file of every entry, torch with some of them.
        return core_schema.no_info_plain_validator_function(self.options_of, serialization=dump)
