"""Config sections whose further keys depend on one selecting key: `model.kind`, `objective.name`.

    model: Annotated[PolicyOptions, OneOf(POLICIES, default="flux")]

Each kind's options model is in the kind's file, which is imported only if a config selects the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from pacorl.config.table import Table


@dataclass(frozen=True)
class OneOf:
    """Validates a section by the options of the table entry that it names: a discriminated union, imported lazily."""

    table: Table[Any]
    default: str
    """The entry of a section without the table's key."""

    def default_options(self) -> Any:
        """Create the default entry's options."""
        return self.validate({})

    def validate(self, section: Any) -> BaseModel:
        """Validate the section by its entry's options; an options object passes as it is.

        Raises:
            ValueError: if the table has no such entry.
        """
        if isinstance(section, BaseModel):
            return section
        name = section.get(self.table.key, self.default) if isinstance(section, Mapping) else self.default
        options: type[BaseModel] = self.table.named(str(name)).options
        return options.model_validate(section)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda section, info: section.model_dump(mode=info.mode), info_arg=True
        )
        # Not pydantic's own discriminated union: that would import the file of every entry, torch with some of them.
        return core_schema.no_info_plain_validator_function(self.validate, serialization=dump)
