"""Judges of image pairs behind one seam, by the name of their backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from pacorl.config.one_of import OneOf
from pacorl.config.table import Table
from pacorl.judge.judge import BackendOptions, Judge, JudgeSpec

if TYPE_CHECKING:
    import torch

JUDGES: Table[JudgeSpec] = Table(
    "backend",
    {"local": "pacorl.judge.local:SPEC", "http": "pacorl.judge.http:SPEC"},
    group="pacorl.judges",
    key="backend",
)

JUDGE = OneOf(JUDGES, default="local")

JudgeSection = Annotated[
    Annotated[BackendOptions, JUDGE] | None,
    # YAML reads `none` as a text; its own word for nothing is `null`.
    BeforeValidator(lambda section: None if isinstance(section, str) and section.lower() == "none" else section),
]
"""A config's judge: the options of one backend, or `none`."""


def open_judge(options: BackendOptions, *, device: str | torch.device, processes: int = 1, waits: bool = True) -> Judge:
    """The judge that a config asks for, ready to be asked.

    Args:
        device: Where a judge of this process lives.
        processes: How many processes share a judge of another.
        waits: Whether one that is still starting is waited for.

    Raises:
        ValueError: if the options name something that is not there, or refuses.
        OSError: if nobody answers at an address.
    """
    return JUDGES[options.backend].open(options, device=device, processes=processes, waits=waits)


def judge_from(source: str, **access: Any) -> tuple[Judge, str]:
    """The judge that a person names in one word: a folder, a hub name, a server's URL, an endpoints YAML, `tiny`.

    Args:
        access: adapter, model, api_key_env, temperature, variants, decline, quantize, stream, as
            in `PacoReward.from_pretrained`.

    Returns:
        The judge and what to call it.

    Raises:
        ValueError: There is none, or it cannot be what was asked for.
    """
    check_temperature(access.get("temperature", 1.0))
    return JUDGES[backend_of(source)].from_source(source, **access)


def check_temperature(temperature: float, *, key: str = "temperature") -> None:
    """Raise ValueError if a judge's logit cannot be divided by it; `key` is what the user called it."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"{key} {temperature:g}: it divides the judge's logit, and must be above 0 and finite")


def check_judge(source: str, *, adapter: str = "") -> None:
    """Check what can be known of a judge that a person names in one word, before anything heavy is imported.

    Raises:
        ValueError: There is no such checkpoint or adapter, or they do not fit.
    """
    JUDGES[backend_of(source)].check(source, adapter)


def backend_of(source: str) -> str:
    """The backend of a judge that a person names in one word."""
    # The default's file brings torch, which a judge elsewhere needs not wait for.
    lighter = (name for name in JUDGES if name != JUDGE.default)
    return next((name for name in lighter if JUDGES[name].claims(source)), JUDGE.default)


def default_judge() -> BackendOptions:
    """The options of a config that says nothing of its judge."""
    return BackendOptions.model_validate(JUDGE.validate({}))
