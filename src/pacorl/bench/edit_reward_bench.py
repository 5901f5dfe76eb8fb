"""EditReward-Bench: does a judge prefer the edit that people prefer? (EditScore, arXiv 2509.23909; PaCo-RL, Tab. 1)

A row has an instruction, an input image, two output images of which people preferred the first, a task type, and the
dimension that they were asked about. Each distinct output is judged once: prompt following, consistency, and
overall = √(PF · C). A row is right if the first output scores higher; figures are macro means over task types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pacorl.bench.benchmarks import BenchmarkOptions, BenchmarkSpec
from pacorl.bench.items import BadItemError, Dataset, ImageCache, Rows, check_filled, drawn_edits, open_rows, parse_rows
from pacorl.bench.suite import Row, Table, Texts, grouped, paper_table
from pacorl.core import questions as wordings
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.io.documents import JsonObject, write_jsonl
from pacorl.judge.pairwise import ask
from pacorl.records.prompts import evenly_spread
from pacorl.types import Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.paco_reward import PacoReward

TEXTS = ("key", "instruction", "task_type", "dimension")
SCHEMA = f"a row of EditReward-Bench has {', '.join(TEXTS)}, input_image and output_images"
TITLES = {"prompt_following": "Prompt following", "consistency": "Consistency", "overall": "Overall"}
DIMENSIONS = tuple(TITLES)
TASK_TYPES = 13
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
    """Index in the table."""
    outputs: tuple[str, str]
    instruction: str
    task: str
    dimension: str


Judged = tuple[Choice, float, float]
"""A row with the scores of its two outputs."""


def read_edit_data(source: Path, *, limit: int | None = None, skip_bad: bool = False) -> Dataset[Choice, Rows]:
    """Read the texts of the table.

    Raises:
        ValueError: unless `skip_bad`, with a list of the faulty rows.
    """
    rows = open_rows(source)
    texts = rows.texts(TEXTS)
    choices, refused = parse_rows(source, texts, _choice, key=lambda choice: str(choice.number), skip_bad=skip_bad)
    if not choices:
        raise ValueError(f"{source} holds no rows")
    return Dataset(dict(evenly_spread(list(choices.items()), limit)), refused, texts, rows)


def _choice(number: int, row: JsonObject) -> Choice:
    check_filled(row, TEXTS, schema=SCHEMA)
    key = row["key"]
    dimension = str(row["dimension"])
    if not isinstance(key, list) or len(key) != 2 or key[0] == key[1]:
        raise ValueError(f"'key' must name two outputs, got {key!r}")
    if dimension not in DIMENSIONS:
        raise ValueError(f"dimension {dimension!r} is none of {', '.join(DIMENSIONS)}")
    return Choice(number, (str(key[0]), str(key[1])), str(row["instruction"]), str(row["task_type"]), dimension)


@dataclass(eq=False)
class EditRewardBench:
    """The benchmark over a judge, which should add up the spellings of Yes and of No (`variants`)."""

    data: Dataset[Choice, Rows]
    judge: PacoReward

    title = "EditReward-Bench"
    columns = tuple(f"{title}{ties}" for ties in ("", " (≥)") for title in TITLES.values())
    paper = paper_table("edit_reward_bench")

    @property
    def notes(self) -> Sequence[str]:
        count = len({choice.task for choice in self.data.items.values()})
        fewer = "" if count == TASK_TYPES else f" The published figures are over {TASK_TYPES} task types."
        return [NOTE.format(count=count) + fewer]

    @cached_property
    def _outputs(self) -> dict[str, tuple[Choice, int]]:
        first: dict[str, tuple[Choice, int]] = {}
        for choice in self.data.items.values():
            for index, output in enumerate(choice.outputs):
                # Several rows share one output, whose image is read from the first.
                first.setdefault(output, (choice, index))
        return first

    def settings(self) -> JsonObject:
        return {"benchmark": "edit-reward-bench", "data": self.data.fingerprint, "judge": self.judge.name}

    def texts(self) -> Texts:
        """Return the distinct outputs of the rows, with their instructions."""
        return {output: [choice.instruction] for output, (choice, _) in self._outputs.items()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        cache = ImageCache(self.data.source.folder)
        questions: dict[tuple[str, str], Question] = {}
        for key in keys:
            choice, index = self._outputs[key]
            before, after = self._images(choice, index, cache)
            pair = (before, after.resize(before.size))  # as the released evaluation does
            questions[key, "followed"] = Question(pair, wordings.edit_followed_in_a_word(choice.instruction))
            questions[key, "consistent"] = Question(pair, wordings.edit_consistent_in_a_word(choice.instruction))
        answers = ask(self.judge.judge, questions)
        rows: list[Row] = []
        for key in keys:
            followed = answers[key, "followed"]
            consistent = answers[key, "consistent"]
            if followed.p_yes is None or consistent.p_yes is None:
                rows.append({"key": key, "error": followed.error or consistent.error})
            else:
                rows.append({"key": key, "prompt_following": followed.p_yes, "consistency": consistent.p_yes})
        return rows

    def _images(self, choice: Choice, index: int, cache: ImageCache) -> tuple[Image, Image]:
        row = self.data.source.row(choice.number)
        where = f"row {choice.number + 1}"
        outputs = row.get("output_images")
        if not isinstance(outputs, list) or len(outputs) != 2:
            raise BadItemError(f"{where}: 'output_images' must be two images")
        before = cache.decode(row.get("input_image"), name=f"{where}, input_image")
        return before, cache.decode(outputs[index], name=f"{where}, output_images[{index}]")

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        return _accuracies(self._judged(rows))

    def _judged(self, rows: Sequence[Row]) -> list[Judged]:
        """Score the rows whose two outputs are both measured."""
        row_of = {row["key"]: row for row in rows}
        judged = []
        for choice in self.data.items.values():
            better, worse = choice.outputs
            # A limit or a failure may leave one of the two without a judgement.
            if better in row_of and worse in row_of:
                dimension = choice.dimension
                judged.append((choice, _score(row_of[better], dimension), _score(row_of[worse], dimension)))
        return judged

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        return grouped("By task type", self.columns, self._judged(rows), lambda row: row[0].task, _accuracies)


def _score(row: Row, dimension: str) -> float:
    if dimension == "overall":
        return sqrt(row["prompt_following"] * row["consistency"])
    return float(row[dimension])


def _accuracies(judged: Sequence[Judged]) -> list[Interval]:
    """Compute macro means over task types, per dimension: strict, then with ties."""
    # One number per (task type, dimension): an interval counts them 2,000 times.
    # The cell of each row in a table of task types and dimensions.
    tasks = sorted({choice.task for choice, _, _ in judged})
    shape = (len(tasks), len(DIMENSIONS))
    cells = []
    right = []
    for choice, better, worse in judged:
        cells.append(tasks.index(choice.task) * shape[1] + DIMENSIONS.index(choice.dimension))
        right.append([better > worse, better >= worse])
    cell_N = np.array(cells, dtype=np.int64)
    right_N2 = np.array(right, dtype=float).reshape(-1, 2)

    def statistic(drawn: Indices) -> Floats:
        size = shape[0] * shape[1]
        counts = np.bincount(cell_N[drawn], minlength=size).astype(float)
        sums = np.stack([np.bincount(cell_N[drawn], right_N2[drawn, rule], size).astype(float) for rule in (0, 1)])
        share = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0).reshape(2, *shape)
        # A draw may lack a task type: the mean is over the others, and NaN (0 / 0) without any.
        with np.errstate(invalid="ignore"):
            return np.asarray(share.sum(1) / (counts > 0).reshape(shape).sum(0)).reshape(-1)

    # Rows of one instruction share their images, so the bootstrap draws them together.
    return bootstrap([choice.instruction for choice, _, _ in judged], statistic)


def _example(folder: Path) -> tuple[Path, BenchmarkOptions]:
    """Write three inputs, each with an output of its own colour and one of another, in every dimension."""
    rows = []
    for number, (source, good, bad) in enumerate(drawn_edits(folder)):
        row = {
            "key": [f"{number}_good", f"{number}_bad"],
            "instruction": "make it a little lighter",
            "task_type": ("color_alter", "tone_transfer")[number % 2],
            "input_image": source,
            "output_images": [good, bad],
        }
        rows += [{**row, "dimension": dimension} for dimension in DIMENSIONS]
    write_jsonl(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl", BenchmarkOptions(judge="colour")


SPEC = BenchmarkSpec(
    summary="Does a judge prefer the edit that people prefer?",
    data="EditScore/EditReward-Bench: a folder of parquet files, or a JSONL.",
    options=BenchmarkOptions,
    benchmark=EditRewardBench,
    read=lambda data, options: read_edit_data(data, limit=options.limit, skip_bad=options.skip_bad),
    build=lambda data, options, reward, out: EditRewardBench(data, reward),
    example=_example,
    all_spellings=True,
)
