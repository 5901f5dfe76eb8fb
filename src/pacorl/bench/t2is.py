"""T2IS-Bench: sets of images from one instruction (Jia et al. 2025; arXiv 2512.04784, Tab. 3).

The published files as they are: `T2IS-Bench.json`, `prompt_consistency.json`, `prompt_alignment.json`. A case's
images are `{case}_0001.png` and so on, as the released evaluation reads them.

- Prompt alignment: P(Yes) that an image shows each of its texts; mean over texts per dimension, then over images.
- Visual consistency: each pair of a case, resized once to what the judge reads of 512 × 512, against each criterion;
  mean over pairs, criteria, then cases. The released evaluation leaves out cases whose mean is 0, and with them cases
  without criteria in a dimension. Further columns have the mean over all cases with criteria.
- Average = 0.2 · aesthetics + 0.3 · mean alignment + 0.5 · mean consistency. The paper does not publish these weights;
  they reproduce its averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from pacorl.bench.benchmarks import BenchmarkOptions, BenchmarkSpec, GeneratorBenchmarkOptions
from pacorl.bench.items import Dataset, ImageCache, named_texts, parse_records
from pacorl.bench.scorers import JudgeTexts, RewardTexts, Score, TextScorer, load_reward
from pacorl.bench.suite import PaperTable, Row, Table, Texts, grouped, paper_table
from pacorl.config.options import STRONGEST, inherited, option
from pacorl.core import questions as wordings
from pacorl.core.grid import split
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.generate.image_queue import ImageJob, Shard, generate_missing
from pacorl.io.documents import JsonObject, read_jsonl, read_object
from pacorl.io.files import safe_name, write_atomic
from pacorl.io.images import png_bytes
from pacorl.io.terminal import Progress
from pacorl.judge.pairwise import Criterion, ask, by_criterion
from pacorl.records.leaks import id_text
from pacorl.records.prompts import evenly_spread, load_prompts
from pacorl.types import Prompt, Question, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.paco_reward import PacoReward

Name = TypeVar("Name")

CASES = "T2IS-Bench.json"
CRITERIA = "prompt_consistency.json"
ALIGNMENT = "prompt_alignment.json"
ALIGNED = ("Entity", "Attribute", "Relation")
CONSISTENT = ("Identity", "Style", "Logic")
PANEL = 512
"""Side of a generated panel if neither --size nor a record says one, in pixels."""
PAIR = Size(512, 512)
"""Size of the images of a pair, which a judge's processor rounds to its patches."""
SERVED_PAIR = Size(504, 504)
"""That size as Qwen2.5-VL reads it, for a judge whose processor is elsewhere."""
WEIGHTS = (0.2, 0.3, 0.5)
"""Weights of aesthetics, alignment and consistency."""

TAB_3 = paper_table("t2is")
GEMMA = paper_table("t2is_gemma")
# Only consistency and the average depend on the judge: a row of Gemma's begins as Qwen's does.
PAPER = PaperTable(
    TAB_3.source,
    {f"{name} (judge: Qwen2.5-VL-7B)": figures for name, figures in TAB_3.rows.items()}
    | {f"{name} (judge: Gemma-3-4B)": (*TAB_3.rows[name][:4], *figures) for name, figures in GEMMA.rows.items()},
)
COLUMNS = ("Aesthetics", *ALIGNED, *CONSISTENT, "Average", *(f"{n}, all cases" for n in CONSISTENT))
NOTE = (
    "Average = 0.2 · aesthetics + 0.3 · mean alignment + 0.5 · mean consistency. Consistency leaves out cases whose "
    "mean is 0, as the released evaluation does; “all cases” counts every case that has criteria in the dimension. "
    "Which aesthetics scorer the paper used is not known. Intervals are 95 %, bootstrapped over cases."
)


@dataclass(frozen=True, kw_only=True)
class T2isOptions(GeneratorBenchmarkOptions):
    """Options of T2IS-Bench: prompts, panels and scorers."""

    panel: ClassVar[str] = "Scoring"

    batch: int = inherited(BenchmarkOptions, "batch", default=1, help="Cases per call of the judge.")
    prompts: Path | None = option(None, "T2IS records to generate from, by their original_idx.")
    alignment: str = option("judge", "Prompt alignment by: judge, none, a scorer's URL, or a reward.")
    aesthetics: str = option("", "A reward of single images, e.g. aesthetic; none if left out.")
    aesthetics_scale: float = option(1.0, "Brings its scores to 0..1; LAION's predictor: 0.1.", least=0, most=STRONGEST)


@dataclass(frozen=True, slots=True)
class Case:
    """One set of images of the benchmark."""

    id: str
    instruction: str
    captions: tuple[str, ...]
    """One per image."""
    criteria: Mapping[str, Mapping[str, str]]
    """Dimension → name → text."""
    alignment: tuple[Mapping[str, tuple[str, ...]], ...]
    """Per image: dimension → texts that the image must show."""
    category: str = ""


def average(aesthetics: float, alignment: Sequence[float], consistency: Sequence[float]) -> float:
    """Compute the last column of Tab. 3."""
    means = (aesthetics, fmean(alignment), fmean(consistency))
    return sum(weight * mean for weight, mean in zip(WEIGHTS, means, strict=True))


# --- reading -----------------------------------------------------------------------------------------------------


def read_cases(folder: Path, *, limit: int | None = None) -> Dataset[Case, Path]:
    """Read and check the three files. Raises ValueError with a list of the cases whose entries do not match."""
    fix = "give the folder of ChengyouJia/T2IS-Bench as published"
    cases = read_object(folder / CASES, fix=fix)
    criteria = read_object(folder / CRITERIA, fix=fix)
    alignment = read_object(folder / ALIGNMENT, fix=fix)

    records = {}
    for name, record in cases.items():
        records[f"{folder / CASES}, case {name}"] = (name, record, criteria.get(name), alignment.get(name))
    items = parse_records(records, _case, key=lambda case: case.id)
    if not items:
        raise ValueError(f"{folder / CASES} holds no cases")
    # The content covers all cases, so that a limit may be raised and the results kept.
    content = [cases, criteria, alignment]
    return Dataset(dict(evenly_spread(list(items.items()), limit)), content, folder)


def _case(name: str, record: Any, criteria: Any, alignment: Any) -> Case:
    if not isinstance(record, dict):
        raise ValueError(f"a case is an object, this is a {type(record).__name__}")
    captions = record.get("sub_caption")
    count = record.get("output_image_count")
    if not isinstance(captions, list) or not captions or not all(isinstance(text, str) for text in captions):
        raise ValueError(f"'sub_caption' must be a list of texts, got {str(captions)[:60]!r}")
    if count is not None and count != len(captions):
        raise ValueError(f"'output_image_count' is {count!r} for {len(captions)} sub-captions")
    if not isinstance(record.get("instruction"), str):
        raise ValueError("'instruction' is missing")
    return Case(
        id=safe_name(name),
        instruction=record["instruction"],
        captions=tuple(captions),
        criteria=_criteria(criteria),
        alignment=_alignment(alignment, len(captions)),
        category=str(record.get("category") or ""),
    )


def _criteria(record: Any) -> dict[str, dict[str, str]]:
    if not isinstance(record, dict):
        raise ValueError(f"it has no criteria in {CRITERIA}")
    criteria: dict[str, dict[str, str]] = {}
    for dimension in CONSISTENT:
        mapping = record.get(dimension) or {}
        # A dimension is a list of one mapping; the released evaluation reads only the first.
        if isinstance(mapping, list):
            mapping = mapping[0]
        if not isinstance(mapping, dict):
            raise ValueError(f"{CRITERIA}: {dimension} must map names to texts, got {str(mapping)[:60]!r}")
        texts = named_texts(mapping)
        if texts:
            criteria[dimension] = texts
    return criteria


def _alignment(record: Any, count: int) -> tuple[dict[str, tuple[str, ...]], ...]:
    if not isinstance(record, dict):
        raise ValueError(f"{ALIGNMENT} has no entries for its {count} images")
    images = list(record.values())
    if len(images) != count or not all(isinstance(texts, dict) for texts in images):
        raise ValueError(f"{ALIGNMENT} has {len(images)} entries for its {count} images")

    alignment = []
    for texts in images:
        alignment.append({name: tuple(texts.get(name) or ()) for name in ALIGNED})
    return tuple(alignment)


# --- generating --------------------------------------------------------------------------------------------------


def prompts_by_case(path: Path) -> dict[str, Prompt]:
    """Read T2IS records by the case in their `original_idx`."""
    prompts = {}
    # Read twice: a Prompt has no field for `original_idx`.
    for row, prompt in zip(read_jsonl(path), load_prompts(path), strict=True):
        if row.get("original_idx"):
            prompts[str(row["original_idx"])] = prompt
    if not prompts:
        raise ValueError(f"{path}: no record has an 'original_idx', which names the case of T2IS-Bench")
    return prompts


def _job(case: Case, options: T2isOptions, records: Mapping[str, Prompt]) -> ImageJob:
    """Make the job of a case's grid image, from its T2IS record if there are records, else from its captions."""
    from pacorl.records.compose import prompt_from

    if records:
        if case.id not in records:
            raise ValueError(f"case {case.id} has no record among the --prompts")
        prompt = records[case.id]
    else:
        prompt = prompt_from(options.model, theme=case.instruction, panels=case.captions)
        prompt = replace(prompt, size=Size(prompt.grid.rows * PANEL, prompt.grid.cols * PANEL))
    if prompt.grid.count != len(case.captions):
        raise ValueError(f"case {case.id} has {len(case.captions)} images, its prompt a {prompt.grid} layout")
    return ImageJob(case.id, prompt, f"grids/{case.id}.png")


def _generate(data: Dataset[Case, Path], options: T2isOptions, out: Path, shard: Shard, advance: Progress) -> None:
    """Generate the missing grid images into `grids/` and cut them into `images/`."""
    # One grid image per case, cut into the panels that are measured.
    source = options.image_source(edits=False)
    records = prompts_by_case(options.prompts) if options.prompts else {}
    jobs = []
    for case in data.items.values():
        jobs.append(_job(case, options, records))

    def cut(job: ImageJob, image: Image) -> None:
        for number, panel in enumerate(split(image, job.prompt.grid), start=1):
            write_atomic(out / "images" / f"{job.key}_{number:04d}.png", png_bytes(panel))

    generate_missing(jobs, out, source, shard=shard, save_panels=cut, progress=advance)


# --- scoring -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class T2isBench:
    """The benchmark over the images of a folder."""

    data: Dataset[Case, Path]
    images: Path
    """Folder of the images `{case}_{number:04d}`."""
    judge: PacoReward
    made_by: JsonObject
    """Description of the images in the settings."""
    alignment: TextScorer | None
    aesthetics: RewardTexts | None = None
    """Reward of single images."""
    aesthetics_scale: float = 1.0
    """Factor of the reward's scores, to 0..1."""

    title = "T2IS-Bench"
    columns = COLUMNS
    paper = PAPER
    notes = (NOTE,)

    def settings(self) -> JsonObject:
        settings: JsonObject = {"benchmark": "t2is", "data": self.data.fingerprint, "judge": self.judge.name}
        settings["images"] = dict(self.made_by)
        if self.alignment:
            settings |= self.alignment.settings()
        if self.aesthetics:
            settings |= {"aesthetics": self.aesthetics.name, "aesthetics_scale": self.aesthetics_scale}
        return settings

    def texts(self) -> Texts:
        # Ids too: a training record of a case may have other words, and the case's id.
        return {case.id: [case.instruction, *case.captions, id_text(case.id)] for case in self.data.items.values()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        return [self._measure(self.data.items[key]) for key in keys]

    def _measure(self, case: Case) -> Row:
        # A user's finished images may have any format.
        cache = ImageCache(self.images)
        images = []
        for number in range(1, len(case.captions) + 1):
            images.append(cache.open_any(f"{case.id}_{number:04d}"))
        try:
            alignment = self._aligned(case, images)
            consistency = self._consistent(case, images)
            aesthetics = []
            if self.aesthetics:
                for value in _values(self.aesthetics.scores(images, case.captions)):
                    aesthetics.append(value * self.aesthetics_scale)
        except _UnscoredError as fault:
            return {"key": case.id, "error": str(fault)}
        return {"key": case.id, "alignment": alignment, "consistency": consistency, "aesthetics": aesthetics}

    def _aligned(self, case: Case, images: Sequence[Image]) -> list[dict[str, float]]:
        """Return for each image: dimension → mean over its texts."""
        if self.alignment is None:
            return []

        # One question per image and text.
        positions = []
        texts = []
        for index, dimensions in enumerate(case.alignment):
            for dimension, dimension_texts in dimensions.items():
                for text in dimension_texts:
                    positions.append((index, dimension))
                    texts.append(text)
        scores = self.alignment.scores([images[index] for index, _ in positions], texts)

        by_image: list[dict[str, list[float]]] = [{} for _ in images]
        for (index, dimension), value in zip(positions, _values(scores), strict=True):
            by_image[index].setdefault(dimension, []).append(value)
        return [_means(values) for values in by_image]

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

        verdicts = ask(self.judge.judge, questions)
        scores = _values([Score(verdict.p_yes, verdict.error) for verdict in verdicts.values()])
        by_pair: dict[Criterion, list[float]] = {}
        for (criterion, _), p_yes in zip(verdicts, scores, strict=True):
            by_pair.setdefault(criterion, []).append(p_yes)

        # Means of means: a dimension's criteria count alike, however many pairs were asked about.
        by_dimension: dict[str, list[float]] = {}
        for (dimension, _), mean in _means(by_pair).items():
            by_dimension.setdefault(dimension, []).append(mean)
        return _means(by_dimension)

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        # Sum and count of each score, per case.
        sums_CN2 = [_sums([row["aesthetics"] for row in rows])]
        for name in ALIGNED:
            scores = []
            for row in rows:
                scores.append([means[name] for means in row["alignment"] if name in means])
            sums_CN2.append(_sums(scores))
        # NaN for a dimension without criteria, because 0 is a judgement.
        consistent_ND = np.array([[row["consistency"].get(name, np.nan) for name in CONSISTENT] for row in rows])

        def statistic(drawn: Indices) -> Floats:
            means = []
            for sum_N2 in sums_CN2:
                total, count = sum_N2[drawn].sum(0)
                means.append(float(total / count) if count else float("nan"))
            aesthetic, *alignment = means

            columns = consistent_ND[drawn].T
            # The released evaluation leaves out 0, the mean of cases without criteria in a dimension.
            released = [_mean(column[column > 0]) for column in columns]
            every = [_mean(column[~np.isnan(column)]) for column in columns]
            # Without aesthetics the average is NaN: one of two parts would not be comparable with the paper's.
            return np.array([aesthetic, *alignment, *released, average(aesthetic, alignment, released), *every])

        return bootstrap([row["key"] for row in rows], statistic)

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        return grouped(
            "By category", self.columns, rows, lambda row: self.data.items[row["key"]].category, self.figures
        )


class _UnscoredError(Exception):
    """A question of a case has no answer."""


def _values(scores: Sequence[Score]) -> list[float]:
    """Return the values of complete scores; means over fewer questions would not be comparable.

    Raises:
        _UnscoredError: if a score is missing.
    """
    values = []
    for score in scores:
        if score.value is None:
            raise _UnscoredError(score.error or "no answer")
        values.append(score.value)
    return values


def _means(values: Mapping[Name, Sequence[float]]) -> dict[Name, float]:
    """Return the mean of each entry."""
    return {name: fmean(numbers) for name, numbers in values.items()}


def _sums(cases: Iterable[Sequence[float]]) -> Floats:
    """Return (cases, 2): the sum over a case's images, and their number."""
    return np.array([[sum(scores), len(scores)] for scores in cases])


def _mean(column: Floats) -> float:
    return float(column.mean()) if len(column) else float("nan")


def text_scorer(options: T2isOptions, reward: PacoReward) -> TextScorer | None:
    """Create the scorer of prompt alignment: the judge, none, a URL, or a reward."""
    kind = options.alignment
    arguments: list[str] = []
    if kind == "none":
        return None
    if kind == "judge":
        return JudgeTexts(reward)
    if kind.startswith(("http://", "https://")):
        kind, arguments = "http", [f"url={kind}"]  # e.g. VQAScore, behind the reward's protocol
    return RewardTexts(*load_reward(kind, arguments))


def _build(data: Dataset[Case, Path], options: T2isOptions, reward: PacoReward, out: Path) -> T2isBench:
    aesthetics = None
    if options.aesthetics:
        aesthetics = RewardTexts(*load_reward(options.aesthetics, ()))
    return T2isBench(
        data,
        options.images or out / "images",
        judge=reward,
        alignment=text_scorer(options, reward),
        aesthetics=aesthetics,
        aesthetics_scale=options.aesthetics_scale,
        made_by=options.described(edits=False),
    )


SPEC = BenchmarkSpec(
    summary="Generate sets, then measure alignment, consistency and aesthetics.",
    data="The folder of T2IS-Bench: its three JSON files.",
    options=T2isOptions,
    read=lambda data, options: read_cases(data, limit=options.limit),
    build=_build,
    generate=_generate,
)
