"""T2IS-Bench: sets of images from one instruction (Jia et al. 2025; arXiv 2512.04784, Tab. 3).

The published files as they are: `T2IS-Bench.json`, `prompt_consistency.json`, `prompt_alignment.json`. A case's
images are `{case}_0001.png` and so on, as the released evaluation reads them.

- Prompt alignment: P(Yes) that an image shows each of its texts; mean over texts per dimension, then over images.
- Visual consistency: each pair of a case, resized to 512 × 512, against each criterion; mean over pairs, criteria,
  then cases. The released evaluation leaves out cases whose mean is 0, which is how it leaves out cases without
  criteria in a dimension; the mean over all cases that have criteria stands beside it.
- Average = .2 · aesthetics + .3 · mean alignment + .5 · mean consistency. These weights are printed nowhere; they
  reproduce the paper's averages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from pacorl.bench.images import ImageCache
from pacorl.bench.pairs import Score
from pacorl.bench.published import PAPER, T2IS, T2IS_GEMMA
from pacorl.bench.rows import fingerprint
from pacorl.bench.scorers import load_reward
from pacorl.bench.sources import PANEL, described, image_source
from pacorl.bench.suite import BadItemError, Row, check_faults
from pacorl.bench.table import Advance, BenchmarkOptions, BenchmarkSpec, GeneratorBenchmarkOptions
from pacorl.bench.tables import Line, Table
from pacorl.config.options import inherited, option
from pacorl.core import questions as wordings
from pacorl.core.grid import split
from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from pacorl.data.leaks import id_text
from pacorl.data.records import load_prompts
from pacorl.data.sources import evenly_spread
from pacorl.engine.image_queue import ImageJob, ImageSource, Shard, generate_missing
from pacorl.io.documents import read_jsonl, read_object
from pacorl.io.files import safe_name, write_atomic
from pacorl.io.images import IMAGE_TYPES, png_bytes
from pacorl.judges.pairwise import ask, by_criterion
from pacorl.types import Prompt, Question, Size

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from pacorl.judges.judge import Judge
    from pacorl.rewards.reward import Reward
    from pacorl.score.reward import PacoReward

CASES, CRITERIA, ALIGNMENT = "T2IS-Bench.json", "prompt_consistency.json", "prompt_alignment.json"
ALIGNED = ("Entity", "Attribute", "Relation")
CONSISTENT = ("Identity", "Style", "Logic")
PAIR_SIDE = 512
"""Of both images of a pair, in pixels; a judge's own processor may round it to its patches (Qwen2.5-VL: 504)."""
WEIGHTS = (0.2, 0.3, 0.5)
"""Of aesthetics, alignment and consistency."""

Named = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class T2isOptions(GeneratorBenchmarkOptions):
    """What the sets are generated from, and who scores them."""

    panel: ClassVar[str] = "Scoring"

    batch: int = inherited(BenchmarkOptions, "batch", default=1, help="Cases per call of the judge.")
    prompts: Path | None = option(None, "T2IS records to generate from, by their original_idx.")
    panel_size: int = option(PANEL, "Side of a panel, if neither --size nor a record says one.", least=1)
    alignment: str = option("judge", "Prompt alignment by: judge, none, a scorer's URL, or a reward.")
    alignment_arg: list[str] = option([], "name=value for that reward; may be repeated.")
    aesthetics: str = option("", "A reward of single images, e.g. aesthetic; none if left out.")
    aesthetics_arg: list[str] = option([], "name=value for that reward; may be repeated.")
    aesthetics_scale: float = option(1.0, "Brings its scores to 0..1; LAION's predictor: 0.1.")


@dataclass(frozen=True, slots=True)
class Case:
    """One set that is asked for."""

    id: str
    instruction: str
    captions: tuple[str, ...]
    """One per image."""
    criteria: Named
    """Dimension → name → text."""
    alignment: tuple[Mapping[str, tuple[str, ...]], ...]
    """Per image: dimension → texts that it must show."""
    category: str = ""


@dataclass(frozen=True, slots=True)
class SetData:
    """The wanted cases of a folder."""

    cases: tuple[Case, ...]
    refused: Mapping[str, str]
    fingerprint: str


def average(aesthetics: float, alignment: Sequence[float], consistency: Sequence[float]) -> float:
    """The last column of Tab. 3."""
    parts = (aesthetics, fmean(alignment), fmean(consistency))
    return sum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True))


# --- reading -----------------------------------------------------------------------------------------------------


def read_cases(folder: Path, *, limit: int | None = None, skip_bad: bool = False) -> SetData:
    """Reads and checks the three files.

    Raises:
        ValueError: if cases do not fit together; it lists them, or with `skip_bad` leaves them out.
    """
    records, criteria, alignment = (_mapping(folder / name) for name in (CASES, CRITERIA, ALIGNMENT))
    cases, faults = [], dict[str, str]()
    for name, record in records.items():
        try:
            cases.append(_case(name, record, criteria.get(name), alignment.get(name)))
        except ValueError as error:
            faults[name] = f"{folder / CASES}, case {name}: {error}"
    refused = check_faults(faults, skip_bad=skip_bad)
    if not cases:
        raise ValueError(f"{folder / CASES} holds no cases")
    return SetData(tuple(evenly_spread(cases, limit)), refused, fingerprint([records, criteria, alignment]))


def _mapping(path: Path) -> dict[str, Any]:
    return read_object(path, fix="give the folder of ChengyouJia/T2IS-Bench as published")


def _case(name: str, record: Any, criteria: Any, alignment: Any) -> Case:
    if not isinstance(record, dict):
        raise ValueError(f"a case is an object, this is a {type(record).__name__}")
    captions, count = record.get("sub_caption"), record.get("output_image_count")
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
    """Of each dimension the first (and only) mapping of its list, as the released evaluation reads it."""
    if not isinstance(record, dict):
        raise ValueError(f"it has no criteria in {CRITERIA}")
    criteria: dict[str, dict[str, str]] = {}
    for dimension in CONSISTENT:
        mapping = record.get(dimension) or {}
        mapping = mapping[0] if isinstance(mapping, list) else mapping
        if not isinstance(mapping, dict):
            raise ValueError(f"{CRITERIA}: {dimension} must map names to texts, got {str(mapping)[:60]!r}")
        texts = {str(key): text for key, text in mapping.items() if isinstance(text, str) and text}
        criteria |= {dimension: texts} if texts else {}
    return criteria


def _alignment(record: Any, count: int) -> tuple[dict[str, tuple[str, ...]], ...]:
    images = list(record.values()) if isinstance(record, dict) else None
    if images is None or len(images) != count or not all(isinstance(texts, dict) for texts in images):
        raise ValueError(f"{ALIGNMENT} has {'no' if images is None else len(images)} entries for its {count} images")
    return tuple({name: tuple(texts.get(name) or ()) for name in ALIGNED} for texts in images)


# --- generating --------------------------------------------------------------------------------------------------


def prompts_by_case(path: Path) -> dict[str, Prompt]:
    """Case → prompt, from T2IS records that name the case they were written for as `original_idx`."""
    pairs = zip(read_jsonl(path), load_prompts(path), strict=True)
    prompts = {str(row["original_idx"]): prompt for row, prompt in pairs if row.get("original_idx")}
    if not prompts:
        raise ValueError(f"{path}: no record has an 'original_idx', which names the case of T2IS-Bench")
    return prompts


def prompt_of(options: T2isOptions) -> Callable[[Case], Prompt]:
    """What gives a case's prompt: its T2IS record if there are records, else instruction and captions composed."""
    from pacorl.generate.compose import prompt_from

    records = prompts_by_case(options.prompts) if options.prompts else {}

    def prompt(case: Case) -> Prompt:
        if records:
            if case.id not in records:
                raise ValueError(f"case {case.id} has no record among the --prompts")
            return records[case.id]
        composed = prompt_from(options.model, theme=case.instruction, panels=case.captions)
        side = options.panel_size
        return replace(composed, size=Size(composed.grid.rows * side, composed.grid.cols * side))

    return prompt


def set_jobs(cases: Sequence[Case], prompt_of: Callable[[Case], Prompt]) -> list[ImageJob]:
    """One grid image per case.

    Raises:
        ValueError: if a prompt's layout has another number of panels than the case.
    """
    jobs = []
    for case in cases:
        prompt = prompt_of(case)
        if prompt.grid.count != len(case.captions):
            raise ValueError(f"case {case.id} has {len(case.captions)} images, its prompt a {prompt.grid} layout")
        jobs.append(ImageJob(case.id, prompt, f"sheets/{case.id}.png"))
    return jobs


def generate_images(
    jobs: Sequence[ImageJob],
    out: Path,
    source: ImageSource,
    *,
    shard: Shard = Shard(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Generates the missing grid images into `sheets/` and cuts them into `images/`; returns how many those were."""

    def cut(job: ImageJob, image: Image) -> None:
        for number, panel in enumerate(split(image, job.prompt.grid), start=1):
            write_atomic(out / "images" / f"{job.key}_{number:04d}.png", png_bytes(panel))

    return generate_missing(jobs, out, source, shard=shard, save_panels=cut, progress=progress)


# --- scoring -----------------------------------------------------------------------------------------------------


class TextScorer(Protocol):
    """Says how well images show texts."""

    def settings(self) -> Mapping[str, Any]:
        """What the scores depend on."""

    def scores(self, asked: Sequence[tuple[Image, str]]) -> list[Score]:
        """One score per (image, text)."""


class JudgeTexts:
    """VQA-style: a judge's P(Yes) to VQAScore's question."""

    def __init__(self, judge: Judge, *, name: str) -> None:
        self.judge, self.name = judge, name

    def settings(self) -> Mapping[str, Any]:
        return {"alignment": f"judge {self.name}"}

    def scores(self, asked: Sequence[tuple[Image, str]]) -> list[Score]:
        verdicts = self.judge.verdicts([Question((image,), wordings.figure_shows(text)) for image, text in asked])
        return [Score(verdict.p_yes, verdict.error) for verdict in verdicts]


class RewardTexts:
    """Any reward of (text, image): a service of one's own (`http`), or CLIP."""

    def __init__(self, reward: Reward, *, name: str) -> None:
        self.reward, self.name = reward, name

    def settings(self) -> Mapping[str, Any]:
        return {"alignment": f"reward {self.name}"}

    def scores(self, asked: Sequence[tuple[Image, str]]) -> list[Score]:
        prompts = [_of_text(number, text) for number, (_, text) in enumerate(asked)]
        return [_score(value, self.name) for value in self.reward(prompts, [image for image, _ in asked])]


def _of_text(number: int, text: str) -> Prompt:
    return Prompt(id=number, text=text, theme=text, panels=(text,))


def _score(value: float | None, name: str) -> Score:
    return Score(value) if value is not None and isfinite(value) else Score(None, f"{name} gave no score")


@dataclass(frozen=True, slots=True)
class Aesthetics:
    """A reward of single images, and what brings it to the scale of 0 to 1 (LAION's predictor: .1)."""

    reward: Reward
    name: str
    scale: float = 1.0

    def settings(self) -> Mapping[str, Any]:
        return {"aesthetics": self.name, "aesthetics_scale": self.scale}

    def scores(self, case: Case, images: Sequence[Image]) -> list[Score]:
        values = self.reward([_of_text(i, text) for i, text in enumerate(case.captions)], images)
        found = [_score(value, self.name) for value in values]
        return [Score(None if one.value is None else one.value * self.scale, one.error) for one in found]


class T2isBench:
    """The benchmark over the images of a folder."""

    title = "T2IS-Bench"
    columns = ("Aesthetics", *ALIGNED, *CONSISTENT, "Average", *(f"{name}, all cases" for name in CONSISTENT))
    source = f"{PAPER}, Tab. 3"
    published = {f"{name} (judge: Qwen2.5-VL-7B)": values for name, values in T2IS.items()} | {
        f"{name} (judge: Gemma-3-4B)": (*T2IS[name][:4], *values) for name, values in T2IS_GEMMA.items()
    }
    digits = 3
    notes = (
        "Average = .2 · aesthetics + .3 · mean alignment + .5 · mean consistency. Consistency leaves out cases whose "
        "mean is 0, as the released evaluation does; “all cases” counts every case that has criteria in the dimension. "
        "Which aesthetics scorer the paper used is not known. Intervals are 95 %, bootstrapped over cases.",
    )

    def __init__(
        self,
        data: SetData,
        images: Path,
        *,
        judge: Judge,
        judge_name: str,
        alignment: TextScorer | None,
        aesthetics: Aesthetics | None = None,
        made_by: Mapping[str, Any],
    ) -> None:
        """images: the folder of `{case}_{number:04d}` images; made_by: what names them in the settings."""
        self.data, self.images, self.refused = data, images, data.refused
        self.judge, self.judge_name = judge, judge_name
        self.alignment, self.aesthetics, self.made_by = alignment, aesthetics, made_by
        self._cases = {case.id: case for case in data.cases}

    def settings(self) -> Mapping[str, Any]:
        scorers = [one.settings() for one in (self.alignment, self.aesthetics) if one]
        named = {"benchmark": "t2is", "data": self.data.fingerprint, "judge": self.judge_name}
        return named | {"pictures": dict(self.made_by)} | {key: value for one in scorers for key, value in one.items()}

    def keys(self) -> Sequence[str]:
        return list(self._cases)

    def texts(self) -> Mapping[str, Sequence[str]]:
        return {case.id: [case.instruction, *case.captions, id_text(case.id)] for case in self.data.cases}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        return [self._measure(self._cases[key]) for key in keys]

    def _measure(self, case: Case) -> Row:
        images = self._open(case)
        try:
            return {
                "key": case.id,
                "alignment": self._aligned(case, images),
                "consistency": self._consistent(case, images),
                "aesthetics": _scored(self.aesthetics.scores(case, images)) if self.aesthetics else [],
            }
        except _UnscoredError as fault:
            return {"key": case.id, "error": str(fault)}

    def _open(self, case: Case) -> list[Image]:
        cache = ImageCache(self.images)
        names = [f"{case.id}_{number:04d}" for number in range(1, len(case.captions) + 1)]
        return [cache.open(_file_of(self.images, name)) for name in names]

    def _aligned(self, case: Case, images: Sequence[Image]) -> list[dict[str, float]]:
        """Per picture: dimension → mean over its texts."""
        if self.alignment is None:
            return []
        texts = {
            (number, dimension, turn): (image, text)
            for number, (image, dimensions) in enumerate(zip(images, case.alignment, strict=True))
            for dimension, several in dimensions.items()
            for turn, text in enumerate(several)
        }
        shown = dict(zip(texts, _scored(self.alignment.scores(list(texts.values()))), strict=True))
        return [
            {
                dimension: fmean(shown[number, dimension, turn] for turn in range(len(several)))
                for dimension, several in dimensions.items()
                if several
            }
            for number, dimensions in enumerate(case.alignment)
        ]

    def _consistent(self, case: Case, images: Sequence[Image]) -> dict[str, float]:
        """Dimension → mean over criteria of the mean over pairs."""
        small = [image.resize((PAIR_SIDE, PAIR_SIDE)) for image in images]
        pairs = list(combinations(range(len(small)), 2))
        texts = by_criterion(case.criteria, wordings.meets_criterion_in_a_word)
        questions = {
            (criterion, (i, j)): Question((small[i], small[j]), text)
            for criterion, text in texts.items()
            for i, j in pairs
        }
        verdicts = ask(self.judge, questions)
        scores = _scored([Score(verdict.p_yes, verdict.error) for verdict in verdicts.values()])
        p_yes = dict(zip(verdicts, scores, strict=True))
        by_dimension: dict[str, list[float]] = {}
        for dimension, name in texts if pairs else ():
            mean = fmean(p_yes[(dimension, name), pair] for pair in pairs)
            by_dimension.setdefault(dimension, []).append(mean)
        return {dimension: fmean(means) for dimension, means in by_dimension.items()}

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        return bootstrap([row["key"] for row in rows], _statistic(rows))

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        by_category: dict[str, list[Row]] = {}
        for row in rows:
            by_category.setdefault(self._cases[row["key"]].category or "no category", []).append(row)
        lines = [Line(f"{name} ({len(rows)})", tuple(self.figures(rows))) for name, rows in sorted(by_category.items())]
        return [Table("By category", self.columns, tuple(lines))]


class _UnscoredError(Exception):
    """A question of a case stayed without an answer."""


def _scored(scores: Sequence[Score]) -> list[float]:
    for score in scores:
        if score.value is None:
            raise _UnscoredError(score.error or "no answer")
    return [score.value for score in scores if score.value is not None]


def _file_of(folder: Path, stem: str) -> str:
    """The image of that name, whatever its format.

    Raises:
        BadItemError: if there is none.
    """
    file = next((f"{stem}{suffix}" for suffix in IMAGE_TYPES if (folder / f"{stem}{suffix}").is_file()), None)
    if file is None:
        raise BadItemError(f"{folder / stem}.png is missing")
    return file


# --- figures -----------------------------------------------------------------------------------------------------


def _statistic(rows: Sequence[Row]) -> Callable[[Indices], Floats]:
    """Cases (by index, with repetition) → the columns of the table."""
    aesthetics = _sums([{"": value} for value in row["aesthetics"]] for row in rows)
    aligned = [_sums([_only(one, name) for one in row["alignment"]] for row in rows) for name in ALIGNED]
    case_KD = np.array([[row["consistency"].get(name, np.nan) for name in CONSISTENT] for row in rows])

    def statistic(chosen: Indices) -> Floats:
        aesthetic, *alignment = (_ratio(table[chosen]) for table in (aesthetics, *aligned))
        consistency = case_KD[chosen]
        # Leaving out 0 is how the released evaluation leaves out cases without criteria in a dimension.
        released = [_mean(column[column > 0]) for column in consistency.T]
        every = [_mean(column[~np.isnan(column)]) for column in consistency.T]
        overall = average(aesthetic, alignment, released)
        return np.array([aesthetic, *alignment, *released, overall, *every])

    return statistic


def _sums(cases: Iterator[Sequence[Mapping[str, float]]]) -> Floats:
    """(cases, 2): the sum over a case's images, and over how many."""
    return np.array([[sum(sum(one.values()) for one in case), sum(len(one) for one in case)] for case in cases])


def _only(held: Mapping[str, float], name: str) -> Mapping[str, float]:
    return {name: held[name]} if name in held else {}


def _ratio(table: NDArray[np.float64]) -> float:
    total, count = table.sum(0)
    return float(total / count) if count else float("nan")


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")


# --- the table's entry -------------------------------------------------------------------------------------------


def text_scorer(options: T2isOptions, reward: PacoReward) -> TextScorer | None:
    """Prompt alignment by the judge, by nobody, by a scorer at a URL, or by a reward."""
    kind, arguments = options.alignment, options.alignment_arg
    if kind == "none":
        return None
    if kind == "judge":
        return JudgeTexts(reward.judge, name=reward.name)
    if kind.startswith(("http://", "https://")):
        kind, arguments = "http", [f"url={kind}", *arguments]
    scorer, name = load_reward(kind, arguments)
    return RewardTexts(scorer, name=name)


def _aesthetics(options: T2isOptions) -> Aesthetics | None:
    if not options.aesthetics:
        return None
    return Aesthetics(*load_reward(options.aesthetics, options.aesthetics_arg), options.aesthetics_scale)


def _build(data: SetData, options: T2isOptions, reward: PacoReward, out: Path) -> T2isBench:
    return T2isBench(
        data,
        options.images or out / "images",
        judge=reward.judge,
        judge_name=reward.name,
        alignment=text_scorer(options, reward),
        aesthetics=_aesthetics(options),
        made_by=described(options, panel=options.panel_size),
    )


def _generate(data: SetData, options: T2isOptions, out: Path, shard: Shard, advance: Advance) -> None:
    source = image_source(options, edits=False, panel=options.panel_size)
    generate_images(set_jobs(data.cases, prompt_of(options)), out, source, shard=shard, progress=advance)


SPEC = BenchmarkSpec(
    summary="Generate sets, then measure alignment, consistency and aesthetics.",
    data="The folder of T2IS-Bench: its three JSON files.",
    options=T2isOptions,
    benchmark=T2isBench,
    read=lambda data, options: read_cases(data, limit=options.limit, skip_bad=options.skip_bad),
    build=_build,
    generate=_generate,
)
