"""ConsistencyRank: does a judge rank sub-figures as people do? (arXiv 2512.04784, Tab. 2)

The published folder as it is (`records.consistency_rank`). Figures are means over items;
intervals draw whole folders, whose items share images, or an export's families of folders that share images or themes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pacorl.bench.suite import INTERVALS, Benchmark, ImageCache, Row, Table, Texts, paper_table
from pacorl.core import questions as wordings
from pacorl.core.ranking import Interval, bootstrap, order_of, rank_agreement
from pacorl.judge.judge import Judge
from pacorl.records.consistency_rank import IMAGES, RANKS, Ranked, load_ranked
from pacorl.types import Question

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


class ConsistencyRank(Benchmark[Ranked]):
    """The benchmark over a judge, whose score is P(Yes) about (reference, candidate), in this order."""

    name = "consistency-rank"
    table = Table("ConsistencyRank", tuple(MEASURES.values()), (NOTE, INTERVALS.format("folders or families")))
    paper = paper_table("consistency_rank")

    def read(self, source: Path) -> tuple[Path, list[Ranked]]:
        return source / RANKS, load_ranked(source)

    @property
    def images(self) -> Path:
        return self.folder / IMAGES

    def texts(self) -> Texts:
        return {key: [item.prompt] for key, item in self.items.items()}

    def questions(self, key: str, images: ImageCache, judge: Judge) -> dict[str, Question]:
        # The reference first, as in the released evaluation: answers depend on the order.
        item = self.items[key]
        reference = images.open(f"{item.folder}/{item.ref_image}")
        questions = {}
        for name in item.comp_images:
            questions[name] = Question((reference, images.open(f"{item.folder}/{name}")), wordings.consistent())
        return questions

    def score(self, key: str, p_yes: Mapping[str, float], images: ImageCache) -> Row:
        # The raw scores with the released evaluation's keys, so that other ties or measures need no second run.
        item = self.items[key]
        return {
            "folder": item.folder,
            "ref_image": item.ref_image,
            "comp_images": item.comp_images,
            "scores": list(p_yes.values()),
        }

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        groups = []
        measures = []
        for row in rows:
            item = self.items[row["key"]]
            true = [item.comp_images.index(name) for name in item.rank_images]
            agreement = rank_agreement(order_of(row["scores"]), true)
            measures.append([agreement[name] for name in MEASURES])
            groups.append(item.family or item.folder)

        measure_NM = np.array(measures)
        return bootstrap(groups, lambda drawn: measure_NM[drawn].mean(0))
