"""Pairs of edits: does a judge prefer the edit that people prefer?

EditReward-Bench (EditScore, arXiv 2509.23909; PaCo-RL, Tab. 1), and of its form VCReward-Bench (arXiv 2603.28547) and
EditReward-Compass (arXiv 2605.13062). A row has an instruction, an input image, two edits of it, and the dimension in
which people compared them. Each edit is judged by itself: prompt following, consistency, and overall = √(PF · C). A row
is right if the preferred edit scores higher; a tie, if both score equally.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field

from pacorl.bench.suite import INTERVALS, NO_PAPER, Benchmark, ImageCache, Row, Table, Texts, macro_means, paper_table
from pacorl.core import questions as wordings
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.io.documents import blamed_on, read_records, typed
from pacorl.judge.judge import Judge
from pacorl.records.fields import Name, Word
from pacorl.types import Question

DIMENSIONS = ("prompt_following", "consistency", "overall")
TITLES = ("Prompt following", "Consistency", "Overall")
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
DRAWN = INTERVALS.format("instructions")


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
    asked_dimensions: Sequence[str]
    """Dimensions that the judge is asked about."""
    preferred: int | None = 0
    """Index of the preferred output; None for a tie."""

    @property
    def key(self) -> str:
        return str(self.number)


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
        # Of all dimensions: rows about the others share the outputs.
        return Choice(
            number,
            (first, second),
            images,
            self.instruction,
            self.task_type,
            self.dimension,
            asked_dimensions=tuple(QUESTIONS),
        )


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
        return Choice(number, outputs, images, self.instruction, self.task, "consistency", ("consistency",), preferred)


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
        dimension = COMPASS_DIMENSIONS[self.dimension]
        return Choice(number, outputs, images, self.prompt, "", dimension, (dimension,), preferred)


class EditRewardBench(Benchmark[Choice]):
    """EditReward-Bench, and the form of both other tables."""

    name = "edit-reward-bench"
    table = Table("EditReward-Bench", (*TITLES, *(f"{title} (≥)" for title in TITLES)), (NOTE, DRAWN))
    paper = paper_table("edit_reward_bench")
    all_spellings = True
    row: ClassVar[type[EditRewardRow | VcRewardRow | CompassRow]] = EditRewardRow
    """Row of the published table."""
    shown: ClassVar[Sequence[int]] = range(6)
    """Index of each column in: the accuracy of each of DIMENSIONS, as a macro mean over task types, strict and then
    with ties, and over all rows."""

    def read(self, source: Path) -> tuple[Path, list[Choice]]:
        """Read a table: a JSONL, a JSON list, or a folder of one JSONL."""
        path = source / ROWS if source.is_dir() else source
        rows = read_records(path, dict, fix=f"`pacorl data {source}` makes it of the published parquet files")
        choices = []
        for number, row in enumerate(rows):
            with blamed_on(f"{path}, row {number + 1}"):
                choice = typed(row, self.row).choice(number)
            if choice.dimension:
                choices.append(choice)
        return path, choices

    @cached_property
    def _outputs(self) -> dict[str, tuple[Choice, int]]:
        first: dict[str, tuple[Choice, int]] = {}
        for choice in self.items.values():
            for index, output in enumerate(choice.outputs):
                # Several rows share one output, whose image is read from the first.
                first.setdefault(output, (choice, index))
        return first

    def texts(self) -> Texts:
        """Return the distinct outputs of the rows, with their instructions."""
        return {output: [choice.instruction] for output, (choice, _) in self._outputs.items()}

    def questions(self, key: str, images: ImageCache, judge: Judge) -> dict[str, Question]:
        choice, index = self._outputs[key]
        before, after = images.open(choice.images[0]), images.open(choice.images[1 + index])
        pair = (before, after.resize(before.size))  # as the released evaluation does
        return {
            dimension: Question(pair, QUESTIONS[dimension](choice.instruction)) for dimension in choice.asked_dimensions
        }

    def score(self, key: str, p_yes: Mapping[str, float], images: ImageCache) -> Row:
        return dict(p_yes)

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """Accuracies per dimension: macro means over task types, strict and with ties, then over all rows."""
        row_of = {row["key"]: row for row in rows}
        choices = []
        right = []
        for choice in self.items.values():
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

        dimension_N = np.array([DIMENSIONS.index(choice.dimension) for choice in choices], dtype=np.int64)
        right_N2 = np.array(right, dtype=float).reshape(-1, 2)
        by_task = macro_means(right_N2, [choice.task for choice in choices], dimension_N, columns=len(DIMENSIONS))
        of_all = macro_means(right_N2, [""] * len(choices), dimension_N, columns=len(DIMENSIONS))

        def statistic(drawn: Indices) -> Floats:
            return np.concatenate([*by_task(drawn), of_all(drawn)[0]]).take(self.shown)

        # Rows of one instruction share their images, so the bootstrap draws them together.
        return bootstrap([choice.instruction for choice in choices], statistic)


def _score(row: Row, dimension: str) -> float:
    if dimension == "overall":
        return sqrt(row["prompt_following"] * row["consistency"])
    return float(row[dimension])


class VcRewardBench(EditRewardBench):
    """VCReward-Bench: consistency alone."""

    name = "vc-reward-bench"
    table = Table(
        "VCReward-Bench",
        ("Accuracy", "Mean over tasks"),
        (
            "Accuracy: share of pairs whose preferred edit scores higher in consistency. No published row is shown: "
            "the paper's figures are not part of pacorl.",
            DRAWN,
        ),
    )
    paper = NO_PAPER
    row = VcRewardRow
    shown = (7, 1)


class EditRewardCompass(EditRewardBench):
    """EditReward-Compass, without its visual quality."""

    name = "edit-reward-compass"
    table = Table(
        "EditReward-Compass",
        ("Instruction awareness", "Visual consistency"),
        (
            "Accuracy: share of pairs whose preferred edit scores higher. A tie is right if both scores are equal, "
            "which two P(Yes) hardly are. There is no question about visual quality.",
            DRAWN,
        ),
    )
    paper = paper_table("edit_reward_compass")
    row = CompassRow
    shown = (6, 7)
