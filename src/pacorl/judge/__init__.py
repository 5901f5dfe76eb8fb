"""Judges of image pairs behind one protocol: in this process, or behind an OpenAI-compatible API."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from pacorl.config.base import validated
from pacorl.config.options import UsageError
from pacorl.core.devices import available_device, best_dtype
from pacorl.io.files import text_digest
from pacorl.io.hub import checkpoint_digest
from pacorl.io.images import recipe_of
from pacorl.judge.calibration import read_calibration
from pacorl.judge.judge import STARTUP_SECONDS, Judge, JudgeSettings, is_address
from pacorl.types import TINY, TINY_EDITS

if TYPE_CHECKING:
    import torch

NO_JUDGE = (
    "name a judge with --judge: a checkpoint such as X-GenGroup/PaCo-Reward-7B, the URL of a judge's server, or tiny, "
    "which knows images of the tiny world only"
)
"""Error of a command without a judge."""

JudgeSection = Annotated[
    JudgeSettings | None,
    # YAML reads `none` as a string.
    BeforeValidator(lambda section: None if isinstance(section, str) and section.lower() == "none" else section),
]
"""A config's judge, or `none`."""


def open_judge(
    settings: JudgeSettings,
    *,
    device: str | torch.device,
    processes: int = 1,
    startup: float = STARTUP_SECONDS,
    **options: Any,
) -> Judge:
    """Open the judge of a config, ready for questions.

    Args:
        device: Device of a judge in this process.
        processes: Number of processes that share a remote judge.
        startup: Seconds that a server which does not answer yet is waited for.
        options: `variants` and `calibration`, as in `PacoReward.from_pretrained`.

    Raises:
        ValueError: for a missing checkpoint or model, or a refused key.
        UnreachableError: if no server answers at the address.
    """
    if settings.remote:
        from pacorl.judge.http import HttpJudge

        return HttpJudge.connect(settings.checkpoint, startup=startup, processes=processes, **options)
    # Imported here: a judge on a server needs no model libraries.
    from pacorl.judge.local import LocalJudge

    return LocalJudge.from_pretrained(
        settings.checkpoint,
        dtype=best_dtype(settings.checkpoint, device),
        quantize=settings.quantize,
        stream=settings.stream,
        device=device,
        **options,
    )


def identity_at(source: str, judge: Judge | None = None) -> str:
    """Identify the verdicts of a source's judge, independent of paths.

    Args:
        judge: The opened judge: a server may publish the digest of its weights.

    Returns:
        A digest of the weights, else the name of a server's model; empty if unknown, e.g. for a checkpoint outside this
        machine.
    """
    published = str(getattr(judge, "identity", ""))
    if published or is_address(source):
        return published or f"model {JudgeSettings(checkpoint=source).name}"
    from pacorl.judge.adapter import base_of
    from pacorl.judge.local import EMBEDDED

    checkpoint = str(EMBEDDED.get(source, source))
    # Of a LoRA its base too. A digest is empty for weights outside this machine.
    digests = [checkpoint_digest(part) for part in (checkpoint, base_of(checkpoint)) if part]
    if not all(digests):
        return ""
    return f"sha256 {text_digest(' '.join(digests))[:16]}"


def settings_of(source: str, *, memory: str) -> JudgeSettings:
    """Return the settings of a command's judge."""
    return validated(JudgeSettings, {"checkpoint": source}).in_memory(memory)


def judge_from(source: str, *, memory: str = "normal", **options: Any) -> tuple[Judge, str]:
    """Resolve a source string (folder, hub name, server's address, `tiny`) to a judge and its display name.

    Args:
        memory, options: As in `PacoReward.from_pretrained`; a judge ignores options that do not apply to it.

    Raises:
        ValueError: The judge is missing, or does not fit these options.
        UnreachableError: No server answers.
    """
    settings = settings_of(source, memory=memory)
    if not settings.remote:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # the weights' bar would break into a command's own lines
    judge = open_judge(settings, device=available_device(), startup=0.0, **options)
    name = source
    if settings.remote:
        name = judge.model  # type: ignore[attr-defined] # a server's only model has a name too
    return judge, name


def judge_for(source: str, *, edits: bool) -> str:
    """Return the committed judge of edits in place of `tiny` for edits, on which that judge is not trained.

    Any other judge, and any other task, keeps its source.
    """
    return TINY_EDITS if edits and source == TINY else source


def default_judge(images: Iterable[Path | str]) -> str:
    """Return the tiny judge if the tiny generator made all images, by the recipes in their files.

    Raises:
        UsageError: for other images, on which that judge is not trained.
    """
    for image in images:
        if recipe_of(Path(image)).get("model") != TINY:
            raise UsageError(f"{image} was not made by the tiny generator; {NO_JUDGE}")
    return TINY


def check_judge(source: str, *, calibration: str | Path = "") -> None:
    """Check a source string and its calibration before weights are loaded.

    Of a server, and of weights that are not on this machine yet, a fault appears later.

    Raises:
        ValueError: There is no such checkpoint.
        UsageError: The calibration is of another judge.
    """
    if not is_address(source):
        from pacorl.judge.local import check_local

        check_local(source)
        curve, identity = read_calibration(calibration), identity_at(source)
        if curve and identity:
            curve.check_judge(source, source, identity)
