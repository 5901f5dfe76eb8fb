"""Run configs: sparse YAML over the vetted recipe, checked whole before anything heavy is imported.

The defaults are the paper's settings for FLUX.1-dev on sets of images (arXiv 2512.04784, §7 and Tab. 5); a file says
only what differs. Unknown keys, wrong types and impossible combinations are refused with the key, the value and the
fix.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pacorl.config.one_of import OneOf
from pacorl.config.upgrade import upgrade
from pacorl.io.documents import dump_yaml, parse_yaml, read_yaml

logger = logging.getLogger(__name__)

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = BeforeValidator(lambda value: "off" if value is False else value)
"""A choice with `off` in it, which YAML reads as false."""
TrackerName = Literal["tensorboard", "wandb", "swanlab"]
"""Where curves are watched beside report.html; the services need `pip install 'pacorl[trackers]'`."""


class ConfigError(ValueError):
    """A config that cannot be run; the message names key, value and fix."""


class Section(BaseModel):
    """A frozen part of a config that knows its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Run = TypeVar("Run", bound=Section)


def load(kind: type[Run], path: Path | None, overrides: Sequence[str] = ()) -> Run:
    """Reads a YAML file and `section.key=value` overrides into a config.

    Raises ConfigError with one line per fault.
    """
    document = _read_yaml(path) if path else {}
    for override in overrides:
        _apply(document, override)
    prefix = f"{path}: " if path else ""
    try:
        for notice in upgrade(document, kind.__name__):
            logger.warning("%s%s", prefix, notice)
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from None
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(prefix + _explain(kind, document, fault) for fault in error.errors())) from None


def dump(config: Section) -> str:
    """The whole config as YAML."""
    return dump_yaml(config.model_dump(mode="json"))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = read_yaml(path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys, this is a {type(document).__name__}")
    return document


def _apply(document: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
    try:
        document[last] = parse_yaml(value, name=f"override {override!r}")
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _explain(kind: type[Section], document: Mapping[str, Any], fault: Mapping[str, Any]) -> str:
    keys = [str(part) for part in fault["loc"]]
    key = ".".join(keys) or "config"
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], _keys_beside(kind, document, keys[:-1]), n=1)
        return f"{key}: unknown key" + (f", did you mean {near[0]!r}?" if near else "")
    message = fault["msg"].removeprefix("Value error, ")
    value = fault["input"]
    shown = "" if isinstance(value, dict | BaseModel) else f" (got {value!r})"
    return f"{key}: {message}{shown}"


def _keys_beside(kind: type[BaseModel], document: Any, path: Sequence[str]) -> list[str]:
    """The keys that the section at `path` may have, whatever they depend on."""
    for key in path:
        document = document.get(key) if isinstance(document, Mapping) else None
        field = kind.model_fields.get(key)
        unions = [one_of for one_of in field.metadata if isinstance(one_of, OneOf)] if field else []
        candidates = [field.annotation, *get_args(field.annotation)] if field else []
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if unions or sections:
            kind = unions[0].options_of(document) if unions else sections[0]
    return list(kind.model_fields)
