"""GEdit-Bench: edits of real images by real instructions, English and Chinese (Step1X-Edit, arXiv 2504.17761).

The data are edits.jsonl, to which `pacorl data gedit` converts the published table: a line has the task type
(`category`), the language (`task_name`), a key, and whether the image belongs to the intersection subset (which every
compared model would edit). Edits are written to `fullset/{task}/{language}/{key}.png`,
rated by a rubric, and averaged per task type, then over task types; "-I" is the intersection subset. The rater is any
vision-language model that answers in words. SC (semantic consistency) and PQ (perceptual quality) are each the lower of
two scores, and O = √(SC · PQ), as VIEScore (arXiv 2312.14867) has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from pacorl.bench.benchmarks import GENERATOR, BenchmarkOptions, BenchmarkSpec
from pacorl.bench.items import Dataset, ImageCache
from pacorl.bench.suite import Row, Table, Texts, macro_means, paper_table
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.generate.image_queue import ImageJob, Shard, generate_missing
from pacorl.io.documents import JsonObject, object_within, read_records, read_yaml, typed
from pacorl.io.files import safe_name, text_digest
from pacorl.io.terminal import Progress
from pacorl.judge.chat import ATTEMPTS
from pacorl.judge.judge import Judge, is_address
from pacorl.records.fields import Name, by_key
from pacorl.types import Prompt, Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.paco_reward import PacoReward

EDITS = "edits.jsonl"
LANGUAGES = ("en", "cn")
SUBSETS = ("EN-I", "EN", "CN-I", "CN")
FIGURES = ("SC", "PQ", "O")
COLUMNS = tuple(f"{subset} {figure}" for subset, figure in product(SUBSETS, FIGURES))
NOTE = (
    "SC, PQ and O = √(SC · PQ) of each edit, from 0 to 10; mean per task type, then over the task types, 11 in the "
    "published data. -I is the intersection subset. The published rows were rated by another model with VIEScore's own "
    "words: compare with care."
)
WORKERS = 8
"""Ratings at a time, of a rater at a server."""
RUBRIC = Path(__file__).with_name("rubric.yaml")
INSTRUCTION = "{instruction}"
BEST = 10
"""Highest score."""


class Edit(BaseModel):
    """A line of EDITS."""

    image: Name
    instruction: Name
    # Task and key become folders and files.
    task: Annotated[str, Field(alias="category"), AfterValidator(safe_name)]
    language: Annotated[Literal["en", "cn"], Field(alias="task_name")]
    name: Annotated[str, Field(alias="key"), AfterValidator(safe_name)]
    """The row's own key, which may serve both languages."""
    intersection: bool

    @property
    def key(self) -> str:
        """`en/color_alter/1a2b`."""
        return f"{self.language}/{self.task}/{self.name}"

    @property
    def file(self) -> str:
        """File of the edit, in the layout of the published evaluation."""
        return f"fullset/{self.task}/{self.language}/{self.name}.png"


def read_edits(source: Path, *, limit: int | None = None) -> Dataset[Edit]:
    """Read the edits of a folder, or of one of its files. Raises ValueError naming a line of another form."""
    path = source / EDITS if source.is_dir() else source
    fix = f"`pacorl data {source}` makes it of GEdit-Bench's parquet files"
    edits = read_records(path, partial(typed, kind=Edit), fix=fix)
    items = by_key(edits, lambda edit: edit.key, source=path)
    return Dataset.selected(items, content=[edit.model_dump() for edit in edits], source=path, limit=limit)


class Scores(BaseModel):
    """The JSON object in a rater's answer."""

    score: Annotated[list[Annotated[float, Field(ge=0, le=BEST)]], Field(min_length=2, max_length=2)]
    reasoning: Annotated[str, BeforeValidator(lambda text: str(text)[:500])] = ""


def ask_scores(judge: Judge, question: Question) -> Scores:
    """Ask for two scores, from 0 to 10, and their reason.

    Raises:
        RuntimeError: no answer can be used; with the last fault.
    """
    text = question.text
    fault = ""
    for _ in range(ATTEMPTS):
        answer = judge.explain(Question(question.images, text))
        try:
            return typed(object_within(answer), Scores)
        except ValueError as error:
            # At temperature 0 the same question would get the same answer, so add the fault.
            fault = str(error)
            text = f"{question.text}\nYour last answer could not be used: {fault}."
    raise RuntimeError(f"{ATTEMPTS} answers in a row could not be used; the last: {fault}")


@dataclass(eq=False)
class GeditBench:
    """Benchmark over the edits of a folder."""

    data: Dataset[Edit]
    images: Path
    """Folder with `fullset/`."""
    judge: PacoReward
    rubric: Mapping[str, str]
    """Wording of the two ratings."""
    made_by: JsonObject
    """Description of the images in the settings."""
    workers: int
    """Number of concurrent ratings."""

    table = Table("GEdit-Bench", COLUMNS, notes=(NOTE,), resampled="edits")
    paper = paper_table("gedit")

    def settings(self) -> JsonObject:
        return {
            "benchmark": "gedit",
            "data": self.data.fingerprint,
            "judge": self.judge.name,
            "rubric": text_digest("".join(self.rubric.values()))[:16],
            "images": dict(self.made_by),
        }

    def texts(self) -> Texts:
        return {edit.key: [edit.instruction] for edit in self.data.items.values()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        before, after = ImageCache(self.data.folder), ImageCache(self.images)
        edits = [self.data.items[key] for key in keys]
        images = [(before.open(edit.image), after.open(edit.file)) for edit in edits]
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._rate, keys, images))

    def _rate(self, key: str, images: tuple[Image, Image]) -> Row:
        # Not `format`: a rubric shows the requested JSON, braces and all.
        text = self.rubric["semantics"].replace(INSTRUCTION, self.data.items[key].instruction)
        try:
            semantics = ask_scores(self.judge.judge, Question(images, text))
            quality = ask_scores(self.judge.judge, Question(images[1:], self.rubric["quality"]))
        except RuntimeError as fault:  # a rater without a usable answer fails its edit alone
            return {"key": key, "error": str(fault)}
        reasons = [semantics.reasoning, quality.reasoning]
        return {"key": key, "semantics": semantics.score, "quality": quality.score, "reasons": reasons}

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """SC, PQ, O of each subset: macro means over the task types present."""
        keys = [row["key"] for row in rows]
        edits = [self.data.items[key] for key in keys]
        scores = np.array([(min(row["semantics"]), min(row["quality"])) for row in rows], dtype=float)
        figure_N3 = np.column_stack([scores, np.sqrt(scores.prod(1))])

        # Numbers instead of names: an interval computes the figures 2,000 times.
        tasks, task_N = np.unique([edit.task for edit in edits], return_inverse=True)
        language_N = np.array([LANGUAGES.index(edit.language) for edit in edits])
        within_N = np.array([edit.intersection for edit in edits])

        # In the order of SUBSETS: of each language the intersection subset, then all.
        def statistic(drawn: Indices) -> Floats:
            means = []
            for subset in (drawn[within_N[drawn]], drawn):
                means.append(macro_means(figure_N3, task_N, language_N, subset, shape=(len(tasks), len(LANGUAGES))))
            return np.stack(means).transpose(2, 0, 1).reshape(-1)

        return bootstrap(keys, statistic)


def _build(data: Dataset[Edit], options: BenchmarkOptions, reward: PacoReward, out: Path) -> GeditBench:
    # A judge in this process answers one question at a time; only a server gains by several.
    return GeditBench(
        data,
        options.images or out,
        judge=reward,
        rubric=typed(read_yaml(RUBRIC), dict[str, str]),
        made_by=options.described(edits=True),
        workers=WORKERS if is_address(options.judge) else 1,
    )


def _generate(data: Dataset[Edit], options: BenchmarkOptions, out: Path, shard: Shard, advance: Progress) -> None:
    """Generate this shard's missing edits."""
    source = options.image_source(edits=True)
    jobs = []
    for number, edit in enumerate(data.items.values()):
        prompt = Prompt(id=number, text=edit.instruction, sources=(data.folder / edit.image,))
        jobs.append(ImageJob(edit.key, prompt, edit.file))
    generate_missing(jobs, out, source, shard=shard, progress=advance)


SPEC = BenchmarkSpec(
    read=lambda data, options: read_edits(data, limit=options.limit),
    build=_build,
    generate=_generate,
    takes=GENERATOR,
)
