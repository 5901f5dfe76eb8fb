"""Pairs of edits that people preferred: VCReward-Bench (arXiv 2603.28547) and EditReward-Compass (arXiv 2605.13062).

A row has a source image, an instruction and two edits. A row is right if the judge scores the preferred edit higher;
of a tie, if it scores both equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pacorl.bench.benchmarks import BenchmarkOptions, BenchmarkSpec
from pacorl.bench.edit_judges import (
    About,
    Comparison,
    EditJudge,
    PairWording,
    Rated,
    YesNo,
    edit_judge,
    read_wording,
)
from pacorl.bench.items import (
    BadItemError,
    Dataset,
    ImageCache,
    ListedRows,
    Rows,
    check_filled,
    drawn_edits,
    open_rows,
    parse_rows,
)
from pacorl.bench.suite import Row, Table, Texts, grouped, paper_table
from pacorl.config.options import option
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.io.documents import JsonObject, read_json, write_json, write_jsonl
from pacorl.records.prompts import evenly_spread

VC_COLUMNS = ("key", "instruction", "winner", "task")
VC_SCHEMA = f"a row of VCReward-Bench has {', '.join(VC_COLUMNS)}, source_image and edited_images"
WINNERS = {"Image A": 0, "Image B": 1}

COMPASS_COLUMNS = ("source_image", "prompt", "winner", "loser", "dimension", "label")
COMPASS_SCHEMA = f"a row of EditReward-Compass has {', '.join(COMPASS_COLUMNS)}"
COMPASS_DIMENSIONS: dict[str, About] = {"IA": "followed", "VC": "consistent", "VQ": "quality"}
LABELS = ("preference", "tie")
LIGHTER = "make it a little lighter"
TIE = 1e-5
"""Largest difference of two equal scores, as in the released evaluation of EditReward-Compass."""


@dataclass(frozen=True, kw_only=True)
class EditPairOptions(BenchmarkOptions):
    """Options of a benchmark of edit pairs: the judge's wording."""

    panel: ClassVar[str] = "Question"

    judge_wording: Path | None = option(
        None, "A published wording (PVC-Judge, EditScore, UnifiedReward-Edit), or a rubric; P(Yes) if left out."
    )


@dataclass(frozen=True, slots=True)
class EditPair:
    """One row."""

    number: int
    """Index in the table."""
    key: str
    instruction: str
    group: str
    """Task of VCReward-Bench, dimension of EditReward-Compass."""
    about: About
    winner: int | None
    """Index of the preferred edit; None for a tie."""


@dataclass(eq=False)
class EditPairsBench:
    """Accuracy over pairs of edits; a subclass is one benchmark."""

    data: Dataset[EditPair, Rows]
    judge: EditJudge

    name: ClassVar[str]

    def settings(self) -> JsonObject:
        return {"benchmark": self.name, "data": self.data.fingerprint, **self.judge.settings()}

    def texts(self) -> Texts:
        return {key: [pair.instruction] for key, pair in self.data.items.items()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        cache = ImageCache(self.data.source.folder)
        comparisons = []
        for key in keys:
            pair = self.data.items[key]
            cells = self.cells(self.data.source.row(pair.number))
            images = []
            for name, cell in cells.items():
                images.append(cache.decode(cell, name=f"row {pair.number + 1}, {name}"))
            comparisons.append(Comparison((images[0], images[1], images[2]), pair.instruction, pair.about))
        return [{"key": key, **result} for key, result in zip(keys, self.judge.compare(comparisons), strict=True)]

    @staticmethod
    def cells(row: JsonObject) -> JsonObject:
        """Return name → cell of the source and both edits."""
        raise NotImplementedError

    def right(self, rows: Sequence[Row]) -> Floats:
        """Compute (N,): 1 for each row that agrees with people."""
        right = []
        for row in rows:
            winner = self.data.items[row["key"]].winner
            scores = row["scores"]
            if winner is None:
                right.append(abs(scores[0] - scores[1]) < TIE)
            else:
                right.append(scores[winner] > scores[1 - winner])
        return np.array(right, dtype=float)

    def bootstrapped(self, rows: Sequence[Row], statistic: Callable[[Indices], Floats]) -> list[Interval]:
        """Compute intervals over instructions, whose rows share their images."""
        return bootstrap([self.data.items[row["key"]].instruction for row in rows], statistic)


class VcRewardBench(EditPairsBench):
    """Visual consistency of edits: accuracy over pairs, and its mean over tasks."""

    name = "vc-reward-bench"
    title = "VCReward-Bench"
    columns = ("Accuracy", "Mean over tasks")
    paper = None
    notes = (
        "Accuracy: share of pairs whose preferred edit scores higher. No published row is shown: the paper's figures "
        "are not part of pacorl. Intervals are 95 %, bootstrapped over instructions.",
    )

    @staticmethod
    def cells(row: JsonObject) -> JsonObject:
        edits = row.get("edited_images")
        if not isinstance(edits, list) or len(edits) != 2:
            raise BadItemError("'edited_images' must be two images")
        return {"source_image": row.get("source_image"), "edited_images[0]": edits[0], "edited_images[1]": edits[1]}

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        right_N = self.right(rows)
        task_N = np.unique([self.data.items[row["key"]].group for row in rows], return_inverse=True)[1]

        def statistic(drawn: Indices) -> Floats:
            counts = np.bincount(task_N[drawn])
            sums = np.bincount(task_N[drawn], right_N[drawn])
            return np.array([right_N[drawn].mean(), (sums[counts > 0] / counts[counts > 0]).mean()])

        return self.bootstrapped(rows, statistic)

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        return grouped("By task", self.columns, rows, lambda row: self.data.items[row["key"]].group, self.figures)


class EditRewardCompass(EditPairsBench):
    """Accuracy per dimension, and over all pairs."""

    name = "edit-reward-compass"
    title = "EditReward-Compass"
    columns = ("Instruction awareness", "Visual consistency", "Visual quality", "All pairs")
    paper = paper_table("edit_reward_compass")

    @property
    def notes(self) -> Sequence[str]:
        missing = []
        for name, about in COMPASS_DIMENSIONS.items():
            if about not in self.judge.abouts:
                missing.append(name)

        notes = [
            "Accuracy: share of pairs whose preferred edit scores higher. A tie is right if both scores are equal, "
            "which two P(Yes) hardly are. Intervals are 95 %, bootstrapped over instructions."
        ]
        if missing:
            notes.append(f"The wording has no question about {', '.join(missing)}, so there is no figure of all pairs.")
        return notes

    @staticmethod
    def cells(row: JsonObject) -> JsonObject:
        return {name: row.get(name) for name in ("source_image", "winner", "loser")}

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        right_N = self.right(rows)
        # A figure of all pairs needs a question about every dimension.
        dimension_N = np.array([self.data.items[row["key"]].group for row in rows])
        complete = len(self.judge.abouts) == len(COMPASS_DIMENSIONS)

        def statistic(drawn: Indices) -> Floats:
            means = []
            # A draw may lack a dimension altogether, and the mean of no rows would warn.
            for dimension in COMPASS_DIMENSIONS:
                of_dimension = right_N[drawn][dimension_N[drawn] == dimension]
                means.append(of_dimension.mean() if len(of_dimension) else np.nan)
            return np.array([*means, right_N[drawn].mean() if complete else np.nan])

        return self.bootstrapped(rows, statistic)

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        return []


# --- reading -----------------------------------------------------------------------------------------------------


def read_vc_pairs(source: Path, options: EditPairOptions) -> Dataset[EditPair, Rows]:
    """Read the texts of VCReward-Bench. Raises ValueError listing the faulty rows, unless they are left out."""
    rows = open_rows(source)
    _check_wording(options)
    return _dataset(source, rows, rows.texts(VC_COLUMNS), _vc_pair, options)


def _vc_pair(number: int, row: JsonObject) -> EditPair:
    check_filled(row, VC_COLUMNS, schema=VC_SCHEMA)
    winner = WINNERS.get(row["winner"])
    if winner is None:
        raise ValueError(f"winner {row['winner']!r} is none of {', '.join(WINNERS)}")
    return EditPair(number, str(row["key"]), str(row["instruction"]), str(row["task"]), "consistent", winner)


def read_compass_pairs(source: Path, options: EditPairOptions) -> Dataset[EditPair, Rows]:
    """Read EditReward-Compass's JSON, only dimensions that the wording can judge. Raises ValueError for faulty rows."""
    document = read_json(source)
    if not isinstance(document, list) or not all(isinstance(row, dict) for row in document):
        raise ValueError(f"{source}: must be a list of objects; {COMPASS_SCHEMA}")
    abouts = _check_wording(options)
    # Rows that the wording has no question about are no items, and no faults.
    data = _dataset(source, ListedRows(source.parent, document), document, _compass_pair, options)
    judged = {}
    for key, pair in data.items.items():
        if pair.about in abouts:
            judged[key] = pair

    if not judged:
        raise ValueError(f"{source} holds no rows about {', '.join(abouts)}, which is all that the wording judges")
    return Dataset(judged, data.refused, data.content, data.source)


def _compass_pair(number: int, row: JsonObject) -> EditPair:
    check_filled(row, COMPASS_COLUMNS, schema=COMPASS_SCHEMA)
    dimension = str(row["dimension"])
    if dimension not in COMPASS_DIMENSIONS:
        raise ValueError(f"dimension {dimension!r} is none of {', '.join(COMPASS_DIMENSIONS)}")
    if row["label"] not in LABELS:
        raise ValueError(f"label {row['label']!r} is none of {', '.join(LABELS)}")
    winner = 0 if row["label"] == "preference" else None
    about = COMPASS_DIMENSIONS[dimension]
    return EditPair(number, str(number + 1), str(row["prompt"]), dimension, about, winner)


def _check_wording(options: EditPairOptions) -> tuple[About, ...]:
    """Read the wording before anything heavy is loaded, and return the dimensions that it judges."""
    if options.judge_wording is None:
        return YesNo.abouts
    wording = read_wording(options.judge_wording)
    return wording.abouts if isinstance(wording, PairWording) else Rated.abouts


def _dataset(
    source: Path,
    rows: Rows,
    texts: Sequence[JsonObject],
    parse: Callable[[int, JsonObject], EditPair],
    options: EditPairOptions,
) -> Dataset[EditPair, Rows]:
    pairs, refused = parse_rows(source, texts, parse, key=lambda pair: pair.key, skip_bad=options.skip_bad)
    if not pairs:
        raise ValueError(f"{source} holds no rows")
    return Dataset(dict(evenly_spread(list(pairs.items()), options.limit)), refused, list(texts), rows)


# --- entries -----------------------------------------------------------------------------------------------------


def _vc_example(folder: Path) -> tuple[Path, EditPairOptions]:
    """Write three pairs of two tasks; the preferred edit has the source's colour."""
    rows = []
    for number, (source, good, bad) in enumerate(drawn_edits(folder)):
        task = ("color_alteration", "tone_transfer")[number % 2]
        row = {"key": f"{task}_pair_{number}", "instruction": LIGHTER, "task": task, "winner": "Image B"}
        rows.append({**row, "source_image": source, "edited_images": [bad, good]})
    write_jsonl(folder / "rows.jsonl", rows)
    return folder / "rows.jsonl", EditPairOptions(judge="colour")


def _compass_example(folder: Path) -> tuple[Path, EditPairOptions]:
    """Write three preferences in two dimensions."""
    rows = []
    for number, (source, good, bad) in enumerate(drawn_edits(folder)):
        row = {"source_image": source, "winner": good, "loser": bad, "prompt": LIGHTER}
        rows.append({**row, "dimension": ("IA", "VC")[number % 2], "label": "preference"})
    write_json(folder / "rows.json", rows)
    return folder / "rows.json", EditPairOptions(judge="colour")


VC_REWARD_BENCH = BenchmarkSpec(
    summary="Does a judge prefer the edit that keeps more, as people do?",
    data="GEditBench-v2/VCReward-Bench: a folder of parquet files, or a JSONL.",
    options=EditPairOptions,
    benchmark=VcRewardBench,
    read=read_vc_pairs,
    build=lambda data, options, reward, out: VcRewardBench(data, edit_judge(reward, options.judge_wording)),
    example=_vc_example,
    all_spellings=True,
)
EDIT_REWARD_COMPASS = BenchmarkSpec(
    summary="Does a judge prefer the edit that people prefer, in three dimensions?",
    data="DogNeverSleep/EditReward-Compass: its JSON file.",
    options=EditPairOptions,
    benchmark=EditRewardCompass,
    read=read_compass_pairs,
    build=lambda data, options, reward, out: EditRewardCompass(data, edit_judge(reward, options.judge_wording)),
    example=_compass_example,
    all_spellings=True,
)
