"""Options of commands, each declared once, and limits that commands and configs share.

    @dataclass(frozen=True, kw_only=True)
    class SortOptions(JudgeOptions):
        size: Size | None = option(None, "HEIGHTxWIDTH of an image.", parser=Size.parse)

A field is a flag of its own name (`best_of` → `--best-of`); `cli.shared` makes commands of groups. This file imports
no heavy module, because `pacorl --help` reads it.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pacorl.types import TINY, Size

LARGEST = 1_000_000
"""Upper bound of counts. Larger values are slips, and lists of such length would fill the memory."""
WORKERS = 256
"""Threads or processes at most."""
SEEDS = 2**53
"""Largest seed: integers that JSON readers represent exactly."""
JUDGE_KEY = "PACORL_API_KEY"
"""Environment variable of the key of a judge's server: callers send it, and `pacorl serve` asks for it."""

INCOMPLETE = 3
"""Exit code if an item has no judgement, or was left out with the user's permission."""
BELOW = 4
"""Exit code if a score is below the requested least score."""


class UsageError(ValueError):
    """A wrong use of a command."""

    exit_code = 2
    """Exit code of the command."""


Memory = Literal["normal", "low", "lowest"]
"""Forms of the frozen weights of a model in this process: as saved, in int8, and in int8 in main memory."""
MEMORY: tuple[Memory, ...] = get_args(Memory)


def packed_form(memory: str) -> dict[str, Any]:
    """Return the quantisation of a `memory`, on which images and scores depend; empty if there is none."""
    if memory == "normal":
        return {}
    return {"quantize": "int8"}


FLAG = "flag"
"""Key of a flag's settings in a field's metadata."""


def option(default: Any, text: str, *flags: str, **settings: Any) -> Any:
    """Declare a dataclass field as a command-line flag.

    Args:
        default: a list makes the flag repeatable.
        text: the flag's help.
        flags: by default the field's name.
        settings: of `typer.Option`. All numbers have `min` and `max`, since a range refuses NaN.
    """
    metadata = {FLAG: {"help": text, "flags": flags, **settings}}
    if isinstance(default, list):
        # Dataclasses refuse a list as a default, since all groups would share it.
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def inherited(group: type, name: str, **changes: Any) -> Any:
    """Copy a field of another group with changes of its `default` or settings."""
    base = group.__dataclass_fields__[name]  # type: ignore[attr-defined]
    default = changes.pop("default", base.default)
    return field(default=default, metadata={FLAG: base.metadata[FLAG] | changes})


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """The judge of a command; the key of a server is in the environment variable `JUDGE_KEY`."""

    panel: ClassVar[str] = "Judge"

    judge: str = option("", "A model's or LoRA's folder or hub name, a server's URL (URL#MODEL), or tiny.")
    memory: Memory = option(
        "normal",
        "low: for a small card. Models of this process keep their blocks' weights in int8, and take turns on the card. "
        "lowest: these weights also stay in main memory, and are sent layer by layer.",
    )


@dataclass(frozen=True, kw_only=True)
class CalibratedJudge(JudgeOptions):
    """A judge with its calibration."""

    calibration: Path | None = option(None, "A file of `pacorl calibrate`: a curve, and thresholds by panels.")


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions:
    """The generator of a command, and how it samples."""

    panel: ClassVar[str] = "Generator"

    model: str = option(TINY, "A diffusers folder, a hub name, or the embedded tiny generator.")
    kind: str = option("", "The policy that runs the model; found out from it if left out.")
    adapter: str = option("", "A LoRA of any form: folder, file, ORG/NAME or ORG/NAME:FILE on the hub.")
    size: Size | None = option(
        None,
        "HEIGHTxWIDTH of an image; the record's, 192x192 for tiny, else 1024x1024.",
        parser=Size.parse,
        metavar="SIZE",
    )
    steps: int | None = option(
        None, "Denoising steps; the model's own, e.g. 28 for FLUX.1-dev, 10 for tiny.", min=1, max=1000
    )
    options: list[str] = option(
        [],
        "NAME=VALUE of the model's pipeline in diffusers, e.g. guidance_scale=4 or negative_prompt=blurry; may be "
        "repeated.",
        "--option",
    )
    seed: int = option(0, "Of the first image; the next ones count on from it.", min=0, max=SEEDS)

    @property
    def policy_options(self) -> dict[str, Any]:
        """The options of a kind, as `Generator.from_pretrained` takes them. Raises ValueError for another form."""
        values: dict[str, Any] = {}
        for text in self.options:
            name, equals, value = text.partition("=")
            if not equals or not name.isidentifier():
                raise ValueError(f"--option {text!r} is not NAME=VALUE, such as guidance_scale=4")
            values[name] = value
            with suppress(ValueError):  # plain text
                values[name] = json.loads(value)
        return values


@dataclass(frozen=True, kw_only=True)
class StudioModels(JudgeOptions):
    """The generator and the judge of the studio's page."""

    panel: ClassVar[str] = "Models"

    model: str = inherited(GeneratorOptions, "model")
    adapter: str = inherited(GeneratorOptions, "adapter")
    judge: str = inherited(JudgeOptions, "judge", default=TINY)
