"""ConsistencyRank: does a scorer rank sub-figures as people do? (arXiv 2512.04784, Tab. 2)

The published folder as it is (`records.consistency_rank`). Figures are means over items;
intervals draw whole folders, because the items of one folder share its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from pacorl.bench.benchmarks import BenchmarkOptions, BenchmarkSpec
from pacorl.bench.items import BadItemError, Dataset, ImageCache, by_key
from pacorl.bench.scorers import JudgePairs, PairScorer, RewardPairs, Wording, load_reward
from pacorl.bench.suite import Row, Table, Texts, grouped, paper_table
from pacorl.core.ranking import Interval, bootstrap, order_of, rank_agreement
from pacorl.io.documents import JsonObject
from pacorl.records.consistency_rank import IMAGES, RANKS, Ranked, load_ranked
from pacorl.records.prompts import evenly_spread

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward

REWARD_OF = {"clip-i": "panel_clip_image"}
"""The paper's scorer → our reward."""

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


def read_rank_data(folder: Path, *, limit: int | None = None) -> Dataset[Ranked]:
    """Read and check the folder. Raises ValueError naming the file and line of a fault."""
    items = by_key(load_ranked(folder), lambda item: item.key, source=folder / RANKS)
    # The limit comes last: the content covers the whole file, so that a limit may be raised.
    orders = [[key, item.best_first] for key, item in items.items()]
    return Dataset(dict(evenly_spread(list(items.items()), limit)), orders, folder)


@dataclass(eq=False)
class ConsistencyRank:
    """The benchmark over a scorer."""

    data: Dataset[Ranked]
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
        cache = ImageCache(self.data.folder / IMAGES)
        rows = []
        for item, scores in zip(items, self.scorer.scores(items, cache.open), strict=True):
            fault = next((score.error for score in scores if score.value is None and score.error), None)
            if fault:
                rows.append({"key": item.key, "error": fault})
                continue
            # The raw scores with the released evaluation's keys, so that other ties or measures need no second run.
            row: Row = {"key": item.key, "folder": item.folder, "ref_image": item.reference}
            row["comp_images"] = list(item.candidates)
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


def pair_scorer(options: BenchmarkOptions, reward: PacoReward | None) -> PairScorer:
    """Create the scorer: a judge, or a reward of pairs (`clip-i`, or any other)."""
    if reward:
        return JudgePairs(reward, cast("Wording", options.wording))
    name = REWARD_OF.get(options.scorer, options.scorer)
    return RewardPairs(load_reward(name), name)


SPEC = BenchmarkSpec(
    read=lambda data, options: read_rank_data(data, limit=options.limit),
    build=lambda data, options, reward, out: ConsistencyRank(data, pair_scorer(options, reward)),
    takes=("scorer", "wording"),
)
