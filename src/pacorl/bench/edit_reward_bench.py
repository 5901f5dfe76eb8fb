"""Pairs of edits: does a judge prefer the edit that people prefer?

EditReward-Bench (EditScore, arXiv 2509.23909; PaCo-RL, Tab. 1), and of its form VCReward-Bench (arXiv 2603.28547) and
EditReward-Compass (arXiv 2605.13062). A row has an instruction, an input image, two edits of it, and the dimension in
which people compared them. Each edit is judged by itself: prompt following, consistency, and overall = √(PF · C). A row
is right if the preferred edit scores higher; a tie, if both score equally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field

from pacorl.bench.benchmarks import BenchmarkSpec
from pacorl.bench.items import Dataset, ImageCache
from pacorl.bench.suite import NO_PAPER, PaperTable, Row, Table, Texts, macro_means, paper_table
from pacorl.core import questions as wordings
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.io.documents import JsonObject, blamed_on, read_records, typed
from pacorl.judge.pairwise import ask
from pacorl.records.fields import Name, Word, by_key
from pacorl.types import Question

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward

Kind = Literal["edit-reward-bench", "vc-reward-bench", "edit-reward-compass"]
"""Published table."""

DIMENSIONS = ("prompt_following", "consistency", "overall")
TITLES = ("Prompt following", "Consistency", "Overall")
MACRO, WITH_TIES, ALL_ROWS = 0, 3, 6
"""Index in `EditRewardBench.figures` of the first dimension's figure."""
ROWS = "rows.jsonl"
QUESTIONS = {"prompt_following": wordings.edit_followed_in_a_word, "consistency": wordings.edit_consistent_in_a_word}
"""Dimension → the released wording."""
COMPASS_DIMENSIONS = {"IA": "prompt_following", "VC": "consistency", "VQ": ""}
"""Dimension of EditReward-Compass → ours; there is no question about visual quality."""
TIE = 1e-5
"""Largest difference of two equal scores, as in the released evaluation of EditReward-Compass."""
NOTE = (
    "Accuracy, macro mean over the task types, 13 in the published data. Strict: the preferred output scores higher. "
    "With ties (≥): it scores at least as high. The paper does not say which of the two it prints. Each output is "
    "resized to its input, overall is √(prompt following · consistency) of an image, and P(Yes) adds up the spellings "
    "of Yes and of No that are single tokens."
)


@dataclass(frozen=True, slots=True)
class Choice:
    """One row: an image, two edits of it and the preferred one."""

    number: int
    """Index in the table."""
    outputs: tuple[str, str]
    """Keys, in the order of the row's images."""
    images: tuple[str, ...]
    """The image and its two edits, by their paths."""
    instruction: str
    task: str
    dimension: str
    preferred: int | None = 0
    """Index of the preferred output; None for a tie."""


Pair = Annotated[list[Word], Field(min_length=2, max_length=2)]


class EditRewardRow(BaseModel):
    """A row of EditReward-Bench."""

    key: Pair
    input_image: Name
    output_images: Pair
    instruction: Word
    task_type: Word
    dimension: Literal["prompt_following", "consistency", "overall"]

    def choice(self, number: int) -> Choice:
        """Read the row of a number."""
        first, second = self.key
        if first == second:
            raise ValueError(f"'key' must name two outputs, got {self.key}")
        images = (self.input_image, *self.output_images)
        return Choice(number, (first, second), images, self.instruction, self.task_type, self.dimension)


class VcRewardRow(BaseModel):
    """A row of VCReward-Bench."""

    source_image: Name
    edited_images: Pair
    instruction: Word
    winner: Literal["Image A", "Image B"]
    task: Word

    def choice(self, number: int) -> Choice:
        """Read the row of a number."""
        outputs = (f"{number + 1}: A", f"{number + 1}: B")
        images = (self.source_image, *self.edited_images)
        preferred = int(self.winner == "Image B")
        return Choice(number, outputs, images, self.instruction, self.task, "consistency", preferred)


class CompassRow(BaseModel):
    """A row of EditReward-Compass."""

    source_image: Word
    prompt: Word
    winner: Word
    loser: Word
    dimension: Literal["IA", "VC", "VQ"]
    label: Literal["preference", "tie"]

    def choice(self, number: int) -> Choice:
        """Read the row of a number; the dimension is empty if there is no question about it."""
        outputs = (f"{number + 1}: winner", f"{number + 1}: loser")
        images = (self.source_image, self.winner, self.loser)
        preferred = 0 if self.label == "preference" else None
        return Choice(number, outputs, images, self.prompt, "", COMPASS_DIMENSIONS[self.dimension], preferred)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTable:
    """Published table of pairs of edits, and the figures that are given for it."""

    title: str
    row: type[EditRewardRow | VcRewardRow | CompassRow]
    columns: Mapping[str, int]
    """Column → index of its figure among all."""
    paper: PaperTable = NO_PAPER
    note: str


TABLES: Mapping[Kind, PairTable] = {
    "edit-reward-bench": PairTable(
        title="EditReward-Bench",
        row=EditRewardRow,
        columns={title: MACRO + d for d, title in enumerate(TITLES)}
        | {f"{title} (≥)": WITH_TIES + d for d, title in enumerate(TITLES)},
        paper=paper_table("edit_reward_bench"),
        note=NOTE,
    ),
    "vc-reward-bench": PairTable(
        title="VCReward-Bench",
        row=VcRewardRow,
        columns={"Accuracy": ALL_ROWS + 1, "Mean over tasks": MACRO + 1},
        note="Accuracy: share of pairs whose preferred edit scores higher in consistency. No published row is shown: "
        "the paper's figures are not part of pacorl.",
    ),
    "edit-reward-compass": PairTable(
        title="EditReward-Compass",
        row=CompassRow,
        columns={"Instruction awareness": ALL_ROWS, "Visual consistency": ALL_ROWS + 1},
        paper=paper_table("edit_reward_compass"),
        note="Accuracy: share of pairs whose preferred edit scores higher. A tie is right if both scores are equal, "
        "which two P(Yes) hardly are. There is no question about visual quality.",
    ),
}


def read_edit_data(source: Path, kind: Kind = "edit-reward-bench", *, limit: int | None = None) -> Dataset[Choice]:
    """Read a table: a JSONL, a JSON list, or a folder of one JSONL. Raises ValueError naming a faulty row."""
    path = source / ROWS if source.is_dir() else source
    if not path.is_file():
        raise ValueError(f"{path} is missing; `pacorl data {source}` makes it of the published parquet files")
    rows = read_records(path, dict)
    choices = []
    for number, row in enumerate(rows):
        with blamed_on(f"{path}, row {number + 1}"):
            choice = typed(row, TABLES[kind].row).choice(number)
        if choice.dimension:
            choices.append(choice)
    items = by_key(choices, lambda choice: str(choice.number), source=path)
    return Dataset.selected(items, content=rows, source=path, limit=limit)


@dataclass(eq=False)
class EditRewardBench:
    """The benchmark over a judge, which should add up the spellings of Yes and of No (`variants`)."""

    data: Dataset[Choice]
    judge: PacoReward
    kind: Kind = "edit-reward-bench"

    def __post_init__(self) -> None:
        form = TABLES[self.kind]
        self.paper, self.figure_of_column = form.paper, [*form.columns.values()]
        self.table = Table(form.title, tuple(form.columns), notes=(form.note,), resampled="instructions")

    @cached_property
    def _outputs(self) -> dict[str, tuple[Choice, int]]:
        first: dict[str, tuple[Choice, int]] = {}
        for choice in self.data.items.values():
            for index, output in enumerate(choice.outputs):
                # Several rows share one output, whose image is read from the first.
                first.setdefault(output, (choice, index))
        return first

    def settings(self) -> JsonObject:
        return {"benchmark": self.kind, "data": self.data.fingerprint, "judge": self.judge.name}

    def texts(self) -> Texts:
        """Return the distinct outputs of the rows, with their instructions."""
        return {output: [choice.instruction] for output, (choice, _) in self._outputs.items()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        cache = ImageCache(self.data.folder)
        questions: dict[tuple[str, str], Question] = {}
        for key in keys:
            choice, index = self._outputs[key]
            before, after = cache.open(choice.images[0]), cache.open(choice.images[1 + index])
            pair = (before, after.resize(before.size))  # as the released evaluation does
            # Rows of EditReward-Bench about other dimensions share the output.
            dimensions = tuple(QUESTIONS) if self.kind == "edit-reward-bench" else (choice.dimension,)
            for dimension in dimensions:
                questions[key, dimension] = Question(pair, QUESTIONS[dimension](choice.instruction))

        rows: list[Row] = [{"key": key} for key in keys]
        row_of = {row["key"]: row for row in rows}
        for (key, dimension), verdict in ask(self.judge.judge, questions).items():
            if verdict.p_yes is None:
                row_of[key]["error"] = verdict.error
            else:
                row_of[key][dimension] = verdict.p_yes
        return rows

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """Accuracies per dimension: macro means over task types, strict and with ties, then over all rows."""
        row_of = {row["key"]: row for row in rows}
        choices = []
        right = []
        for choice in self.data.items.values():
            # A limit or a failure may leave one of the two without a judgement.
            if not row_of.keys() >= set(choice.outputs):
                continue
            choices.append(choice)
            scores = [_score(row_of[output], choice.dimension) for output in choice.outputs]
            if choice.preferred is None:
                right.append([abs(scores[0] - scores[1]) < TIE] * 2)
            else:
                better, worse = scores[choice.preferred], scores[1 - choice.preferred]
                right.append([better > worse, better >= worse])

        # Numbers instead of names: an interval computes the figures 2,000 times.
        tasks, task_N = np.unique([choice.task for choice in choices], return_inverse=True)
        dimension_N = np.array([DIMENSIONS.index(choice.dimension) for choice in choices], dtype=np.int64)
        right_N2 = np.array(right, dtype=float).reshape(-1, 2)

        def statistic(drawn: Indices) -> Floats:
            macro = macro_means(right_N2, task_N, dimension_N, drawn, shape=(len(tasks), len(DIMENSIONS)))
            overall = macro_means(right_N2, task_N * 0, dimension_N, drawn, shape=(1, len(DIMENSIONS)))
            return np.concatenate([*macro, overall[0]])[self.figure_of_column]

        # Rows of one instruction share their images, so the bootstrap draws them together.
        return bootstrap([choice.instruction for choice in choices], statistic)


def _score(row: Row, dimension: str) -> float:
    if dimension == "overall":
        return sqrt(row["prompt_following"] * row["consistency"])
    return float(row[dimension])


def _spec(kind: Kind) -> BenchmarkSpec[Dataset[Choice]]:
    return BenchmarkSpec(
        read=lambda source, options: read_edit_data(source, kind, limit=options.limit),
        build=lambda choices, options, reward, out: EditRewardBench(choices, reward, kind),
        all_spellings=True,
    )


SPEC = _spec("edit-reward-bench")
VC_REWARD_BENCH = _spec("vc-reward-bench")
COMPASS = _spec("edit-reward-compass")
