"""GEdit-Bench: edits of real images by real instructions, English and Chinese (Step1X-Edit, arXiv 2504.17761).

A row has a task type, a key, an instruction and its language, an input image, and whether the image belongs to the
intersection subset (which every compared model would edit). Edits are written to `fullset/{task}/{language}/{key}.png`,
rated by a rubric, and averaged per task type, then over task types; "-I" is the intersection subset.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pacorl.bench.benchmarks import BenchmarkSpec, GeneratorBenchmarkOptions
from pacorl.bench.items import BadItemError, Dataset, ImageCache, check_filled, parse_rows
from pacorl.bench.rating import Rubric, UnratedError, figures_of, rate, read_rubric
from pacorl.bench.suite import Row, Table, Texts, grouped, paper_table
from pacorl.config.options import JudgeOptions, inherited, one_of, option
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.generate.image_queue import ImageJob, Shard, generate_missing
from pacorl.io.documents import JsonObject
from pacorl.io.files import safe_name, write_atomic
from pacorl.io.images import png_bytes
from pacorl.io.terminal import Progress
from pacorl.judge.judge import is_address
from pacorl.records.prompts import evenly_spread
from pacorl.records.tables import Rows, open_rows
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.paco_reward import PacoReward

NEEDED = ("task_type", "key", "instruction", "instruction_language")
TEXTS = (*NEEDED, "Intersection_exist")
SCHEMA = f"a row of GEdit-Bench has {', '.join(TEXTS)} and input_image"
LANGUAGES = ("en", "cn")
SUBSETS = ("EN-I", "EN", "CN-I", "CN")
FIGURES = ("SC", "PQ", "O")
TASK_TYPES = 11
WORKERS = 8
"""Ratings at a time, of a rater at a server."""


@dataclass(frozen=True, kw_only=True)
class GeditOptions(GeneratorBenchmarkOptions):
    """Selection of the edits, and their rater."""

    panel: ClassVar[str] = "Rating"

    judge: str = inherited(
        JudgeOptions,
        "judge",
        default="",
        help="The rater: a server's URL, checkpoint folder or hub name.",
    )
    language: str = option("", "en or cn; both if left out.", parse=one_of(*LANGUAGES))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.judge and not self.generate_only:
            raise ValueError("name who rates the edits with --judge, e.g. https://api.openai.com/v1#gpt-4.1")


@dataclass(frozen=True, slots=True)
class Edit:
    """One row."""

    number: int
    """Index in the table."""
    key: str
    """`en/color_alter/1a2b`; the row's own key may serve both languages."""
    instruction: str
    language: str
    task: str
    intersection: bool

    @property
    def file(self) -> str:
        """File of the edit, in the layout of the published evaluation."""
        language, task, name = self.key.split("/")
        return f"fullset/{task}/{language}/{name}.png"

    @property
    def source(self) -> str:
        """File of the input image, for the generator."""
        return f"sources/{self.key}.png"


def read_edits(source: Path, languages: Sequence[str] = LANGUAGES, *, limit: int | None = None) -> Dataset[Edit, Rows]:
    """Read the texts of the table. Raises ValueError listing rows of another form."""
    rows = open_rows(source)
    texts = rows.texts(TEXTS)
    edits = parse_rows(source, texts, _edit, key=lambda edit: edit.key)
    selected = []
    for key, edit in edits.items():
        if edit.language in languages:
            selected.append((key, edit))
    if not selected:
        raise ValueError(f"{source} holds no rows in {' or '.join(languages)}")
    return Dataset(dict(evenly_spread(selected, limit)), texts, rows)


def _edit(number: int, row: JsonObject) -> Edit:
    check_filled(row, NEEDED, schema=SCHEMA)
    language = str(row["instruction_language"])
    task = safe_name(str(row["task_type"]))
    if language not in LANGUAGES:
        raise ValueError(f"instruction_language {language!r} is none of {', '.join(LANGUAGES)}")
    # `safe_name`: task and key become folders and files.
    key = f"{language}/{task}/{safe_name(str(row['key']))}"
    # Mirrors of the table hold the flag as a bool, a number or a word.
    intersection = str(row["Intersection_exist"]).lower() in ("true", "1")
    return Edit(number, key, str(row["instruction"]), language, task, intersection)


def _input(rows: Rows, edit: Edit) -> Image:
    cell = rows.row(edit.number).get("input_image")
    return ImageCache(rows.folder).decode(cell, name=f"row {edit.number + 1}, input_image")


@dataclass(eq=False)
class GeditBench:
    """Benchmark over the edits of a folder."""

    data: Dataset[Edit, Rows]
    images: Path
    """Folder with `fullset/`."""
    judge: PacoReward
    rubric: Rubric
    made_by: JsonObject
    """Description of the images in the settings."""
    workers: int
    """Number of concurrent ratings."""

    title = "GEdit-Bench"
    columns = tuple(f"{subset} {figure}" for subset, figure in product(SUBSETS, FIGURES))
    paper = paper_table("gedit")

    @property
    def notes(self) -> Sequence[str]:
        count = len({edit.task for edit in self.data.items.values()})
        fewer = "" if count == TASK_TYPES else f" The published figures are over {TASK_TYPES} task types."
        return [
            "SC, PQ and O = √(SC · PQ) of each edit, from 0 to 10; mean per task type, then over the "
            f"{count} task types. -I is the intersection subset.{fewer} The published rows were rated by another model "
            "with VIEScore's own words: compare with care. Intervals are 95 %, bootstrapped over edits."
        ]

    def settings(self) -> JsonObject:
        return {
            "benchmark": "gedit",
            "data": self.data.fingerprint,
            "judge": self.judge.name,
            "rubric": self.rubric.digest,
            "images": dict(self.made_by),
        }

    def texts(self) -> Texts:
        return {edit.key: [edit.instruction] for edit in self.data.items.values()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        cache = ImageCache(self.images)
        images = []
        # Before the threads: the table is read forward.
        for key in keys:
            edit = self.data.items[key]
            if not (self.images / edit.file).is_file():
                raise BadItemError(f"{self.images / edit.file} is missing")
            images.append((_input(self.data.source, edit), cache.open(edit.file)))
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._rate, keys, images))

    def _rate(self, key: str, images: tuple[Image, Image]) -> Row:
        instruction = self.data.items[key].instruction
        # A rater without a usable answer fails its edit alone.
        try:
            return {"key": key, **rate(self.judge.judge, self.rubric, *images, instruction=instruction)}
        except UnratedError as fault:
            return {"key": key, "error": str(fault)}

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """SC, PQ, O of each subset: macro means over the task types present."""
        keys = [row["key"] for row in rows]
        edits = [self.data.items[key] for key in keys]
        figure_N3 = np.array([figures_of(row) for row in rows])

        # Numbers instead of names: an interval computes the figures 2,000 times.
        task_N = np.unique([edit.task for edit in edits], return_inverse=True)[1]
        member_NS = np.zeros((len(edits), len(SUBSETS)), bool)
        for index, edit in enumerate(edits):
            subset = edit.language.upper()
            member_NS[index, SUBSETS.index(subset)] = True
            member_NS[index, SUBSETS.index(f"{subset}-I")] = edit.intersection

        # Per subset: a mean per task type, then over the task types that a draw has.
        def statistic(drawn: Indices) -> Floats:
            means = np.full((len(SUBSETS), len(FIGURES)), np.nan)
            for subset in range(len(SUBSETS)):
                rows_of = drawn[member_NS[drawn, subset]]
                tasks = task_N[rows_of]
                by_task = []
                for task in np.unique(tasks):
                    by_task.append(figure_N3[rows_of][tasks == task].mean(0))
                # A draw may lack a whole subset, whose figures stay NaN.
                if by_task:
                    means[subset] = np.stack(by_task).mean(0)
            return means.reshape(-1)

        return bootstrap(keys, statistic)

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        return grouped("By task type", self.columns, rows, lambda row: self.data.items[row["key"]].task, self.figures)


def _build(data: Dataset[Edit, Rows], options: GeditOptions, reward: PacoReward, out: Path) -> GeditBench:
    # A judge in this process answers one question at a time; only a server gains by several.
    return GeditBench(
        data,
        options.images or out,
        judge=reward,
        rubric=read_rubric(),
        made_by=options.described(edits=True),
        workers=WORKERS if is_address(options.judge) else 1,
    )


def _generate(data: Dataset[Edit, Rows], options: GeditOptions, out: Path, shard: Shard, advance: Progress) -> None:
    """Write this shard's input images to `sources/` and generate the missing edits."""
    source = options.image_source(edits=True)
    edits = list(data.items.values())

    # A generator reads files, and each image's recipe names them; the table holds bytes.
    for batch in shard.batches(edits, size=source.batch):
        for edit in batch:
            if not (out / edit.source).is_file():
                write_atomic(out / edit.source, png_bytes(_input(data.source, edit)))

    jobs = []
    for edit in edits:
        prompt = Prompt(id=edit.number, text=edit.instruction, sources=(out / edit.source,))
        jobs.append(ImageJob(edit.key, prompt, edit.file))
    generate_missing(jobs, out, source, shard=shard, progress=advance)


SPEC = BenchmarkSpec(
    summary="Generate edits, then have them rated by a rubric.",
    data="GEdit-Bench: a folder of parquet files, or a JSONL.",
    options=GeditOptions,
    read=lambda data, options: read_edits(
        data, [options.language] if options.language else LANGUAGES, limit=options.limit
    ),
    build=_build,
    generate=_generate,
)
