"""Run configs: sparse YAML over the vetted recipe, checked whole before anything heavy is imported.

The defaults are the paper's settings for FLUX.1-dev on sets of images (arXiv 2512.04784, §7 and Tab. 5); a file lists
only differences. Unknown keys, wrong types and impossible combinations are refused with the key, the value and the
fix.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from pacorl.config.options import LARGEST, MEMORY
from pacorl.config.recipes import config_file
from pacorl.config.reference import unknown_key
from pacorl.io.documents import dump_yaml, faults_of, parse_yaml, read_yaml

logger = logging.getLogger(__name__)

Positive = Annotated[int, Field(gt=0, le=LARGEST)]
Rank = Annotated[int, Field(gt=0, le=4096)]
"""Rank of a LoRA, at most the width of a layer, some thousands in released generators."""
Seed = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""Integer that all JSON readers represent exactly, browsers included."""
Share = Annotated[float, Field(ge=0, le=1)]
TrackerName = Literal["tensorboard", "wandb", "swanlab"]
"""Service that shows the curves in addition to report.html; requires the extra `trackers`."""
NAME, KIND = "name", "kind"
"""Keys that select an entry and thereby the section's other keys: `name` of an objective, `kind` of a generator."""
EXTENDS = "extends"
"""Key whose value is the base config: a recipe, or a file in the same folder."""


class ConfigError(ValueError):
    """Error in a config; the message names key, value and fix."""


class Section(BaseModel):
    """Frozen section of a config with fixed keys."""

    # Extra keys are refused: a typo must not silently mean a default. NaN as a bound would accept every value.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def from_yaml(cls, path: str | Path, *overrides: str) -> Self:
        """Read a config from a file, like a command.

        Args:
            path: the YAML, or a recipe's name.
            overrides: changes, each as `section.key=value`.

        Raises:
            ConfigError: The config cannot be run; one line with the first faults.

        Example:
            config = PolicyConfig.from_yaml("tiny", "epochs=3", "sampling.batch=6")
        """
        return load(cls, Path(path), overrides)


class ModelSection(Section):
    """Section of a model whose frozen weights have the form that the run's `memory` chooses."""

    _memory: str = PrivateAttr("normal")

    def in_memory(self, memory: str) -> Self:
        """Return a copy with the weights' form of a `memory`. Raises ValueError if there is none of that name."""
        if memory not in MEMORY:
            raise ValueError(f"memory {memory!r} is none of {', '.join(MEMORY)}")
        copy = self.model_copy()
        copy._memory = memory
        return copy

    @property
    def memory(self) -> str:
        """Choice of the run."""
        return self._memory

    @property
    def quantize(self) -> str:
        """Form of the blocks' weights: none, or int8."""
        return "none" if self._memory == "normal" else "int8"

    @property
    def stream(self) -> bool:
        """Whether the blocks' weights stay in main memory, and are sent to the device layer by layer."""
        return self._memory == "lowest"


Run = TypeVar("Run", bound=Section)


def load(kind: type[Run], path: Path | None, overrides: Sequence[str] = ()) -> Run:
    """Read a YAML file, or a recipe by its name, and `section.key=value` overrides into a config.

    Raises:
        ConfigError: The config cannot be run; one line with the first faults.
        ValueError: The file or an override is no YAML.
    """
    document = read_config(path) if path else {}
    # Names first, since a section's entry decides its other keys.
    for override in sorted(overrides, key=lambda override: f".{NAME}=" not in override.replace(" ", "")):
        _apply(document, override)
    try:
        return validated(kind, document)
    except ConfigError as fault:
        raise ConfigError(f"{path}: {fault}" if path else str(fault)) from None


def read_config(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a config's keys from a file, or from a recipe by its name, without their defaults.

    A key `extends` names the config that the file changes: its own keys win, section by section.

    Args:
        above: the files that extend this one.

    Raises:
        ValueError: it cannot be read, or is no mapping.
    """
    file = config_file(path)
    document = read_yaml(file)
    if not isinstance(document, dict | None):
        raise ConfigError(f"{path}: a config is a mapping of keys, this is a {type(document).__name__}")
    document = document or {}
    base = document.pop(EXTENDS, None)
    if base is None:
        return document
    if not isinstance(base, str) or file in above:
        raise ConfigError(f"{path}: extends {base!r} is not another config; name a recipe, or a file beside this one")
    beside = file.parent / base
    return merged(read_config(beside if beside.is_file() else Path(base), (*above, file)), document)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change keys of a document, by section. A section keeps none of its keys if it selects another entry."""
    document = dict(base)
    for key, value in changes.items():
        before = document.get(key)
        if not isinstance(before, Mapping) or not isinstance(value, Mapping):
            document[key] = value
        elif any(choice in value and value[choice] != before.get(choice) for choice in (NAME, KIND)):
            document[key] = dict(value)
        else:
            document[key] = merged(before, value)
    return document


def _apply(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not last:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    value = parse_yaml(text, name=f"override {override!r} (quote one with spaces)")
    for section in sections:
        # Sections that the file leaves out are created.
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise ConfigError(f"override {override!r}: {section} is no section here; give it whole, as {section}=…")
    # The file's other keys belong to the former entry. The new entry lacks them or gives them another meaning.
    if sections and last == NAME and document.get(NAME) != value:
        document.clear()
    document[last] = value


def validated(kind: type[Run], document: Any) -> Run:
    """Validate a document as a section of a config. Raises ConfigError, in one line with the first faults."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise ConfigError(faults_of(error, unknown=partial(unknown_key, kind), whole="config")) from None


def dump(config: Section) -> str:
    """Serialise the whole config as YAML."""
    # JSON mode turns paths into text, as safe YAML needs.
    return dump_yaml(config.model_dump(mode="json"))


def changes_to(config: Section, before: Mapping[str, Any]) -> dict[str, list[Any]]:
    """List the config changes of a resumed run: dotted key → [value before, value now].

    Args:
        before: the config that the run had, as JSON has it. Keys that only one of the two has are no change.
    """
    return dict(_changes("", before, config.model_dump(mode="json")))


def _changes(key: str, before: Any, now: Any) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in now:
            if name in before:
                yield from _changes(f"{key}.{name}".removeprefix("."), before[name], now[name])
    elif before != now:
        yield key, [before, now]


def check_replaces(config: Any) -> None:
    """Raise ConfigError if a run that begins in `out` would replace the config.yaml of another command."""
    path = config.out / "config.yaml"
    keys = read_yaml(path) if path.is_file() else {}
    if not isinstance(keys, dict) or keys.keys() - type(config).model_fields:
        raise ConfigError(f"{path} is not of this command, and is not replaced; name another folder with out=…")


def check_changes(
    changes: Mapping[str, Sequence[Any]], *, free: Sequence[str], lora_key: str = "adapter.start", warns: bool = True
) -> None:
    """Log a warning for each change of the `free` keys and sections, and raise ConfigError if other keys change."""
    prefixes = tuple(f"{key}." for key in free)
    frozen = []
    for key, (old, new) in changes.items():
        change = f"{key} was {old!r} and is now {new!r}"
        if not f"{key}.".startswith(prefixes):
            frozen.append(change)
        elif warns:
            logger.warning("resumed with another setting: %s", change)
    if frozen:
        raise ConfigError(
            f"a run that goes on keeps its settings, and {'; '.join(frozen)}: take the old values, or "
            f"start anew with out=…, from this run's LoRA by {lora_key}"
        )
