"""Judges of image pairs behind one protocol, by backend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from pacorl.config.one_of import OneOf
from pacorl.config.options import UsageError
from pacorl.config.table import Table
from pacorl.io.images import recipe_of
from pacorl.judge.judge import BackendOptions, Judge, JudgeSpec
from pacorl.types import TINY, TINY_EDITS

if TYPE_CHECKING:
    import torch

JUDGES: Table[JudgeSpec] = Table(
    "backend",
    {"local": "pacorl.judge.local:SPEC", "http": "pacorl.judge.http:SPEC"},
    key="backend",
)

NO_JUDGE = (
    "name a judge with --judge: a checkpoint such as X-GenGroup/PaCo-Reward-7B, the URL of a judge's server, or tiny, "
    "which knows images of the tiny world only"
)
"""Error of a command without a judge."""

JUDGE = OneOf(JUDGES, default="local")

JudgeSection = Annotated[
    Annotated[BackendOptions, JUDGE] | None,
    # YAML reads `none` as a string.
    BeforeValidator(lambda section: None if isinstance(section, str) and section.lower() == "none" else section),
]
"""A config's judge: the options of one backend, or `none`."""


def open_judge(options: BackendOptions, *, device: str | torch.device, processes: int = 1, waits: bool = True) -> Judge:
    """Open the judge of a config, ready for questions.

    Args:
        device: Device of a judge in this process.
        processes: Number of processes that share a remote judge.
        waits: Wait for a starting server.

    Raises:
        ValueError: for a missing checkpoint, adapter or model, or a refused key.
        OSError: if no server answers at an address.
    """
    return JUDGES[options.backend].open(options, device=device, processes=processes, waits=waits)


def judge_for(source: str, adapter: str = "", *, edits: bool) -> str:
    """Return the committed judge of edits in place of `tiny` for edits, whose questions that judge does not know.

    Any other judge, and any other task, keeps its source.
    """
    return TINY_EDITS if edits and source == TINY and not adapter else source


def default_judge(images: Iterable[Path | bytes]) -> str:
    """Return the tiny judge for images that the tiny generator made, by the recipes in their files.

    Raises:
        UsageError: for any other image, of which that judge can say nothing.
    """
    made_by = [recipe_of(image).get("model") for image in images]
    if not made_by or set(made_by) != {TINY}:
        raise UsageError(NO_JUDGE)
    return TINY


def judge_from(source: str, **access: Any) -> tuple[Judge, str]:
    """Resolve a source string (folder, hub name, server URL, endpoints YAML, `tiny`) to a judge and its display name.

    Args:
        access: adapter, model, api_key_env, temperature, variants, calibration, quantize,
            stream, as in `PacoReward.from_pretrained`.

    Returns:
        The judge and its display name.

    Raises:
        ValueError: The judge is missing, or does not fit these options.
    """
    check_temperature(access.get("temperature", 1.0))
    return JUDGES[backend_of(source)].from_source(source, **access)


def check_temperature(temperature: float, *, key: str = "temperature") -> None:
    """Raise ValueError unless a temperature is positive and finite; `key` is the user's name for it."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"{key} {temperature:g}: it divides the judge's logit, and must be above 0 and finite")


def check_judge(source: str, *, adapter: str = "") -> None:
    """Check a source string and its adapter before heavy imports.

    Raises:
        ValueError: There is no such checkpoint or adapter, or they do not fit.
    """
    JUDGES[backend_of(source)].check(source, adapter)


def backend_of(source: str) -> str:
    """Return the backend of a source string."""
    for name in JUDGES:
        # The default's file imports torch, which a remote judge does not need.
        if name != JUDGE.default and JUDGES[name].claims(source):
            return name
    return JUDGE.default
