"""EditReward-Bench: does a judge prefer the edit that people prefer? (EditScore, arXiv 2509.23909; PaCo-RL, Tab. 1)

A row has an instruction, an input image, two output images of which people preferred the first, a task type, and the
dimension that they were asked about. Each distinct output is judged once: prompt following, consistency, and
overall = √(PF · C). A row is right where the first output scores higher; figures are macro means over task types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pacorl.bench.images import ImageCache
from pacorl.bench.published import EDIT_REWARD_BENCH, PAPER
from pacorl.bench.rows import Rows, fingerprint, lacking, open_rows
from pacorl.bench.suite import BadItemError, Row, check_faults
from pacorl.bench.table import BenchmarkOptions, BenchmarkSpec
from pacorl.bench.tables import Line, Table
from pacorl.core import questions as wordings
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.data.sources import evenly_spread
from pacorl.judges.pairwise import ask
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judges.judge import Judge

TEXTS = ("key", "instruction", "task_type", "dimension")
DIMENSIONS = ("prompt_following", "consistency", "overall")
TASK_TYPES = 13

TITLES = {"prompt_following": "Prompt following", "consistency": "Consistency", "overall": "Overall"}
NOTE = (
    "Accuracy, macro mean over the {count} task types. Strict: the preferred output scores higher. With ties (≥): it "
    "scores at least as high. The paper does not say which of the two it prints. Each output is resized to its input, "
    "overall is √(prompt following · consistency) of an image, and P(Yes) adds up the spellings of Yes and of No that "
    "are single tokens. Intervals are 95 %, bootstrapped over instructions."
)


@dataclass(frozen=True, slots=True)
class Choice:
    """One row: two outputs, the preferred one first."""

    number: int
    """Its place in the table."""
    outputs: tuple[str, str]
    instruction: str
    task: str
    dimension: str


@dataclass(frozen=True, slots=True)
class EditData:
    """The wanted rows of the table."""

    rows: Rows
    choices: tuple[Choice, ...]
    refused: Mapping[str, str]
    fingerprint: str


def read_edit_data(source: Path, *, limit: int | None = None, skip_bad: bool = False) -> EditData:
    """Reads the texts of the table.

    Raises:
        ValueError: if rows are none of EditReward-Bench's; it lists them, or with `skip_bad` leaves them out.
    """
    rows = open_rows(source)
    texts = rows.texts(TEXTS)
    choices, faults = [], dict[str, str]()
    for number, row in enumerate(texts):
        where = f"{source}, row {number + 1}"
        try:
            choices.append(_choice(number, row))
        except ValueError as error:
            faults[where] = f"{where}: {error}"
    refused = check_faults(faults, skip_bad=skip_bad)
    if not choices:
        raise ValueError(f"{source} holds no rows")
    return EditData(rows, tuple(evenly_spread(choices, limit)), refused, fingerprint(texts))


def _choice(number: int, row: Mapping[str, Any]) -> Choice:
    missing = lacking(row, TEXTS)
    if missing:
        raise ValueError(f"{missing}; a row of EditReward-Bench has {', '.join(TEXTS)}, input_image and output_images")
    key, dimension = row["key"], str(row["dimension"])
    if not isinstance(key, list) or len(key) != 2 or key[0] == key[1]:
        raise ValueError(f"'key' must name two outputs, got {key!r}")
    if dimension not in DIMENSIONS:
        raise ValueError(f"dimension {dimension!r} is none of {', '.join(DIMENSIONS)}")
    return Choice(number, (str(key[0]), str(key[1])), str(row["instruction"]), str(row["task_type"]), dimension)


class EditRewardBench:
    """The benchmark over a judge, which should add up the spellings of Yes and of No (`variants`)."""

    title = "EditReward-Bench"
    columns = tuple(f"{TITLES[dimension]}{ties}" for ties in ("", " (≥)") for dimension in DIMENSIONS)
    source = f"{PAPER}, Tab. 1"
    published = EDIT_REWARD_BENCH
    digits = 3

    def __init__(self, data: EditData, judge: Judge, *, judge_name: str) -> None:
        self.data, self.judge, self.judge_name = data, judge, judge_name
        self.refused = data.refused
        self._first: dict[str, tuple[Choice, int]] = {}
        for choice in data.choices:
            for place, output in enumerate(choice.outputs):
                self._first.setdefault(output, (choice, place))

    @property
    def notes(self) -> tuple[str, ...]:
        count = len({choice.task for choice in self.data.choices})
        fewer = "" if count == TASK_TYPES else f" The published figures are over {TASK_TYPES} task types."
        return (NOTE.format(count=count) + fewer,)

    def settings(self) -> Mapping[str, Any]:
        return {"benchmark": "edit-reward-bench", "data": self.data.fingerprint, "judge": self.judge_name}

    def keys(self) -> Sequence[str]:
        """The distinct outputs of the wanted rows."""
        return list(self._first)

    def texts(self) -> Mapping[str, Sequence[str]]:
        return {output: [choice.instruction] for output, (choice, _) in self._first.items()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        cache = ImageCache(self.data.rows.folder)
        questions = {(key, name): question for key in keys for name, question in self._questions(key, cache).items()}
        answers = ask(self.judge, questions)
        return [_row(key, followed=answers[key, "followed"], kept=answers[key, "kept"]) for key in keys]

    def _questions(self, key: str, cache: ImageCache) -> dict[str, Question]:
        choice, place = self._first[key]
        before, after = self._pictures(choice, place, cache)
        pair = (before, after.resize(before.size))
        return {
            "followed": Question(pair, wordings.edit_followed_in_a_word(choice.instruction)),
            "kept": Question(pair, wordings.edit_consistent_in_a_word(choice.instruction)),
        }

    def _pictures(self, choice: Choice, place: int, cache: ImageCache) -> tuple[Image, Image]:
        row, where = self.data.rows.row(choice.number), f"row {choice.number + 1}"
        outputs = row.get("output_images")
        if not isinstance(outputs, list) or len(outputs) != 2:
            raise BadItemError(f"{where}: 'output_images' must be two images")
        before = cache.decode(row.get("input_image"), name=f"{where}, input_image")
        return before, cache.decode(outputs[place], name=f"{where}, output_images[{place}]")

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        return _accuracies(self._judged(rows))

    def _judged(self, rows: Sequence[Row]) -> list[tuple[Choice, float, float]]:
        """The rows of the table whose two outputs are both measured, with their scores."""
        row_of = {row["key"]: row for row in rows}
        return [
            (choice, *(_score(row_of[output], choice.dimension) for output in choice.outputs))  # type: ignore[misc]
            for choice in self.data.choices
            if all(output in row_of for output in choice.outputs)
        ]

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        by_task: dict[str, list[tuple[Choice, float, float]]] = {}
        for choice, better, worse in self._judged(rows):
            by_task.setdefault(choice.task, []).append((choice, better, worse))
        lines = [
            Line(f"{task} ({len(judged)})", tuple(_accuracies(judged))) for task, judged in sorted(by_task.items())
        ]
        return [Table("By task type", self.columns, tuple(lines))] if lines else []


def _row(key: str, *, followed: Verdict, kept: Verdict) -> Row:
    if followed.p_yes is None or kept.p_yes is None:
        return {"key": key, "error": followed.error or kept.error}
    return {"key": key, "prompt_following": followed.p_yes, "consistency": kept.p_yes}


def _score(row: Row, dimension: str) -> float:
    if dimension == "overall":
        return sqrt(row["prompt_following"] * row["consistency"])
    return float(row[dimension])


def _accuracies(judged: Sequence[tuple[Choice, float, float]]) -> list[Interval]:
    """Macro means over task types, per dimension: strict, then with ties."""
    tasks = sorted({choice.task for choice, _, _ in judged})
    task = np.array([tasks.index(choice.task) for choice, _, _ in judged], dtype=np.int64)
    dimension = np.array([DIMENSIONS.index(choice.dimension) for choice, _, _ in judged], dtype=np.int64)
    right = np.array([[better > worse, better >= worse] for _, better, worse in judged], dtype=float).reshape(-1, 2)

    def statistic(chosen: Indices) -> Floats:
        cell = task[chosen] * len(DIMENSIONS) + dimension[chosen]
        size = len(tasks) * len(DIMENSIONS)
        counts = np.bincount(cell, minlength=size).astype(float)
        sums = np.stack([np.bincount(cell, right[chosen, rule], size).astype(float) for rule in (0, 1)])
        share = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
        return _means(share.reshape(2, len(tasks), len(DIMENSIONS))).reshape(-1)

    return bootstrap([choice.instruction for choice, _, _ in judged], statistic)


def _means(share: Floats) -> Floats:
    """Over the task types that are there; NaN where none is."""
    present = ~np.isnan(share)
    count = present.sum(1).astype(float)
    mean = np.full(count.shape, np.nan)
    np.divide(np.where(present, share, 0.0).sum(1), count, out=mean, where=count > 0)
    return mean


SPEC = BenchmarkSpec(
    summary="Does a judge prefer the edit that people prefer?",
    data="EditScore/EditReward-Bench: a folder of parquet files, or a JSONL.",
    options=BenchmarkOptions,
    benchmark=EditRewardBench,
    read=lambda data, options: read_edit_data(data, limit=options.limit, skip_bad=options.skip_bad),
    build=lambda data, options, reward, out: EditRewardBench(data, reward.judge, judge_name=reward.name),
    all_spellings=True,
)
