"""GEdit-Bench: edits of real images by real instructions, English and Chinese (Step1X-Edit, arXiv 2504.17761).

The data are edits.jsonl, to which `pacorl data FOLDER` converts the published table: a line has the task type
(`category`), the language (`task_name`), a key, and whether the image belongs to the intersection subset (which every
compared model would edit). Edits are written to `fullset/{task}/{language}/{key}.png`,
rated by a rubric, and averaged per task type, then over task types; "-I" is the intersection subset. The rater is any
vision-language model that answers in words. SC (semantic consistency) and PQ (perceptual quality) are each the lower of
two scores, and O = √(SC · PQ), as VIEScore (arXiv 2312.14867) has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from pacorl.bench.suite import INTERVALS, ImageBenchmark, ImageCache, Row, Table, Texts, macro_means, paper_table
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.generate.image_queue import ImageJob
from pacorl.io.documents import JsonObject, object_within, read_records, read_yaml, typed
from pacorl.io.files import safe_name, text_digest
from pacorl.judge.chat import ATTEMPTS
from pacorl.judge.judge import Judge, is_address
from pacorl.records.fields import Name
from pacorl.types import Prompt, Question

if TYPE_CHECKING:
    from PIL.Image import Image

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
RUBRIC = typed(read_yaml(Path(__file__).with_name("rubric.yaml")), dict[str, str])
"""Wording of the two ratings."""
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


class GeditBench(ImageBenchmark[Edit]):
    """Benchmark over the edits of a folder with `fullset/`."""

    name = "gedit"
    table = Table("GEdit-Bench", COLUMNS, (NOTE, INTERVALS.format("edits")))
    paper = paper_table("gedit")
    edits = True

    def read(self, source: Path) -> tuple[Path, list[Edit]]:
        """Read the edits of a folder, or of one of its files."""
        path = source / EDITS if source.is_dir() else source
        fix = f"`pacorl data {source}` makes it of GEdit-Bench's parquet files"
        return path, read_records(path, partial(typed, kind=Edit), fix=fix)

    def settings(self, judge: str) -> JsonObject:
        return super().settings(judge) | {"rubric": text_digest("".join(RUBRIC.values()))[:16]}

    def texts(self) -> Texts:
        return {key: [edit.instruction] for key, edit in self.items.items()}

    def jobs(self) -> list[ImageJob]:
        jobs = []
        for number, (key, edit) in enumerate(self.items.items()):
            prompt = Prompt(id=number, text=edit.instruction, sources=(self.folder / edit.image,))
            jobs.append(ImageJob(key, prompt, edit.file))
        return jobs

    def measure(self, keys: Sequence[str], judge: Judge) -> list[Row]:
        before, after = ImageCache(self.folder), ImageCache(self.images)
        edits = [self.items[key] for key in keys]
        images = [(before.open(edit.image), after.open(edit.file)) for edit in edits]
        # A judge in this process answers one question at a time; only a server gains by several.
        with ThreadPoolExecutor(WORKERS if is_address(self.options.judge) else 1) as pool:
            return list(pool.map(partial(_rate, judge), edits, images))

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """SC, PQ, O of each subset: macro means over the task types present."""
        keys = [row["key"] for row in rows]
        edits = [self.items[key] for key in keys]
        scores = np.array([(min(row["semantics"]), min(row["quality"])) for row in rows], dtype=float)
        figure_N3 = np.column_stack([scores, np.sqrt(scores.prod(1))])

        language_N = np.array([LANGUAGES.index(edit.language) for edit in edits])
        within_N = np.array([edit.intersection for edit in edits])
        macro = macro_means(figure_N3, [edit.task for edit in edits], language_N, columns=len(LANGUAGES))

        # In the order of SUBSETS: of each language the intersection subset, then all.
        def statistic(drawn: Indices) -> Floats:
            means = [macro(subset) for subset in (drawn[within_N[drawn]], drawn)]
            return np.stack(means).transpose(2, 0, 1).reshape(-1)

        return bootstrap(keys, statistic)


def _rate(judge: Judge, edit: Edit, images: tuple[Image, Image]) -> Row:
    """Rate an edit of the first image, the second one."""
    # Not `format`: a rubric shows the requested JSON, braces and all.
    text = RUBRIC["semantics"].replace(INSTRUCTION, edit.instruction)
    try:
        semantics = ask_scores(judge, Question(images, text))
        quality = ask_scores(judge, Question(images[1:], RUBRIC["quality"]))
    except RuntimeError as fault:  # a rater without a usable answer fails its edit alone
        return {"key": edit.key, "error": str(fault)}
    reasons = [semantics.reasoning, quality.reasoning]
    return {"key": edit.key, "semantics": semantics.score, "quality": quality.score, "reasons": reasons}
