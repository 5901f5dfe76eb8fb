"""How many labels the informative order saves: people of the tiny world rank through the annotation page's own store.

    python benchmarks/next_question.py                         # eight seeds, some 15 minutes of one core
    python benchmarks/next_question.py --judge-steps 0         # without judges, some 4
    python benchmarks/next_question.py --seeds 20 --json FILE

pairs     each reference has 3 candidates, every two of them are one question, and it is asked of one person
rankings  a dataset as `dataset pair` makes it: rankings of four candidates, each asked of three people

A person sees how much a candidate has in common with the reference, by TASTE, plus Gaussian noise of their own size.
Two accuracies are measured against the taste without noise, as the share of candidate pairs of one reference that are
put in the right order, among those that differ; a tie is wrong.

labels  of the pool itself, in the order of mean ranks (`votes`) or of scores
judge   of other characters: a judge learns from what is exported, and P(Yes) orders the candidates. Every judge is
        trained by the same number of steps from the committed one, on drawn images of the pool of pairs

today                the shuffled order, labels by votes
shuffled, scores     the shuffled order, labels by scores
informative, scores  the informative order, labels by scores
informative, prior   the same, with scores that begin at what the committed judge says (`dataset prior`)

The target is what `today` reaches with all labels, and the figure is the share of all labels from which it is reached.
It ends with 1 if the informative order, by scores, needs more than 60 % for the labels of either pool or the judge.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from pacorl.annotate.scoring import LiveScores
from pacorl.annotate.sharing import Sharing
from pacorl.annotate.store import Person, Store, public_key
from pacorl.config.judge_run import JudgeConfig
from pacorl.core.questions import consistent
from pacorl.core.ranking import Floats
from pacorl.data.characters import Panel, Split, character_prompts, draw, redrawn
from pacorl.dataset.export import export, label
from pacorl.dataset.prior import judge_pairs, read_prior
from pacorl.dataset.records import DATABASE, Answer, Instance, write_records
from pacorl.dataset.rules import mean_ranks
from pacorl.dataset.scores import Scores
from pacorl.io.quiet import quiet_loading
from pacorl.judges.judge import Judge
from pacorl.judges.local import TINY_JUDGE, LocalJudge
from pacorl.score.reward import PacoReward
from pacorl.train_judge.run import JudgeTrainer
from pacorl.types import TINY, Question

TASTE = {"palette": 1.0, "hat": 0.7, "shape": 0.5, "colour": 0.3}
"""The committed judge, which was taught other weights, orders .74 of the held-out pairs by it. With the colour first a
judge rose by .02 between 15 % and all of the shuffled order's labels, with the palette first by .12."""
PEOPLE = {"ann": 0.4, "ben": 0.8, "cat": 1.6}
"""Each person's noise, in units of TASTE; with half of it the rise was .04 in place of .08.

In the pool of pairs a judge that learns from all votes is right on .06 less than one that learns from votes without
noise: labels limit it. With 12 references of 6 candidates, whose pairs are each asked about five times, it was on .01
less: images limited it.
"""
PLANS = {"shuffled": ("shuffled", False), "informative": ("informative", False), "prior": ("informative", True)}
"""Who is asked what: the order of the questions, and whether scores begin at what the committed judge says."""
WAYS = {
    "today": ("shuffled", "votes"),
    "shuffled, scores": ("shuffled", "scores"),
    "informative, scores": ("informative", "scores"),
    "informative, prior": ("prior", "scores"),
}
"""Way → its plan, and what `dataset export` makes labels of."""
POINTS = 40
"""So many times on its way the labels' accuracy is measured."""
BUDGETS = (0.3, 0.6, 1.0)
"""Shares of the labels with which judges are trained."""
MOST = 0.6
HELD_OUT = (40, 8)
"""References of the development split and candidates of each, by which judges are measured."""
SIZE = 32
"""Pixels: what the tiny judge sees."""
Truth = dict[tuple[str, str], float]
Curves = dict[str, dict[float, float]]
"""Way → share of the labels → accuracy."""


@dataclass(frozen=True)
class Pool:
    """Questions, the panels that their images show, and how consistent each pair of images is."""

    questions: list[Instance]
    panels: dict[str, Panel]
    truth: Truth
    """(reference, candidate), both ways round."""
    judges: int

    @classmethod
    def of_pairs(
        cls, seed: int, *, references: int = 40, candidates: int = 3, split: Split = "train", chance: float = 0.45
    ) -> Pool:
        rng, questions, panels = random.Random(seed), list[Instance](), dict[str, Panel]()
        for number, prompt in enumerate(_sets(seed, references, split)):
            reference, *names = [f"images/{number}/{name}.png" for name in ("reference", *range(candidates))]
            panels[reference] = prompt[0]
            panels |= {name: redrawn(prompt[:1], chance=chance, rng=rng)[0] for name in names}
            for pair in combinations(names, 2):
                questions.append(Instance("+".join(pair), str(number), reference, pair))
        return cls(questions, panels, _truth(questions, panels), judges=1)

    @classmethod
    def of_rankings(cls, seed: int, *, prompts: int, grids: int = 4) -> Pool:
        rng, questions, panels = random.Random(seed), list[Instance](), dict[str, Panel]()
        for number, prompt in enumerate(_sets(seed, prompts)):
            for index in range(grids):
                grid = redrawn(prompt, chance=0.35, rng=rng)
                panels |= {f"images/{number}/{index}_{place}.png": panel for place, panel in enumerate(grid)}
            for place, other in ((p, q) for p in range(len(prompt)) for q in range(len(prompt)) if p != q):
                names = tuple(f"images/{number}/{index}_{other}.png" for index in range(grids))
                for index in range(grids):
                    reference = f"images/{number}/{index}_{place}.png"
                    questions.append(Instance(f"{reference}:{other}", str(number), reference, names))
        return cls(questions, panels, _truth(questions, panels), judges=len(PEOPLE))

    @property
    def labels(self) -> int:
        """How many there are to be given."""
        return len(self.questions) * self.judges

    def draw(self, folder: Path) -> None:
        for name, panel in self.panels.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            draw(panel, SIZE).save(folder / name)


def _sets(seed: int, count: int, split: Split = "train") -> list[list[Panel]]:
    prompts = random.Random(seed).sample(list(character_prompts(split, 150)), count)
    return [[Panel.parse(text) for text in prompt.panels] for prompt in prompts]


def _truth(questions: Sequence[Instance], panels: Mapping[str, Panel]) -> Truth:
    pairs = [(question.reference, name) for question in questions for name in question.candidates]
    truth = {(one, other): common(panels[one], panels[other]) for one, other in pairs}
    return truth | {(other, one): value for (one, other), value in truth.items()}


def common(first: Panel, second: Panel) -> float:
    return sum(weight for name, weight in TASTE.items() if getattr(first, name) == getattr(second, name))


# --- people who rank ---------------------------------------------------------------------------------------------


def annotate(pool: Pool, folder: Path, seed: int, *, order: str) -> Iterator[tuple[float, list[Answer]]]:
    """People rank the whole pool in an order: (share of the labels, the rankings so far), from none to all."""
    with Store(folder / DATABASE) as store:
        for name in PEOPLE:
            store.add_person(name)
        overlap = {"overlap": 1.0, "judges": pool.judges} if pool.judges > 1 else {"overlap": 0.0}
        store.share(pool.questions, Sharing(**overlap, controls=0, control_every=0, seed=seed, order=order))
        live, count = LiveScores(store, patience=0), 0
        yield 0.0, []
        counts = {round(pool.labels * point / POINTS) for point in range(1, POINTS + 1)}
        while count < pool.labels:
            for person in (Person(name, is_admin=False, expires=0) for name in PEOPLE):
                question = _next(store, live, person, order=order)
                if question is None:
                    continue
                answer(store, person, question, pool.truth, seed=seed)
                if (count := count + 1) in counts:
                    yield count / pool.labels, store.answers()


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


# --- the labels --------------------------------------------------------------------------------------------------


def votes(answers: Sequence[Answer]) -> Callable[[str, str], float]:
    """Minus the mean rank of a pair in all rankings that it is part of, from either side."""
    ranks: dict[frozenset[str], list[float]] = defaultdict(list)
    for one in answers:
        for name, rank in mean_ranks(one.tiers).items():
            ranks[frozenset((one.reference, name))].append(rank / len(one.candidates))
    mean = {pair: -float(np.mean(several)) for pair, several in ranks.items()}
    # Nothing is known of what nobody ranked: the middle.
    return lambda reference, name: mean.get(frozenset((reference, name)), -0.5)


def by_score(
    pool: Pool, answers: Sequence[Answer], p_yes: Mapping[tuple[str, str], float]
) -> Callable[[str, str], float]:
    scores = Scores(answers, questions=pool.questions, p_yes=p_yes)
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


# --- the judge ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lessons:
    """How judges are trained, and what they are measured on."""

    steps: int
    held_out: Pool

    def accuracy(self, judge: Judge) -> float:
        pairs = list(dict.fromkeys((one.reference, name) for one in self.held_out.questions for name in one.candidates))
        image = {name: draw(panel, SIZE) for name, panel in self.held_out.panels.items()}
        verdicts = judge.verdicts([Question((image[one], image[other]), consistent()) for one, other in pairs])
        p_yes = dict(zip(pairs, (verdict.p_yes for verdict in verdicts), strict=True))
        return accuracy(self.held_out, lambda reference, name: p_yes[reference, name])

    def train(self, folder: Path, *, labels: str, seed: int) -> float:
        """The accuracy of a judge that learned from the export of a folder's rankings."""
        if not label(folder, labels=labels, dry_run=True).pairs:
            return self.accuracy(LocalJudge.from_pretrained(TINY_JUDGE))
        with tempfile.TemporaryDirectory() as work:
            data, out = folder / "export", Path(work) / "run"
            export(folder, out=data, formats=["jsonl"], shares={"train": 1.0}, labels=labels)
            values = {
                "out": out,
                "seed": seed,
                "epochs": 10_000,
                "max_steps": self.steps,
                "save_every": self.steps,
                "trackers": [],
                "model": {"checkpoint": "tiny", "dtype": "float32", "gradient_checkpointing": False},
                "tuning": {"rank": 8, "alpha": 16},
                "loss": {"alpha": 0.9},  # paper: 0.1; so few steps must go to the decision
                "data": {"train": [str(data / "comparisons_train.jsonl")], "evaluation": [], "workers": 0},
                "optimizer": {"lr": 2e-3, "batch": 16, "micro_batch": 16},
            }
            JudgeTrainer(JudgeConfig.model_validate(values)).train()
            return self.accuracy(LocalJudge.from_pretrained(TINY_JUDGE, adapter=str(out / "adapter")))


# --- what each way needs -----------------------------------------------------------------------------------------


def measure(pool: Pool, seed: int, *, lessons: Lessons | None = None) -> dict[str, Any]:
    """One seed: the accuracies of labels, and of judges if there are lessons, on the way to all labels."""
    labelled: Curves = {way: {} for way in WAYS}
    judged: Curves = {way: {} for way in WAYS} if lessons else {}
    for plan, (order, has_prior) in PLANS.items():
        ways = {way: labels for way, (its_plan, labels) in WAYS.items() if its_plan == plan}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            pool.draw(folder)
            if has_prior:
                write_records(folder / "instances.jsonl", pool.questions)
                judge_pairs(folder, PacoReward.from_pretrained, name=TINY)
            p_yes = read_prior(folder)
            for share, given in annotate(pool, folder, seed, order=order):
                for way, labels in ways.items():
                    value = votes(given) if labels == "votes" else by_score(pool, given, p_yes)
                    labelled[way][share] = accuracy(pool, value)
                    if share == 1 and way == "informative, scores" and lessons:
                        judged[way][share] = judged["shuffled, scores"][share]  # the same rankings by then
                    elif lessons and share in BUDGETS:
                        judged[way][share] = lessons.train(folder, labels=labels, seed=seed)
    needed = {way: labels_for(labelled["today"][1.0], curve) for way, curve in labelled.items()}
    return {"seed": seed, "labels": labelled, "needed": needed, "judges": judged}


def labels_for(target: float, curve: Mapping[float, float]) -> float:
    """The share of labels from which the accuracy is the target's; all, if it never is.

    The curve is made to rise, by the mean of the highest before and the lowest after, since a single lucky point
    should not decide.
    """
    accuracies = list(curve.values())
    rising: Floats = np.maximum.accumulate(accuracies) / 2 + np.minimum.accumulate(accuracies[::-1])[::-1] / 2
    return float(np.interp(target, rising, list(curve)))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and Student's 95 % interval over the seeds."""
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    half = float(student.ppf(0.975, len(values) - 1)) * spread / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return mean, mean - half, mean + half


def judge_table(rows: Sequence[dict[str, Any]], *, start: float) -> dict[str, Any]:
    """For each way: the share of labels for the default's judge, its accuracies, and how far it is ahead at MOST.

    A judge's accuracy varies by some .05 with the pool, so shares are those of the mean curve, and their intervals are
    bootstrapped over seeds.
    """
    rng = np.random.default_rng(0)
    draws = [np.arange(len(rows)), *rng.integers(len(rows), size=(2000, len(rows)))]
    budgets = list(rows[0]["judges"]["today"])

    def mean(way: str, draw: Sequence[int]) -> dict[float, float]:
        judges = [rows[index]["judges"][way] for index in draw]
        return {0.0: start} | {share: float(np.mean([judge[share] for judge in judges])) for share in budgets}

    table = {}
    for way in WAYS:
        shares = [labels_for(mean("today", draw)[1.0], mean(way, draw)) for draw in draws]
        ahead = [row["judges"][way].get(MOST, np.nan) - row["judges"]["today"][1.0] for row in rows]
        table[way] = {
            "share": (shares[0], *np.percentile(shares[1:], [2.5, 97.5]).tolist()),
            "accuracies": mean(way, draws[0]),
            f"ahead of today at {MOST}": interval(ahead),
        }
    return table


def show(results: Mapping[str, Any], *, seeds: int) -> str:
    """The table: for each way, the share of labels for what `today` reaches with all, 95 % intervals over seeds."""
    lines = [f"share of all labels for what today reaches with all, {seeds} seeds:"]
    for title, shares in results["shares"].items():
        lines.append(f"  {title}")
        lines += [f"    {way:20} {mean:5.2f} [{low:.2f}, {high:.2f}]" for way, (mean, low, high) in shares.items()]
    for way, row in results.get("judge", {}).items():
        mean, low, high = row[f"ahead of today at {MOST}"]
        curve = " ".join(f"{accuracy:.3f}" for accuracy in row["accuracies"].values())
        lines.append(f"  judge, {way:20} {curve}; {mean:+.3f} [{low:+.3f}, {high:+.3f}] with {MOST:.0%} of the labels")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--references", type=int, default=40, help="of the pool of pairs")
    parser.add_argument("--prompts", type=int, default=1, help="of the pool of rankings")
    parser.add_argument("--judge-steps", type=int, default=40, help="of 16 pairs, for each judge; 0 for no judges")
    parser.add_argument("--json", type=Path, help="write curves and table")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    quiet_loading()
    references, candidates = HELD_OUT
    held_out = Pool.of_pairs(1, references=references, candidates=candidates, split="dev")
    lessons = Lessons(options.judge_steps, held_out) if options.judge_steps else None
    rows: dict[str, list[dict[str, Any]]] = {"pairs": [], "rankings": []}
    for seed in range(options.seeds):
        rows["pairs"].append(measure(Pool.of_pairs(seed, references=options.references), seed, lessons=lessons))
        print(json.dumps(rows["pairs"][-1]), file=sys.stderr)
    for seed in range(options.seeds):
        rows["rankings"].append(measure(Pool.of_rankings(seed, prompts=options.prompts), seed))
    shares = {
        f"labels of {kind}": {way: interval([row["needed"][way] for row in several]) for way in WAYS}
        for kind, several in rows.items()
    }
    results: dict[str, Any] = {"seeds": rows, "shares": shares}
    if lessons:
        start = lessons.accuracy(LocalJudge.from_pretrained(TINY_JUDGE))
        results |= {"start": start, "judge": judge_table(rows["pairs"], start=start)}
        shares["judge"] = {way: row["share"] for way, row in results["judge"].items()}
    print(show(results, seeds=options.seeds))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    raise SystemExit(int(max(ways["informative, scores"][0] for ways in shares.values()) > MOST))


if __name__ == "__main__":
    main()
