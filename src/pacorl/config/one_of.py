"""Config sections whose further keys depend on one selecting key: `model.kind`, `objective.name`.

    model: Annotated[PolicyOptions, OneOf(POLICIES, default="flux")]

Each kind's options model is in the kind's file, which is imported only if a config selects the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from pacorl.config.table import Table


@dataclass(frozen=True)
class OneOf:
    """Validates a section by the options of the table entry that it names: a discriminated union, imported lazily."""

    table: Table[Any]
    default: str
    """The entry of a section without `key`."""

    @property
    def key(self) -> str:
        """The section's key that names the entry."""
        return self.table.key

    def default_options(self) -> Any:
        """Create the default entry's options."""
        return self.options_of({})()

    def name_in(self, section: Any) -> str:
        """Return the entry selected by a section's `key`, or the default."""
        return str(section.get(self.key, self.default) if isinstance(section, Mapping) else self.default)

    def options_of(self, section: Any) -> type[BaseModel]:
        """Return the options model of the section's entry; raises ValueError if the table has no such entry."""
        options: type[BaseModel] = self.table.named(self.name_in(section)).options
        return options

    def validate(self, section: Any) -> BaseModel:
        """Validate the section by its entry's options; an options object passes as it is."""
        # Made by Python code, it was validated then.
        if isinstance(section, BaseModel):
            return section
        return self.options_of(section).model_validate(section)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda section, info: section.model_dump(mode=info.mode), info_arg=True
        )
        # Not pydantic's own discriminated union: that would import the file of every entry, torch with some of them.
        return core_schema.no_info_plain_validator_function(self.validate, serialization=dump)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Combine every entry's schema for documentation; imports all entries."""
        # By the handler, which collects the definitions at the top of the schema.
        return {"oneOf": [handler(self.table[name].options.__pydantic_core_schema__) for name in self.table]}
