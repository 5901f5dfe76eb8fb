"""The watch on reward hacking inside a policy run: what it sees, what it says, and the stop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.engine.monitor import PREFIX, Alarm, Kind, Look, alarm_values, look_at, signs
from pacorl.io.documents import read_jsonl
from pacorl.train.checkpointing import save
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.train.training import Training

logger = logging.getLogger(__name__)


class HackingSuspectedError(ValueError):
    """A sign of reward hacking went beyond a limit that stops the run; the state is saved."""


def panel_statistics_of(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[Look]:
    """What each sheet looks like."""
    return [look_at(prompt, image) for prompt, image in zip(prompts, images, strict=True)]


def watched(training: Training, kind: Kind, looks: Sequence[Look], values: Mapping[str, float]) -> dict[str, float]:
    """The signs of all ranks' sheets and the alarms that they raise, for the log's line; `values` holds the rest of it.

    Every rank sees the same looks and so comes to the same alarms. They stay in `training.alarms` until `heed`.
    """
    found = {f"{PREFIX}{name}": value for name, value in signs(looks).items()}
    alarms = training.watch.see(kind, {**values, **found})
    training.alarms += alarms
    return found | alarm_values(alarms)


def heed(training: Training) -> None:
    """Says what is alarming, each sign once. Saves, and raises HackingSuspectedError, where a limit says stop."""
    alarms, training.alarms = training.alarms, []
    for alarm in alarms:
        if alarm.sign not in training.warned:
            training.warned.add(alarm.sign)
            if training.runtime.is_main:
                logger.warning("reward hacking? after epoch %d: %s", training.epoch, alarm)
    stops = [alarm for alarm in alarms if alarm.action == "stop"]
    if stops:
        save(training)
        raise HackingSuspectedError(_told_to_stop(training, stops))


def remembered(path: Path) -> list[dict[str, float]]:
    """The lines of a run's log, for `HackingMonitor.recall`; none where there is no log."""
    return read_jsonl(path) if path.exists() else []


def _told_to_stop(training: Training, stops: Sequence[Alarm]) -> str:
    return (
        f"stopped after epoch {training.epoch}, and saved: {'; '.join(map(str, stops))}. Look at the samples; reward "
        "what is lost as well, or lower optimizer.lr, or go on with watch.<sign>.action=warn"
    )
