"""ConsistencyRank: does a scorer rank sub-figures as people do? (arXiv 2512.04784, Tab. 2)

The published folder as it is: `images/<folder>/<grid>_<panel>.png`, `prompt_data.jsonl`, and
`consistency_full_rank.jsonl` with a reference, its candidates and their order per line. Figures are means over items;
intervals draw whole folders, because the items of one folder share its images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pacorl.bench.benchmarks import BenchmarkOptions, BenchmarkSpec
from pacorl.bench.items import BadItemError, Dataset, ImageCache, named_texts, parse_records
from pacorl.bench.scorers import JudgePairs, PairScorer, Ranked, RewardPairs, ScoreFile, Wording, load_reward
from pacorl.bench.suite import Row, Table, Texts, grouped, paper_table
from pacorl.config.options import one_of, option
from pacorl.core.ranking import Interval, bootstrap, order_of, rank_agreement
from pacorl.io.documents import JsonObject, read_jsonl, read_keyed
from pacorl.io.files import inside
from pacorl.records.prompts import evenly_spread

if TYPE_CHECKING:
    from pacorl.judge.paco_reward import PacoReward

IMAGES = "images"
PROMPTS = "prompt_data.jsonl"
RANKS = "consistency_full_rank.jsonl"

REWARD_OF = {"clip-i": "panel_clip_image", "dreamsim": "dreamsim"}
"""The paper's scorers → our rewards."""

MEASURES = {
    "accuracy": "Accuracy",
    "order_tau": "Kendall τ (order lists)",
    "order_rho": "Spearman ρ (order lists)",
    "top1_bottom1": "T1B1",
    "rank_tau": "rank τ",
    "rank_rho": "rank ρ",
}
NOTE = (
    "τ and ρ of order lists are the released evaluation's: it correlates the lists of candidate numbers, best first. "
    "Rank τ and rank ρ correlate the candidates' ranks, as the statistics are defined. Intervals are 95 %, "
    "bootstrapped over folders."
)


@dataclass(frozen=True, kw_only=True)
class RankOptions(BenchmarkOptions):
    """Options of ConsistencyRank: the scorer, and a judge's question."""

    panel: ClassVar[str] = "Scorer"

    scorer: str = option("judge", "judge, clip-i, dreamsim, or any other reward of pairs.")
    scorer_arg: list[str] = option([], "name=value for that reward; may be repeated.")
    scores: Path | None = option(None, "A JSONL of scores instead of a scorer.")
    wording: Wording = option(
        "reasons", "The question to a judge: reasons, word, or criteria.", parse=one_of("reasons", "word", "criteria")
    )

    @property
    def needs_judge(self) -> bool:
        return self.scorer == "judge" and not self.scores

    @property
    def subject(self) -> str:
        return super().subject if self.needs_judge else str(self.scores or self.scorer)


def read_rank_data(folder: Path, *, limit: int | None = None, skip_bad: bool = False) -> Dataset[Ranked, Path]:
    """Read and check the folder: existing files, distinct candidates, orders that are permutations of the candidates.

    Raises:
        ValueError: with a list of the faulty items; with `skip_bad` they are in `refused` instead.
    """
    for name in (IMAGES, PROMPTS, RANKS):
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing; give the folder of ConsistencyRank-Bench as published")
    # Read and check every record, with its prompt's criteria.
    prompts = read_keyed(folder / PROMPTS, key="idx")

    def parse(row: JsonObject) -> Ranked:
        item = _item(row, prompts)
        # Missing files are reported now, not after hours of judging.
        for name in (item.reference, *item.candidates):
            if not inside(folder / IMAGES, name).is_file():
                raise ValueError(f"{folder / IMAGES / name} is missing")
        return item

    records = {}
    for number, row in enumerate(read_jsonl(folder / RANKS), 1):
        records[f"{folder / RANKS}, record {number}"] = (row,)
    items, refused = parse_records(records, parse, key=lambda item: item.key, skip_bad=skip_bad)
    if not items:
        raise ValueError(f"{folder / RANKS} holds no items")
    # The limit comes last: the content covers the whole file, so that a limit may be raised.
    orders = [[key, item.best_first] for key, item in items.items()]
    return Dataset(dict(evenly_spread(list(items.items()), limit)), refused, orders, folder)


def _item(row: JsonObject, prompts: Mapping[str, JsonObject]) -> Ranked:
    # The order.
    # Releases differ in the names of two columns.
    folder: Any = row.get("folder")
    reference: Any = row.get("ref_image", row.get("ref_img"))
    candidates: Any = row.get("comp_images", row.get("comparison_images"))
    order: Any = row.get("rank_images")
    are_texts = isinstance(folder, str) and isinstance(reference, str)
    if not are_texts or not _are_names(candidates) or not _are_names(order):
        raise ValueError(
            f"not a ranking: needs folder, ref_image, comp_images and rank_images, it has {', '.join(row) or 'nothing'}"
        )
    if len(set(candidates)) < len(candidates) or len(candidates) < 2:
        raise ValueError(f"needs two different candidates or more, got {candidates}")
    if sorted(order) != sorted(candidates):
        raise ValueError(f"rank_images {order} is no order of comp_images {candidates}")

    # The prompt.
    if folder not in prompts:
        raise ValueError(f"folder {folder!r} has no record in {PROMPTS}")
    prompt = prompts[folder]
    criteria = {}
    for dimension, texts in (prompt.get("criteria") or {}).items():
        criteria[str(dimension)] = named_texts(texts)

    return Ranked(
        # A reference is ranked several times, with other candidates each time.
        key=f"{folder}/{reference}: {' '.join(candidates)}",
        folder=folder,
        reference=f"{folder}/{reference}",
        candidates=tuple(f"{folder}/{name}" for name in candidates),
        best_first=tuple(f"{folder}/{name}" for name in order),
        category=str(row.get("category") or prompt.get("category") or ""),
        prompt=str(prompt.get("prompt") or ""),
        criteria=criteria,
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


@dataclass(eq=False)
class ConsistencyRank:
    """The benchmark over a scorer."""

    data: Dataset[Ranked, Path]
    scorer: PairScorer

    title = "ConsistencyRank"
    columns = tuple(MEASURES.values())
    paper = paper_table("consistency_rank")
    notes = (NOTE,)

    def settings(self) -> JsonObject:
        return {"benchmark": "consistency-rank", "data": self.data.fingerprint, **self.scorer.settings()}

    def texts(self) -> Texts:
        return {item.key: [item.prompt] for item in self.data.items.values()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        items = [self.data.items[key] for key in keys]
        cache = ImageCache(self.data.source / IMAGES)
        rows = []
        for item, scores in zip(items, self.scorer.scores(items, cache.open), strict=True):
            fault = next((score.error for score in scores if score.value is None and score.error), None)
            if fault:
                rows.append({"key": item.key, "error": fault})
                continue
            # The raw scores with the released evaluation's keys, so that other ties or measures need no second run.
            names = [Path(name).name for name in (item.reference, *item.candidates)]
            row: Row = {"key": item.key, "folder": item.folder, "ref_image": names[0], "comp_images": names[1:]}
            row["scores"] = [score.value for score in scores]
            rows.append(row)
        return rows

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        folders = []
        measures = []
        for row in rows:
            item = self.data.items[row["key"]]
            true = [item.candidates.index(name) for name in item.best_first]
            if len(row["scores"]) != len(true):
                raise BadItemError(f"{item.key}: {len(row['scores'])} scores are stored for {len(true)} candidates")
            agreement = rank_agreement(order_of(row["scores"]), true)
            measures.append([float(getattr(agreement, name)) for name in MEASURES])
            folders.append(item.folder)

        measure_NM = np.array(measures)
        return bootstrap(folders, lambda drawn: measure_NM[drawn].mean(0))

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        def category(row: Row) -> str:
            return self.data.items[row["key"]].category

        if not any(map(category, rows)):
            return []
        return grouped("By category", self.columns, rows, category, self.figures)


def pair_scorer(options: RankOptions, reward: PacoReward | None) -> PairScorer:
    """Create the scorer: a file of scores, a judge, or a reward of pairs (`clip-i`, `dreamsim`, any other)."""
    if options.scores:
        return ScoreFile(options.scores)
    if reward:
        return JudgePairs(reward, options.wording)
    return RewardPairs(*load_reward(REWARD_OF.get(options.scorer, options.scorer), options.scorer_arg))


SPEC = BenchmarkSpec(
    summary="Does a scorer rank sub-figures as people do?",
    data="The folder of ConsistencyRank-Bench.",
    options=RankOptions,
    read=lambda data, options: read_rank_data(data, limit=options.limit, skip_bad=options.skip_bad),
    build=lambda data, options, reward, out: ConsistencyRank(data, pair_scorer(options, reward)),
)
