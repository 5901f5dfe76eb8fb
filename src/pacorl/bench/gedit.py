"""GEdit-Bench: edits of real images by real instructions, English and Chinese (Step1X-Edit, arXiv 2504.17761).

A row has a task type, a key, an instruction and its language, an input image, and whether the image belongs to the
intersection subset (which every compared model would edit). Edits are written to `fullset/{task}/{language}/{key}.png`,
rated by a rubric, and averaged per task type, then over task types; "-I" is the intersection subset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pacorl.bench.images import ImageCache
from pacorl.bench.published import GEDIT, PAPER
from pacorl.bench.rating import RUBRIC, Rating, Rubric, UnratedError, rate, read_rubric
from pacorl.bench.rows import Rows, fingerprint, lacking, open_rows
from pacorl.bench.sources import described, image_source
from pacorl.bench.suite import BadItemError, Row, check_faults
from pacorl.bench.table import Advance, BenchmarkSpec, GeneratorBenchmarkOptions
from pacorl.bench.tables import Line, Table
from pacorl.config.options import JudgeOptions, inherited, one_of, option
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.data.sources import evenly_spread
from pacorl.engine.image_queue import ImageJob, ImageSource, Shard, generate_missing
from pacorl.io.files import safe_name, write_atomic
from pacorl.io.images import png_bytes
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judges.judge import Judge

TEXTS = ("task_type", "key", "instruction", "instruction_language", "Intersection_exist")
NEEDED = TEXTS[:4]
LANGUAGES = ("en", "cn")
PARTS = ("EN-I", "EN", "CN-I", "CN")
FIGURES = ("SC", "PQ", "O")
TASK_TYPES = 11


@dataclass(frozen=True, kw_only=True)
class GeditOptions(GeneratorBenchmarkOptions):
    """Which edits, and who rates them."""

    panel: ClassVar[str] = "Rating"

    judge: str = inherited(
        JudgeOptions,
        "judge",
        default="",
        help="The rater: a server's URL, endpoints YAML, checkpoint folder or hub name.",
    )
    language: str = option("", "en or cn; both if left out.", parse=one_of(*LANGUAGES))
    rubric: Path | None = option(None, "A YAML with semantics, quality and scale; ours if left out.")
    workers: int = option(8, "Ratings at a time, of a rater at a server.", least=1)

    def __post_init__(self) -> None:
        if not self.judge and not self.generate_only:
            raise ValueError("name who rates the edits with --judge, e.g. https://api.openai.com/v1, and --judge-model")

    @property
    def languages(self) -> Sequence[str]:
        return [self.language] if self.language else LANGUAGES

    @property
    def parallel_ratings(self) -> int:
        """A judge in this process takes one at a time."""
        return self.workers if self.judge_model or self.judge.endswith((".yaml", ".yml")) else 1


@dataclass(frozen=True, slots=True)
class Edit:
    """One row."""

    number: int
    """Its place in the table."""
    key: str
    """`en/color_alter/1a2b`: the row's own key may serve both languages."""
    instruction: str
    language: str
    task: str
    intersection: bool

    @property
    def file(self) -> str:
        """Where its edit lies, in the layout of the published evaluation."""
        language, task, name = self.key.split("/")
        return f"fullset/{task}/{language}/{name}.png"

    @property
    def source(self) -> str:
        """Where its input image is put, for the generator to read."""
        return f"sources/{self.key}.png"

    @property
    def parts(self) -> tuple[str, ...]:
        """The columns that it counts in."""
        whole = "EN" if self.language == "en" else "CN"
        return (f"{whole}-I", whole) if self.intersection else (whole,)


@dataclass(frozen=True, slots=True)
class GeditData:
    """The wanted rows of the table."""

    rows: Rows
    edits: tuple[Edit, ...]
    refused: Mapping[str, str]
    fingerprint: str


def read_edits(
    source: Path, *, languages: Sequence[str] = LANGUAGES, limit: int | None = None, skip_bad: bool = False
) -> GeditData:
    """Reads the texts of the table.

    Raises:
        ValueError: if rows are none of GEdit-Bench's; it lists them, or with `skip_bad` leaves them out.
    """
    rows = open_rows(source)
    texts = rows.texts(TEXTS)
    edits: dict[str, Edit] = {}
    faults: dict[str, str] = {}
    for number, row in enumerate(texts):
        where = f"{source}, row {number + 1}"
        try:
            edit = _edit(number, row)
            if edit.key in edits:
                raise ValueError(f"key {edit.key} is that of an earlier row")
        except ValueError as error:
            faults[where] = f"{where}: {error}"
            continue
        edits[edit.key] = edit
    refused = check_faults(faults, skip_bad=skip_bad)
    chosen = [edit for edit in edits.values() if edit.language in languages]
    if not chosen:
        raise ValueError(f"{source} holds no rows in {' or '.join(languages)}")
    return GeditData(rows, tuple(evenly_spread(chosen, limit)), refused, fingerprint(texts))


def _edit(number: int, row: Mapping[str, Any]) -> Edit:
    missing = lacking(row, NEEDED)
    if missing:
        raise ValueError(f"{missing}; a row of GEdit-Bench has {', '.join(TEXTS)} and input_image")
    language, task = str(row["instruction_language"]), safe_name(str(row["task_type"]))
    if language not in LANGUAGES:
        raise ValueError(f"instruction_language {language!r} is none of {', '.join(LANGUAGES)}")
    key = f"{language}/{task}/{safe_name(str(row['key']))}"
    return Edit(number, key, str(row["instruction"]), language, task, _is_true(row["Intersection_exist"]))


def _is_true(value: object) -> bool:
    """Mirrors of the table hold the flag as a bool, a number or a word."""
    return str(value).lower() in ("true", "1")


# --- generating --------------------------------------------------------------------------------------------------


def generate_edits(
    data: GeditData,
    out: Path,
    source: ImageSource,
    *,
    shard: Shard = Shard(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Writes this shard's input images to `sources/` and generates the missing edits; returns how many those were."""
    for edit in data.edits[shard.index :: shard.count]:
        if not (out / edit.source).is_file():
            write_atomic(out / edit.source, png_bytes(_input(data, edit)))
    return generate_missing(edit_jobs(data, out), out, source, shard=shard, progress=progress)


def edit_jobs(data: GeditData, out: Path) -> list[ImageJob]:
    """One edit per row."""
    return [
        ImageJob(edit.key, Prompt(id=edit.number, text=edit.instruction, sources=(out / edit.source,)), edit.file)
        for edit in data.edits
    ]


def _input(data: GeditData, edit: Edit) -> Image:
    cell = data.rows.row(edit.number).get("input_image")
    return ImageCache(data.rows.folder).decode(cell, name=f"row {edit.number + 1}, input_image")


# --- rating ------------------------------------------------------------------------------------------------------


class GeditBench:
    """The benchmark over the edits of a folder."""

    title = "GEdit-Bench"
    columns = tuple(f"{part} {figure}" for part in PARTS for figure in FIGURES)
    source = f"{PAPER}, Tab. 4"
    published = GEDIT
    digits = 3

    def __init__(
        self,
        data: GeditData,
        images: Path,
        *,
        judge: Judge,
        judge_name: str,
        rubric: Rubric,
        made_by: Mapping[str, Any],
        workers: int = 1,
    ) -> None:
        """images: the folder that holds `fullset/`; workers: ratings at a time (a judge in this process takes one)."""
        self.data, self.images, self.refused = data, images, data.refused
        self.judge, self.judge_name, self.rubric = judge, judge_name, rubric
        self.made_by, self.workers = made_by, workers
        self._edits = {edit.key: edit for edit in data.edits}

    @property
    def notes(self) -> tuple[str, ...]:
        count = len({edit.task for edit in self.data.edits})
        fewer = "" if count == TASK_TYPES else f" The published figures are over {TASK_TYPES} task types."
        return (
            "SC, PQ and O = √(SC · PQ) of each edit, from 0 to 10; mean per task type, then over the "
            f"{count} task types. -I is the intersection subset.{fewer} The published rows were rated by another model "
            "with VIEScore's own words: compare with care. Intervals are 95 %, bootstrapped over edits.",
        )

    def settings(self) -> Mapping[str, Any]:
        return {
            "benchmark": "gedit",
            "data": self.data.fingerprint,
            "judge": self.judge_name,
            "rubric": self.rubric.digest,
            "pictures": dict(self.made_by),
        }

    def keys(self) -> Sequence[str]:
        return list(self._edits)

    def texts(self) -> Mapping[str, Sequence[str]]:
        return {edit.key: [edit.instruction] for edit in self.data.edits}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        images = [self._images_of(self._edits[key]) for key in keys]  # in order: the table is read forward
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._rate, keys, images))

    def _images_of(self, edit: Edit) -> tuple[Image, Image]:
        if not (self.images / edit.file).is_file():
            raise BadItemError(f"{self.images / edit.file} is missing")
        return _input(self.data, edit), ImageCache(self.images).open(edit.file)

    def _rate(self, key: str, images: tuple[Image, Image]) -> Row:
        before, after = images
        try:
            rating = rate(self.judge, self.rubric, before=before, after=after, instruction=self._edits[key].instruction)
        except UnratedError as fault:
            return {"key": key, "error": str(fault)}
        return {
            "key": key,
            "semantics": list(rating.semantics),
            "quality": list(rating.quality),
            "reasons": list(rating.reasons),
        }

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        return bootstrap([row["key"] for row in rows], self._statistic(rows))

    def _statistic(self, rows: Sequence[Row]) -> Callable[[Indices], Floats]:
        """Edits (by index, with repetition) → SC, PQ, O of each part: macro means over task types."""
        edits = [self._edits[row["key"]] for row in rows]
        value = np.array([_rating(row).figures for row in rows])
        names = sorted({edit.task for edit in edits})
        task = np.array([names.index(edit.task) for edit in edits])
        member = np.array([[part in edit.parts for part in PARTS] for edit in edits])

        def statistic(chosen: Indices) -> Floats:
            return np.concatenate(
                [
                    _macro(value[rows], task[rows])
                    for rows in (chosen[member[chosen, part]] for part in range(len(PARTS)))
                ]
            )

        return statistic

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        by_task: dict[str, list[Row]] = {}
        for row in rows:
            by_task.setdefault(self._edits[row["key"]].task, []).append(row)
        lines = [Line(f"{task} ({len(rows)})", tuple(self.figures(rows))) for task, rows in sorted(by_task.items())]
        return [Table("By task type", self.columns, tuple(lines))]


def _rating(row: Row) -> Rating:
    (a, b), (c, d) = row["semantics"], row["quality"]
    return Rating((a, b), (c, d))


def _macro(value: Floats, task: Indices) -> Floats:
    """(B, 3) → mean per task, then over the tasks that are there."""
    if not len(value):
        return np.full(len(FIGURES), np.nan)
    means = np.stack([value[task == one].mean(0) for one in np.unique(task)])
    return np.asarray(means.mean(0), dtype=np.float64)


def _build(data: GeditData, options: GeditOptions, reward: Any, out: Path) -> GeditBench:
    return GeditBench(
        data,
        options.images or out,
        judge=reward.judge,
        judge_name=reward.name,
        rubric=read_rubric(options.rubric or RUBRIC),
        made_by=described(options),
        workers=options.parallel_ratings,
    )


def _generate(data: GeditData, options: GeditOptions, out: Path, shard: Shard, advance: Advance) -> None:
    generate_edits(data, out, image_source(options, edits=True), shard=shard, progress=advance)


SPEC = BenchmarkSpec(
    summary="Generate edits, then have them rated by a rubric.",
    data="GEdit-Bench: a folder of parquet files, or a JSONL.",
    options=GeditOptions,
    benchmark=GeditBench,
    read=lambda data, options: read_edits(
        data, languages=options.languages, limit=options.limit, skip_bad=options.skip_bad
    ),
    build=_build,
    generate=_generate,
)
