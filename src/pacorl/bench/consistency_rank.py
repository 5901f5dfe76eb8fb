"""ConsistencyRank: does a judge rank sub-figures as people do? (arXiv 2512.04784, Tab. 2)

The published folder as it is (`records.consistency_rank`). Figures are means over items;
intervals draw whole folders, because the items of one folder share its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pacorl.bench.benchmarks import BenchmarkSpec
from pacorl.bench.items import Dataset, ImageCache
from pacorl.bench.suite import Row, Table, Texts, paper_table
from pacorl.core import questions as wordings
from pacorl.core.ranking import Interval, bootstrap, order_of, rank_agreement
from pacorl.io.documents import JsonObject
from pacorl.judge.pairwise import ask
from pacorl.records.consistency_rank import IMAGES, RANKS, Ranked, load_ranked
from pacorl.records.fields import by_key
from pacorl.types import Question

if TYPE_CHECKING:
    from pacorl.gate.paco_reward import PacoReward

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
    "Rank τ and rank ρ correlate the candidates' ranks, as the statistics are defined."
)


def read_rank_data(folder: Path, *, limit: int | None = None) -> Dataset[Ranked]:
    """Read and check the folder. Raises ValueError naming the file and line of a fault."""
    items = by_key(load_ranked(folder), lambda item: item.key, source=folder / RANKS)
    orders = [[key, item.rank_images] for key, item in items.items()]
    return Dataset.selected(items, content=orders, source=folder / RANKS, limit=limit)


@dataclass(eq=False)
class ConsistencyRank:
    """The benchmark over a judge, whose score is P(Yes) about (reference, candidate), in this order."""

    data: Dataset[Ranked]
    judge: PacoReward

    table = Table("ConsistencyRank", tuple(MEASURES.values()), notes=(NOTE,), resampled="folders")
    paper = paper_table("consistency_rank")

    def settings(self) -> JsonObject:
        return {"benchmark": "consistency-rank", "data": self.data.fingerprint, "judge": self.judge.name}

    def texts(self) -> Texts:
        return {item.key: [item.prompt] for item in self.data.items.values()}

    def measure(self, keys: Sequence[str]) -> list[Row]:
        # All questions in one call. The reference first, as in the released evaluation: answers depend on the order.
        cache = ImageCache(self.data.folder / IMAGES)
        questions = {}
        for key in keys:
            item = self.data.items[key]
            reference = cache.open(f"{item.folder}/{item.ref_image}")
            for name in item.comp_images:
                pair = (reference, cache.open(f"{item.folder}/{name}"))
                questions[key, name] = Question(pair, wordings.consistent())
        answers = ask(self.judge.judge, questions)

        rows: list[Row] = []
        for key in keys:
            item = self.data.items[key]
            verdicts = [answers[key, name] for name in item.comp_images]
            fault = next((verdict.error for verdict in verdicts if verdict.p_yes is None), None)
            if fault is not None:
                rows.append({"key": key, "error": fault})
                continue
            # The raw scores with the released evaluation's keys, so that other ties or measures need no second run.
            row: Row = {"key": key, "folder": item.folder, "ref_image": item.ref_image, "comp_images": item.comp_images}
            rows.append(row | {"scores": [verdict.p_yes for verdict in verdicts]})
        return rows

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        folders = []
        measures = []
        for row in rows:
            item = self.data.items[row["key"]]
            true = [item.comp_images.index(name) for name in item.rank_images]
            if len(row["scores"]) != len(true):
                raise ValueError(f"{item.key}: {len(row['scores'])} scores are stored for {len(true)} candidates")
            agreement = rank_agreement(order_of(row["scores"]), true)
            measures.append([agreement[name] for name in MEASURES])
            folders.append(item.folder)

        measure_NM = np.array(measures)
        return bootstrap(folders, lambda drawn: measure_NM[drawn].mean(0))


SPEC = BenchmarkSpec(
    read=lambda data, options: read_rank_data(data, limit=options.limit),
    build=lambda data, options, reward, out: ConsistencyRank(data, reward),
)
