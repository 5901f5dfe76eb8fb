"""Read a run's folder into plain records; only metrics.jsonl must be there.

A last line without its line break is still being written and is left for the next time. Any other unreadable line is
an error with file and line.
"""

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from pacorl.config.public import public
from pacorl.core.grid import parse_layout
from pacorl.core.metric_names import ALARM
from pacorl.io.documents import dump_yaml, read_log, read_object, read_text, read_yaml, typed
from pacorl.io.files import inside
from pacorl.models.policies import POLICIES
from pacorl.records.leaks import LEAKS
from pacorl.types import Grid, Matrix

Record = dict[str, Any]

CONSISTENCY = "p_yes"
"""The judge's mean P(Yes) over the pairs of panels of a set."""
REWARDED = "consistency"
"""What the reward makes of it."""
REWARD = "reward"
SINGLE = Grid(1, 1)  # for edits, and for samples whose log names no grid


class Sample(BaseModel):
    """One image that an evaluation made, a grid image or an edit: a line of samples/evaluation-*.jsonl."""

    model_config = ConfigDict(frozen=True)

    prompt_id: int
    seed: int
    image: Path
    """Absolute; inside the run's samples folder."""
    text: str = ""
    theme: str = ""
    grid: Annotated[Grid, BeforeValidator(lambda layout: parse_layout(str(layout)) if layout else SINGLE)] = SINGLE
    p_yes: Matrix | None = None
    scores: Mapping[str, float | None] | None = None
    reward: float | None = None
    """The weighted sum of the rewards; None if one is missing, or if the run did not write it."""

    @cached_property
    def measures(self) -> dict[str, float]:
        """Scores under the page's names, the judge's P(Yes) first; unrewarded ones begin with `held_out/`."""
        measures = numbers(self.scores or {})
        judged = [value for value in chain(*(self.p_yes or ())) if value is not None]
        if judged:
            measures = {CONSISTENCY: fmean(judged)} | measures
        return measures

    def value(self, measure: str) -> float | None:
        """Value of a measure, or of the reward; None without one."""
        return self.reward if measure == REWARD else self.measures.get(measure)

    @property
    def key(self) -> tuple[int, int, str]:
        """Identity of an image across evaluations and runs, whose files of prompts may number other texts."""
        return self.prompt_id, self.seed, self.text


@dataclass(frozen=True, slots=True)
class RaisedAlarm:
    """A sign of reward hacking beyond its limit."""

    sign: str
    where: str
    epoch: int
    """Epoch after which it was first raised."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's files so far, without images that are ahead of the log, as a stop within an evaluation leaves them."""

    path: Path
    epochs: list[Record]
    """Lines of metrics.jsonl of kind `epoch`, in the order written."""
    evaluations: list[Record]
    summary: Record
    """summary.json; empty until the run has ended."""
    config: str
    """config.yaml for publication: keys are masked."""
    settings: Mapping[str, str]
    """Every leaf of the config by its dotted key; items of a list by their number."""
    samples: dict[int, list[Sample]]
    """Evaluation images by epoch, ascending."""
    leaks: str
    """Training prompts that are evaluated on; empty if none."""

    @property
    def command(self) -> str:
        """The command that trained it; empty without a config."""
        keys = {"character": "train-character", "data.train.0": "train-reward", "objective.name": "train-policy"}
        return next((command for key, command in keys.items() if key in self.settings), "")

    @property
    def trained_on(self) -> list[str]:
        """The files of prompts, the sources of pairs, or the character's folder."""
        return self._values(r"prompts\.train|character|data\.train\.\d+")

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards."""
        return self._values(r"rewards\.\d+\.name")

    def _values(self, keys: str) -> list[str]:
        return [value for key, value in self.settings.items() if re.fullmatch(keys, key)]

    @property
    def is_editor(self) -> bool:
        """Whether its generator edits images and makes no sets."""
        kind = self.settings.get("model.kind", "")
        return kind in POLICIES and not POLICIES[kind].sets

    @property
    def alarms(self) -> list[RaisedAlarm]:
        """Every alarming sign once, earliest first; training images and evaluations apart."""
        raised: dict[tuple[str, str], int] = {}
        for where, records in (("training images", self.epochs), ("evaluation", self.evaluations)):
            for record in records:
                for key, value in record.items():
                    if key.startswith(ALARM) and value:
                        raised.setdefault((key.removeprefix(ALARM), where), int(record["epoch"]))
        alarms = [RaisedAlarm(*sign, epoch) for sign, epoch in raised.items()]
        return sorted(alarms, key=lambda alarm: alarm.epoch)

    @property
    def last(self) -> int | None:
        """Epoch of the newest evaluation with images; None without one."""
        return max(self.samples, default=None)


def read_run(run: Path) -> RunFolder:
    """Read a run's folder. Raises ValueError if `run` is no run's folder, or a file in it cannot be understood."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"{run} has no metrics.jsonl, so it is not a run's folder; name the folder that a run wrote")

    records = read_log(metrics, _metrics_line)
    evaluations = [record for record in records if record.get("kind") == "evaluation"]

    # Images of every evaluation, by number: an epoch beyond the padding of its file's name would come too early.
    evaluated = {line["epoch"] for line in evaluations}
    samples = {}
    for path in (run / "samples").glob("evaluation-*.jsonl"):
        epoch = path.stem.rpartition("-")[2]
        if epoch.isdecimal():
            listed = read_log(path, partial(_sample, folder=path.parent))
            if int(epoch) in evaluated:
                samples[int(epoch)] = listed

    # One measure is shown once.
    if samples and _rewards_p_yes(chain(*samples.values())):
        for measured in [*evaluations, *(sample.measures for sample in chain(*samples.values()))]:
            measured.pop(REWARDED, None)

    # Summary and config are absent while the run has not ended or has just begun.
    summary = run / "summary.json"
    config = run / "config.yaml"
    leaks = run / LEAKS
    document = read_yaml(config) if config.is_file() else None
    return RunFolder(
        path=run,
        epochs=[record for record in records if record.get("kind") == "epoch"],
        evaluations=evaluations,
        summary=read_object(summary) if summary.is_file() else {},
        config=dump_yaml(public(document)) if document else "",
        settings=dict(_leaves(public(document or {}))),
        samples=dict(sorted(samples.items())),
        leaks=read_text(leaks).strip() if leaks.is_file() else "",
    )


def _rewards_p_yes(samples: Iterable[Sample]) -> bool:
    """Whether the reward of consistency is the judge's P(Yes) itself in each image, as by default."""
    for sample in samples:
        p_yes, rewarded = (sample.measures.get(name, math.nan) for name in (CONSISTENCY, REWARDED))
        if not math.isclose(p_yes, rewarded, abs_tol=1e-6):
            return False
    return True


def number(value: object) -> float | None:
    """Return `value` as a finite float, or None for anything else (a bool is no number)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) <= sys.float_info.max:
        return float(value)
    return None


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Select a record's finite numbers."""
    finite = {}
    for name, value in record.items():
        figure = number(value)
        if figure is not None:
            finite[str(name)] = figure
    return finite


def _metrics_line(record: Record) -> Record:
    if record.get("kind") in ("epoch", "evaluation") and number(record.get("epoch")) is None:
        raise ValueError(f"'epoch' is {record.get('epoch')!r}; a metrics line needs its number")
    return record


def _sample(record: Record, *, folder: Path) -> Sample:
    sample = typed(record, Sample)
    # A page embeds its images, so a record must not name other files of the machine.
    return sample.model_copy(update={"image": inside(folder, str(sample.image))})


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if not value or not isinstance(value, dict | list):
        yield key, str(value)
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield from _leaves(inner, f"{key}.{name}" if key else str(name))
