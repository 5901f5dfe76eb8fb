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
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from pacorl.bench.benchmarks import GENERATOR, BenchmarkOptions, BenchmarkSpec
from pacorl.bench.items import Dataset, ImageCache
from pacorl.bench.suite import Row, Table, Texts, paper_table
from pacorl.core import questions as wordings
from pacorl.core.batches import grouped
from pacorl.core.devices import available_device
from pacorl.core.grid import split
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.generate.image_queue import ImageJob, Shard, generate_missing
from pacorl.io.documents import JsonObject, blamed_on, read_object, typed
from pacorl.io.files import safe_name, write_atomic
from pacorl.io.images import png_bytes
from pacorl.io.terminal import Progress
from pacorl.judge.pairwise import ask, by_criterion
from pacorl.records.compose import prompt_from
from pacorl.records.fields import Criteria, by_key
from pacorl.records.leaks import id_text
from pacorl.types import Prompt, Question, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.paco_reward import PacoReward
    from pacorl.rewards.reward import Reward

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

    id: Annotated[str, AfterValidator(safe_name)]
    instruction: str
    captions: Annotated[list[str], Field(min_length=1, validation_alias="sub_caption")]
    """One per image."""
    count: Annotated[int | None, Field(validation_alias="output_image_count")] = None
    criteria: Annotated[Criteria, BeforeValidator(_first_lists), Field(validation_alias=CRITERIA)]
    """Dimension → name → text."""
    alignment: Annotated[dict[str, dict[str, list[str] | None]], Field(validation_alias=ALIGNMENT)]
    """Image → dimension → texts that the image must show."""

    @model_validator(mode="after")
    def _counts_agree(self) -> Case:
        if self.count not in (None, len(self.captions)):
            raise ValueError(f"'output_image_count' is {self.count} for {len(self.captions)} sub-captions")
        if len(self.alignment) != len(self.captions):
            raise ValueError(f"{ALIGNMENT} has {len(self.alignment)} entries for its {len(self.captions)} images")
        return self


def average(aesthetics: float, alignment: Sequence[float], consistency: Sequence[float]) -> float:
    """Compute the last column of Tab. 3."""
    means = (aesthetics, fmean(alignment), fmean(consistency))
    return sum(weight * mean for weight, mean in zip(WEIGHTS, means, strict=True))


# --- reading -----------------------------------------------------------------------------------------------------


def read_cases(folder: Path, *, limit: int | None = None) -> Dataset[Case]:
    """Read and check the three files. Raises ValueError naming a case whose entries do not match."""
    fix = "give the folder of ChengyouJia/T2IS-Bench as published"
    cases = read_object(folder / CASES, fix=fix)
    criteria = read_object(folder / CRITERIA, fix=fix)
    alignment = read_object(folder / ALIGNMENT, fix=fix)

    read = []
    for name, record in cases.items():
        with blamed_on(f"{folder / CASES}, case {name}"):
            entry = record if isinstance(record, dict) else {}
            attached = {"id": name, CRITERIA: criteria.get(name), ALIGNMENT: alignment.get(name)}
            read.append(typed(entry | attached, Case))
    items = by_key(read, lambda case: case.id, source=folder / CASES)
    return Dataset.selected(items, content=[cases, criteria, alignment], source=folder / CASES, limit=limit)


# --- generating --------------------------------------------------------------------------------------------------


def _generate(data: Dataset[Case], options: BenchmarkOptions, out: Path, shard: Shard, advance: Progress) -> None:
    """Generate the missing grid images into `grids/` and cut them into `images/`."""
    # One grid image per case, cut into the panels that are measured.
    source = options.image_source(edits=False)
    jobs = []
    for case in data.items.values():
        prompt = prompt_from(options.model, theme=case.instruction, panels=case.captions)
        size = Size(prompt.grid.rows * PANEL, prompt.grid.cols * PANEL)
        jobs.append(ImageJob(case.id, replace(prompt, size=size), f"grids/{case.id}.png"))

    def cut(job: ImageJob, image: Image) -> None:
        for number, panel in enumerate(split(image, job.prompt.grid), start=1):
            write_atomic(out / "images" / f"{job.key}_{number:04d}.png", png_bytes(panel))

    generate_missing(jobs, out, source, shard=shard, save_panels=cut, progress=advance)


# --- scoring -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class T2isBench:
    """The benchmark over the images of a folder."""

    data: Dataset[Case]
    images: Path
    """Folder of the images `{case}_{number:04d}.png`."""
    judge: PacoReward
    made_by: JsonObject
    """Description of the images in the settings."""
    aesthetics: Reward | None = None
    """LAION's predictor, if it is asked for."""

    table = Table("T2IS-Bench", COLUMNS, notes=(NOTE,), resampled="cases")
    paper = paper_table("t2is")

    def settings(self) -> JsonObject:
        data, judge = self.data.fingerprint, self.judge.name
        images: JsonObject = {"images": dict(self.made_by), "aesthetics": self.aesthetics is not None}
        return {"benchmark": "t2is", "data": data, "judge": judge} | images

    def texts(self) -> Texts:
        # Ids too: a training record of a case may have other words, and the case's id.
        return {case.id: [case.instruction, *case.captions, id_text(case.id)] for case in self.data.items.values()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        rows: list[Row] = []
        for key in keys:
            case = self.data.items[key]
            cache = ImageCache(self.images)
            images = [cache.open(f"{key}_{number:04d}.png") for number in range(1, len(case.captions) + 1)]
            try:
                scores: Row = {"alignment": self._aligned(case, images), "consistency": self._consistent(case, images)}
                rows.append({"key": key, **scores, "aesthetics": self._aesthetics(case, images)})
            except _UnscoredError as fault:
                rows.append({"key": key, "error": str(fault)})
        return rows

    def _aligned(self, case: Case, images: Sequence[Image]) -> dict[str, list[float]]:
        """Return dimension → per image that has texts in it, the mean over them."""
        # One question per image and text.
        questions = {}
        for index, texts_of in enumerate(case.alignment.values()):
            for dimension in ALIGNED:
                for number, text in enumerate(texts_of.get(dimension) or ()):
                    questions[index, dimension, number] = Question((images[index],), wordings.figure_shows(text))

        answers = self._p_yes(questions)
        means = _means(((index, dimension), p_yes) for (index, dimension, _), p_yes in answers.items())
        return grouped((dimension, mean) for (_, dimension), mean in means.items())

    def _aesthetics(self, case: Case, images: Sequence[Image]) -> list[float]:
        if self.aesthetics is None:
            return []
        prompts = [Prompt(id=number, text=text) for number, text in enumerate(case.captions)]
        return [score * AESTHETIC_SCALE for score in self.aesthetics(prompts, images) if score is not None]

    def _p_yes(self, questions: Mapping[Name, Question]) -> dict[Name, float]:
        """Ask all questions; means over fewer of them would not be comparable.

        Raises:
            _UnscoredError: one has no answer.
        """
        answers = {}
        for name, verdict in ask(self.judge.judge, questions).items():
            if verdict.p_yes is None:
                raise _UnscoredError(verdict.error or "no answer")
            answers[name] = verdict.p_yes
        return answers

    def _consistent(self, case: Case, images: Sequence[Image]) -> dict[str, float]:
        """Return dimension → mean over criteria of the mean over pairs."""
        # Once, as the released evaluation does: to 512 × 512 and then to the judge's patches would blur them twice.
        prompting = getattr(self.judge.judge, "prompting", None)
        size = prompting.resized(PAIR) if prompting else SERVED_PAIR
        small = [image.resize((size.width, size.height)) for image in images]
        pairs = list(combinations(range(len(small)), 2))
        questions = {}
        for criterion, text in by_criterion(case.criteria, wordings.meets_criterion_in_a_word).items():
            for i, j in pairs:
                questions[criterion, (i, j)] = Question((small[i], small[j]), text)

        # Means of means: a dimension's criteria count alike, however many pairs were asked about.
        of_criterion = _means((criterion, p_yes) for (criterion, _), p_yes in self._p_yes(questions).items())
        return _means((dimension, mean) for (dimension, _), mean in of_criterion.items())

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        # The scores of each case by column. A case without any, as without criteria, counts nowhere: 0 is a judgement.
        aesthetics = [row["aesthetics"] for row in rows]
        alignment = []
        consistency = []
        for name in ALIGNED:
            alignment.append([row["alignment"].get(name, []) for row in rows])
        for name in CONSISTENT:
            consistency.append([[row["consistency"][name]] if name in row["consistency"] else [] for row in rows])
        # The released evaluation leaves out 0, the mean of cases without criteria in a dimension.
        released = [[[score for score in scores if score > 0] for scores in cases] for cases in consistency]
        columns = [_pooled(cases) for cases in (aesthetics, *alignment, *released, *consistency)]

        def statistic(drawn: Indices) -> Floats:
            means = [_mean(sum_C2[drawn]) for sum_C2 in columns]
            # Without aesthetics the average is NaN: one of two parts would not be comparable with the paper's.
            return np.array([*means[:7], average(means[0], means[1:4], means[4:7]), *means[7:]])

        return bootstrap([row["key"] for row in rows], statistic)


def load_aesthetics() -> Reward:
    """Load LAION's predictor. Raises ValueError if its head is not here."""
    # Rewards import torch; a command's help, which reads this file, must not.
    from pacorl.rewards.clip import Aesthetic

    reward = Aesthetic(device=available_device())
    reward.load()
    return reward


class _UnscoredError(Exception):
    """A question of a case has no answer."""


def _means(values: Iterable[tuple[Name, float]]) -> dict[Name, float]:
    """Return the mean of each name's values."""
    return {name: fmean(numbers) for name, numbers in grouped(values).items()}


def _pooled(cases: Sequence[Sequence[float]]) -> Floats:
    """Return (cases, 2): the sum of a case's scores, and their number."""
    return np.array([(sum(scores), len(scores)) for scores in cases], dtype=float)


def _mean(sum_C2: Floats) -> float:
    """Return the mean of all scores of some cases; NaN if there are none."""
    total, count = sum_C2.sum(0)
    if not count:
        return float("nan")
    return float(total / count)


def _build(data: Dataset[Case], options: BenchmarkOptions, reward: PacoReward, out: Path) -> T2isBench:
    return T2isBench(
        data,
        options.images or out / "images",
        judge=reward,
        aesthetics=load_aesthetics() if options.aesthetics else None,
        made_by=options.described(edits=False),
    )


SPEC = BenchmarkSpec(
    read=lambda data, options: read_cases(data, limit=options.limit),
    build=_build,
    generate=_generate,
    batch=1,
    takes=(*GENERATOR, "aesthetics"),
)
