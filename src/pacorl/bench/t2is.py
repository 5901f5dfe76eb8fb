"""T2IS-Bench: sets of images from one instruction (Jia et al. 2025; arXiv 2512.04784, Tab. 3).

The published files as they are: `T2IS-Bench.json`, `prompt_consistency.json`, `prompt_alignment.json`. A case's
images are `{case}_0001.png` and so on, as the released evaluation reads them.

- Prompt alignment: P(Yes) that an image shows each of its texts; mean over texts per dimension, then over images.
- Visual consistency: each pair of a case, resized once to the judge's input size for 512 × 512, against each criterion;
  mean over pairs, criteria, then cases. The released evaluation leaves out cases whose mean is 0, and with them cases
  without criteria in a dimension. Further columns have the mean over all cases with criteria.
- Average = 0.2 · aesthetics + 0.3 · mean alignment + 0.5 · mean consistency. The paper does not publish these weights;
  they reproduce its averages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from pacorl.bench.options import GENERATOR
from pacorl.bench.suite import INTERVALS, ImageBenchmark, ImageCache, Row, Table, Texts, paper_table
from pacorl.core import questions as wordings
from pacorl.core.batches import grouped
from pacorl.core.devices import available_device
from pacorl.core.grid import split
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.generate.image_queue import ImageJob
from pacorl.io.documents import JsonObject, blamed_on, read_object, typed
from pacorl.io.files import safe_name, write_atomic
from pacorl.io.images import png_bytes
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import by_criterion
from pacorl.records.compose import prompt_from
from pacorl.records.fields import Criteria
from pacorl.records.leaks import id_text
from pacorl.types import Prompt, Question, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.rewards.clip import Aesthetic

Name = TypeVar("Name", bound=Hashable)

CASES = "T2IS-Bench.json"
CRITERIA = "prompt_consistency.json"
ALIGNMENT = "prompt_alignment.json"
ALIGNED = ("Entity", "Attribute", "Relation")
CONSISTENT = ("Identity", "Style", "Logic")
PANEL = 512
"""Side of a generated panel without --size, in pixels."""
PAIR = Size(512, 512)
"""Size of the images of a pair, which a judge's processor rounds to its patches."""
SERVED_PAIR = Size(504, 504)
"""That size as Qwen2.5-VL reads it, for a judge whose processor is elsewhere."""
AESTHETIC_SCALE = 0.1
"""Factor that brings the scores of LAION's predictor to 0..1."""
WEIGHTS = (0.2, 0.3, 0.5)
"""Weights of aesthetics, alignment and consistency."""

COLUMNS = ("Aesthetics", *ALIGNED, *CONSISTENT, "Average", *(f"{n}, all cases" for n in CONSISTENT))
NOTE = (
    "Average = 0.2 · aesthetics + 0.3 · mean alignment + 0.5 · mean consistency. Consistency leaves out cases whose "
    "mean is 0, as the released evaluation does; “all cases” counts every case that has criteria in the dimension. "
    "Which aesthetics scorer the paper used is not known."
)


def _first_lists(criteria: Any) -> Any:
    # The released evaluation reads only the first of a dimension's lists of texts.
    if not isinstance(criteria, dict):
        raise ValueError("must be texts by dimension")
    first = {}
    for name in CONSISTENT:
        texts = criteria.get(name)
        first[name] = next(iter(texts), None) if isinstance(texts, list) else texts
    return first


class Case(BaseModel):
    """One set of images of the benchmark: a case of CASES, with its entries in the other two files."""

    key: Annotated[str, AfterValidator(safe_name)]
    instruction: str
    captions: Annotated[list[str], Field(min_length=1, validation_alias="sub_caption")]
    """One per image."""
    criteria: Annotated[Criteria, BeforeValidator(_first_lists), Field(validation_alias=CRITERIA)]
    """Dimension → name → text."""
    alignment: Annotated[dict[str, dict[str, list[str] | None]], Field(validation_alias=ALIGNMENT)]
    """Image → dimension → texts that the image must show."""

    @model_validator(mode="after")
    def _counts_agree(self) -> Case:
        if len(self.alignment) != len(self.captions):
            raise ValueError(f"{ALIGNMENT} has {len(self.alignment)} entries for its {len(self.captions)} images")
        return self


def average(aesthetics: float, alignment: Sequence[float], consistency: Sequence[float]) -> float:
    """Compute the last column of Tab. 3."""
    means = (aesthetics, fmean(alignment), fmean(consistency))
    return sum(weight * mean for weight, mean in zip(WEIGHTS, means, strict=True))


class T2isBench(ImageBenchmark[Case]):
    """The benchmark over the images of a folder, `{case}_{number:04d}.png`."""

    name = "t2is"
    table = Table("T2IS-Bench", COLUMNS, (NOTE, INTERVALS.format("cases")))
    paper = paper_table("t2is")
    takes = (*GENERATOR, "aesthetics")
    batch = 1
    edits = False
    images_in = "images"

    def read(self, source: Path) -> tuple[Path, list[Case]]:
        """Read the three files; a fault names the case whose entries do not match."""
        fix = "give the folder of ChengyouJia/T2IS-Bench as published"
        cases, criteria, alignment = (read_object(source / name, fix=fix) for name in (CASES, CRITERIA, ALIGNMENT))
        items = []
        for name, record in cases.items():
            with blamed_on(f"{source / CASES}, case {name}"):
                entry = record if isinstance(record, dict) else {}
                attached = {"key": name, CRITERIA: criteria.get(name), ALIGNMENT: alignment.get(name)}
                items.append(typed(entry | attached, Case))
        if self.options.aesthetics:
            _ = self.predictor.head  # a missing one is refused before images are generated
        return source / CASES, items

    def settings(self, judge: str) -> JsonObject:
        return super().settings(judge) | {"aesthetics": self.options.aesthetics}

    def texts(self) -> Texts:
        # Ids too: a training record of a case may have other words, and the case's id.
        return {key: [case.instruction, *case.captions, id_text(key)] for key, case in self.items.items()}

    def jobs(self) -> list[ImageJob]:
        """List one grid image per case, in `grids/`."""
        jobs = []
        for key, case in self.items.items():
            prompt = prompt_from(self.options.model, theme=case.instruction, panels=case.captions)
            size = Size(prompt.grid.rows * PANEL, prompt.grid.cols * PANEL)
            jobs.append(ImageJob(key, replace(prompt, size=size), f"grids/{key}.png"))
        return jobs

    def save_panels(self, job: ImageJob, image: Image) -> None:
        for number, panel in enumerate(split(image, job.prompt.grid), start=1):
            write_atomic(self.images / _panel_file(job.key, number), png_bytes(panel))

    @cached_property
    def predictor(self) -> Aesthetic:
        """LAION's predictor, whose CLIP loads at the first image, after a generator's work."""
        # Rewards import torch; a command's help, which reads this file, must not.
        from pacorl.rewards.clip import Aesthetic

        return Aesthetic(device=available_device())

    def _panels(self, key: str, images: ImageCache) -> list[Image]:
        return [images.open(_panel_file(key, number)) for number in range(1, len(self.items[key].captions) + 1)]

    def questions(self, key: str, images: ImageCache, judge: Judge) -> dict[tuple[Hashable, ...], Question]:
        """Build the questions under (alignment or consistency, dimension, image or criterion, text or pair)."""
        case, panels = self.items[key], self._panels(key, images)
        questions: dict[tuple[Hashable, ...], Question] = {}
        for index, texts_of in enumerate(case.alignment.values()):
            for dimension in ALIGNED:
                for number, text in enumerate(texts_of.get(dimension) or ()):
                    shown = Question((panels[index],), wordings.figure_shows(text))
                    questions["alignment", dimension, index, number] = shown

        # Once, as the released evaluation does: to 512 × 512 and then to the judge's patches would blur them twice.
        prompting = getattr(judge, "prompting", None)
        size = prompting.resized(PAIR) if prompting else SERVED_PAIR
        small = [panel.resize((size.width, size.height)) for panel in panels]
        for criterion, text in by_criterion(case.criteria, wordings.meets_criterion_in_a_word).items():
            for pair in combinations(range(len(small)), 2):
                both = Question((small[pair[0]], small[pair[1]]), text)
                questions["consistency", criterion[0], criterion[1], pair] = both
        return questions

    def score(self, key: str, p_yes: Mapping[tuple[Hashable, ...], float], images: ImageCache) -> Row:
        """Return an item's means: alignment as dimension → one mean over texts per image with texts, consistency as
        dimension → mean over pairs and then criteria; and the aesthetics per image, empty if not measured."""
        # Means of means: a dimension's criteria count alike, however many pairs were asked about.
        means = _means((name[:3], value) for name, value in p_yes.items())
        aligned: list[tuple[Hashable, float]] = []
        consistent: list[tuple[Hashable, float]] = []
        for (measure, dimension, _), mean in means.items():
            of_measure = aligned if measure == "alignment" else consistent
            of_measure.append((dimension, mean))
        aesthetics = []
        if self.options.aesthetics:
            prompts = [Prompt(id=number, text=text) for number, text in enumerate(self.items[key].captions)]
            scores = self.predictor(prompts, self._panels(key, images))
            aesthetics = [score * AESTHETIC_SCALE for score in scores if score is not None]
        return {"alignment": grouped(aligned), "consistency": _means(consistent), "aesthetics": aesthetics}

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        # The scores of each case by column. A case without any, as without criteria, counts nowhere: 0 is a judgement.
        columns = [[row["aesthetics"] for row in rows]]
        for name in ALIGNED:
            columns.append([row["alignment"].get(name, []) for row in rows])
        all_cases = []
        for name in CONSISTENT:
            means_of_cases = [row["consistency"].get(name) for row in rows]
            # The released evaluation leaves out 0, the mean of cases without criteria in a dimension.
            columns.append([[mean] if mean else [] for mean in means_of_cases])
            all_cases.append([[] if mean is None else [mean] for mean in means_of_cases])
        # The sum of a case's scores, and their number.
        pooled = []
        for cases in (*columns, *all_cases):
            pooled.append([(sum(scores), len(scores)) for scores in cases])
        columns_KC2 = np.array(pooled, dtype=float)

        def statistic(drawn: Indices) -> Floats:
            total_K, count_K = columns_KC2[:, drawn].sum(1).T
            # NaN for a column without scores.
            with np.errstate(invalid="ignore"):
                means = (total_K / count_K).tolist()
            # Without aesthetics the average is NaN: one of two parts would not be comparable with the paper's.
            return np.array([*means[:7], average(means[0], means[1:4], means[4:7]), *means[7:]])

        return bootstrap([row["key"] for row in rows], statistic)


def _panel_file(case: str, number: int) -> str:
    """Return the name of a case's image, from 1."""
    return f"{case}_{number:04d}.png"


def _means(values: Iterable[tuple[Name, float]]) -> dict[Name, float]:
    """Return the mean of each name's values."""
    return {name: fmean(numbers) for name, numbers in grouped(values).items()}
