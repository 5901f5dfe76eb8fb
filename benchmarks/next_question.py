"""How many labels the informative order saves: people of the tiny world rank through the annotation page's own store.

    python benchmarks/next_question.py                         # three seeds, some ten minutes of one core
    python benchmarks/next_question.py --seeds 5 --json FILE

pairs     each reference has 12 candidates, every two of them are one question, and it is asked of one person
rankings  a dataset as `dataset pair` makes it: rankings of four candidates, each asked of three people

A person sees how much a candidate has in common with the reference, by TASTE, plus Gaussian noise of their own size.
The accuracy of a way of labelling is the share of candidate pairs that it puts in the right order, among those of one
reference that differ by TASTE; what it leaves tied is wrong.

today        the shuffled order, labels by votes: mean ranks, whoever ranked
scores       the shuffled order, labels by scores
informative  the informative order, labels by scores

For two targets it says which share of all labels each way needs: what `today` reaches with all of them, and what
`scores` does. People answer a question alike whenever it is asked, so `scores` and `informative` end alike. It ends
with 1 if the informative order needs more than 60 % of the labels for what `today` reaches with all.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from pacorl.annotate.scoring import LiveScores
from pacorl.annotate.sharing import Sharing
from pacorl.annotate.store import Person, Store, public_key
from pacorl.core.ranking import Floats
from pacorl.data.characters import Panel, character_prompts, redrawn
from pacorl.dataset.records import Answer, Instance
from pacorl.dataset.rules import mean_ranks
from pacorl.dataset.scores import Scores

TASTE = {"colour": 1.0, "shape": 0.7, "hat": 0.5, "palette": 0.3}
PEOPLE = {"ann": 0.2, "ben": 0.4, "cat": 0.8}
"""Each person's noise, in units of TASTE."""
WAYS = ("today", "scores", "informative")
POINTS = 40
"""So many times on its way the accuracy is measured."""
MOST = 0.6
Truth = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Pool:
    """Questions, and how consistent each pair of images is."""

    questions: list[Instance]
    truth: Truth
    """(reference, candidate), both ways round."""
    judges: int

    @classmethod
    def of_pairs(cls, seed: int, *, references: int, candidates: int = 12) -> Pool:
        rng, questions, truth = random.Random(seed), [], Truth()
        for number, panels in enumerate(_sets(seed, references)):
            names = [f"{number}/{index}" for index in range(candidates)]
            reference, *others = [panels[0], *(redrawn(panels[:1], chance=0.45, rng=rng)[0] for _ in names)]
            for name, panel in zip(names, others, strict=True):
                truth[f"{number}/r", name] = truth[name, f"{number}/r"] = common(reference, panel)
            for pair in combinations(names, 2):
                questions.append(Instance("+".join(pair), str(number), f"{number}/r", pair))
        return cls(questions, truth, judges=1)

    @classmethod
    def of_rankings(cls, seed: int, *, prompts: int, grids: int = 4) -> Pool:
        rng, questions, truth = random.Random(seed), [], Truth()
        for number, panels in enumerate(_sets(seed, prompts)):
            grid = [redrawn(panels, chance=0.35, rng=rng) for _ in range(grids)]
            for place, other in ((p, q) for p in range(len(panels)) for q in range(len(panels)) if p != q):
                names = tuple(f"{number}/{index}_{other}" for index in range(grids))
                for index in range(grids):
                    reference = f"{number}/{index}_{place}"
                    questions.append(Instance(f"{reference}:{other}", str(number), reference, names))
                    for name, row in zip(names, grid, strict=True):
                        truth[reference, name] = common(grid[index][place], row[other])
        return cls(questions, truth, judges=len(PEOPLE))


def _sets(seed: int, count: int) -> list[list[Panel]]:
    prompts = random.Random(seed).sample(list(character_prompts("train", 150)), count)
    return [[Panel.parse(text) for text in prompt.panels] for prompt in prompts]


def common(first: Panel, second: Panel) -> float:
    return sum(weight for name, weight in TASTE.items() if getattr(first, name) == getattr(second, name))


def curve(pool: Pool, seed: int, *, order: str) -> dict[str, list[float]]:
    """Labels and accuracies by votes and by scores, while people rank the whole pool in an order."""
    measured: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "annotations.db") as store:
        for name in PEOPLE:
            store.add_person(name)
        overlap = {"overlap": 1.0, "judges": pool.judges} if pool.judges > 1 else {"overlap": 0.0}
        store.share(pool.questions, Sharing(**overlap, controls=0, control_every=0, seed=seed, order=order))
        live, count, total = LiveScores(store, patience=0), 0, len(pool.questions) * pool.judges
        points = {round(total * point / POINTS) for point in range(1, POINTS + 1)}
        while count < total:
            for person in (Person(name, is_admin=False, expires=0) for name in PEOPLE):
                question = _next(store, live, person, order=order)
                if question is None:
                    continue
                answer(store, person, question, pool.truth, seed=seed)
                if (count := count + 1) in points:
                    given = store.answers()
                    measured["labels"].append(count / total)
                    measured["votes"].append(accuracy(pool, votes(given)))
                    measured["scores"].append(accuracy(pool, by_score(pool, given)))
    return measured


def _next(store: Store, live: LiveScores, person: Person, *, order: str) -> Instance | None:
    if order == "informative":
        return next(iter(live.following(person)), None)
    tasks = store.next_tasks(person.name)
    return tasks[0].instance if tasks else None


def answer(store: Store, person: Person, question: Instance, truth: Truth, *, seed: int) -> None:
    """The person's ranking: the same whenever the question is asked."""
    rng = random.Random(f"{seed} {person.name} {question.id}")
    seen = [truth[question.reference, name] + rng.gauss(0, PEOPLE[person.name]) for name in question.candidates]
    slots = store.task(person.name, question).slots
    order = sorted(range(len(slots)), key=lambda slot: -seen[slots[slot]])
    store.rank(person, public_key(question.id), order, request=f"{person.name}-{public_key(question.id)}")


def votes(answers: Sequence[Answer]) -> Callable[[str, str], float]:
    """Minus the mean rank of a pair in all rankings that it is part of, from either side."""
    ranks: dict[frozenset[str], list[float]] = defaultdict(list)
    for one in answers:
        for name, rank in mean_ranks(one.tiers).items():
            ranks[frozenset((one.reference, name))].append(rank / len(one.candidates))
    mean = {pair: -float(np.mean(several)) for pair, several in ranks.items()}
    # Nothing is known of what nobody ranked: the middle.
    return lambda reference, name: mean.get(frozenset((reference, name)), -0.5)


def by_score(pool: Pool, answers: Sequence[Answer]) -> Callable[[str, str], float]:
    scores = Scores(answers, questions=pool.questions)
    value = {frozenset(pair.images): pair.score for pair in scores.pairs()}
    return lambda reference, name: value[frozenset((reference, name))]


def accuracy(pool: Pool, value: Callable[[str, str], float]) -> float:
    right = []
    for question in pool.questions:
        for one, other in combinations(question.candidates, 2):
            true = pool.truth[question.reference, one] - pool.truth[question.reference, other]
            if abs(true) > 1e-9:
                right.append((value(question.reference, one) - value(question.reference, other)) * true > 0)
    return float(np.mean(right))


def labels_for(target: float, labels: Sequence[float], accuracies: Sequence[float]) -> float | None:
    """The share of labels from which the accuracy is the target's; None if it never is.

    The curve is made to rise, by the mean of the highest before and the lowest after, since a single lucky point
    should not decide.
    """
    rising: Floats = np.maximum.accumulate(accuracies) / 2 + np.minimum.accumulate(accuracies[::-1])[::-1] / 2
    if rising[-1] < target:
        return None
    return float(np.interp(target, [0.0, *rising], [0.0, *labels]))


def measure(pool: Pool, seed: int) -> dict[str, Any]:
    """One seed: both targets, and what each way needs for them."""
    shuffled, informative = (curve(pool, seed, order=order) for order in ("shuffled", "informative"))
    series = {"today": shuffled["votes"], "scores": shuffled["scores"], "informative": informative["scores"]}
    targets = {"today": series["today"][-1], "scores": series["scores"][-1]}
    needed = {
        target: {way: labels_for(reached, shuffled["labels"], series[way]) for way in WAYS}
        for target, reached in targets.items()
    }
    return {"seed": seed, "questions": len(pool.questions), "targets": targets, "needed": needed, "curves": series}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and Student's 95 % interval over the seeds."""
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    half = float(student.ppf(0.975, len(values) - 1)) * spread / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return mean, mean - half, mean + half


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each target: what each way needs on average, and the informative order's share of the shuffled one's."""
    table: dict[str, Any] = {}
    for target in ("today", "scores"):
        # A way that never gets there has needed all there were, and more: it counts as all.
        needed = {way: [row["needed"][target][way] or 1.0 for row in rows] for way in WAYS}
        ratio = [mine / other for mine, other in zip(needed["informative"], needed["scores"], strict=True)]
        table[target] = {way: interval(several) for way, several in needed.items()}
        table[target]["informative / scores"] = interval(ratio)
        table[target]["missed"] = sum(row["needed"][target]["informative"] is None for row in rows)
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--references", type=int, default=6, help="of the pool of pairs")
    parser.add_argument("--prompts", type=int, default=2, help="of the pool of rankings")
    parser.add_argument("--json", type=Path, help="write curves and table")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    pools: dict[str, Callable[[int], Pool]] = {
        "pairs": lambda seed: Pool.of_pairs(seed, references=options.references),
        "rankings": lambda seed: Pool.of_rankings(seed, prompts=options.prompts),
    }
    results = {}
    for kind, make in pools.items():
        rows = [measure(make(seed), seed) for seed in range(options.seeds)]
        results[kind] = {"summary": summary(rows), "seeds": rows}
        print(f"\n{kind}: {rows[0]['questions']} questions, {options.seeds} seeds")
        for target, table in results[kind]["summary"].items():
            reached = np.mean([row["targets"][target] for row in rows])
            print(f"  for the accuracy of `{target}` with all labels, {reached:.3f}, missed by {table['missed']}:")
            for way, (mean, low, high) in ((way, ends) for way, ends in table.items() if way != "missed"):
                print(f"    {way:21} {mean:5.2f} [{low:.2f}, {high:.2f}] of the labels", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    shares = [result["summary"]["today"]["informative"][0] for result in results.values()]
    raise SystemExit(int(max(shares) > MOST))


if __name__ == "__main__":
    main()
