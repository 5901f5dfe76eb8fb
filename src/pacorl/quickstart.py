"""`pacorl quickstart`: judge, generator, RL and a page on the tiny world, from the committed checkpoints.

The judge rewards. The oracle reads the true attributes of every drawing; its grades are never rewarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pacorl.config import base as configs
from pacorl.core import questions
from pacorl.core.grid import parse_layout, split
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import SUMMARY, check_unfinished
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import JsonObject, read_jsonl, write_json
from pacorl.io.files import text_digest, write_atomic
from pacorl.io.images import images_in, open_image, png_bytes
from pacorl.io.quiet import quiet_loading
from pacorl.io.versions import versions
from pacorl.judge import open_judge
from pacorl.judge.judge import Judge, close_judge
from pacorl.report.page import keep_page, write_report
from pacorl.runtime.stopping import Interrupted
from pacorl.tiny import characters
from pacorl.tiny.characters import GRADES, Majority, Oracle, Panel
from pacorl.types import Prompt, Question

METRICS = ("consistency", *GRADES, "diversity")
BOOTSTRAP_DRAWS = 2000
VERDICT = {
    "attribute_agreement": "attributes that panels share",
    "all_equal_pairs": "pairs of panels that agree in all of them",
    "prompt_match": "attributes as the prompt asked",
}
"""Metric → its words in the verdict."""


def run_quickstart(config: PolicyConfig, *, say: Callable[[str], None] | None = None) -> tuple[Path, list[str]]:
    """Run the tiny recipe and grade it, or resume a stopped run.

    Args:
        config: the recipe.
        say: called with a line at the start of each stage; None for silence.

    Returns:
        The page, and a verdict of three lines.

    Raises:
        ValueError: The folder holds a finished run, or files that no run wrote.
    """
    say = say or (lambda line: None)
    quiet_loading()  # the models load in less than a second
    out = config.out
    check_unfinished(out)
    if config.judge is None:
        raise configs.ConfigError("judge is none, and the quickstart measures how its judge answers; name one")

    # The judge is measured before it may reward anything.
    say("1 of 3: the judge answers held-out questions")
    judge = open_judge(config.judge, device="cpu")
    try:
        accuracy = judge_accuracy(judge)
    finally:
        close_judge(judge)

    # The oracle's grades are metrics of each evaluation, and never rewards.
    oracle = Oracle()

    def grade(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> dict[str, float]:
        grades, sets = [], []
        for prompt, image in zip(prompts, images, strict=True):
            sets.append(oracle.read(split(image, prompt.grid)))
            grades.append(characters.grade([Panel.parse(text) for text in prompt.panels], sets[-1]))
        means = characters.agreement_of_looks(sets)
        for name in GRADES:
            means[name] = fmean([grade[name] for grade in grades])
        return means

    say(f"2 of 3: the generator is trained for {config.epochs} epochs, and evaluated before and after")
    try:
        PolicyTrainer(config, resume=True, extra_metrics=grade, listeners=[keep_page]).train()
    except Interrupted:
        raise Interrupted(f"stopped, and saved; go on with pacorl quickstart --out {out}") from None

    say("3 of 3: before and after are graded")
    summary = summarize(config, oracle, judge=accuracy)
    write_atomic(out / "before-after.png", png_bytes(before_and_after(out)))
    # The page reads the summary; a kill between the two leaves a finished run, and `pacorl report` writes its page.
    write_json(out / SUMMARY, summary)
    return write_report(out), summary["verdict"]


def before_and_after(out: Path) -> Image.Image:
    """Join the first evaluation images, before above and after below, without a choice by eye."""
    folders = sorted(path for path in (out / "samples").glob("evaluation-*") if path.is_dir())
    rows = []
    for folder in (folders[0], folders[-1]):
        rows.append([open_image(path) for path in images_in(folder)[:6]])

    side = 2 * rows[0][0].width
    gap = 8
    canvas = Image.new("RGB", (len(rows[0]) * (side + gap) - gap, len(rows) * (side + gap) - gap), "white")
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            # Nearest: a blurred enlargement would hide faults of the tiny generator.
            large = image.resize((side, side), Image.Resampling.NEAREST)
            canvas.paste(large, (column * (side + gap), row * (side + gap)))
    return canvas


def judge_accuracy(judge: Judge, *, pairs: int = 200, texts: int = 200) -> dict[str, float]:
    """Measure the judge's accuracy on held-out characters.

    Half of the pairs are equal, half have one thing redrawn; half of the texts are a panel's own, half have one of its
    six attributes changed.
    """
    # A fixed seed, so that every run measures on the same questions.
    rng = Random(0)
    pool = characters.panels_of("test")
    # The answers alternate between Yes, for even numbers, and No.
    posed = []
    for number in range(pairs):
        first = rng.choice(pool)
        second = characters.set_of(first.kept, 1, rng)[0]
        if number % 2:
            second = characters.redrawn_once(second, rng)
        size = rng.choice((32, 64))
        images = (characters.draw(first, size), characters.draw(second, size))
        posed.append(Question(images, questions.same_theme(f"2x2 grid layout of {first.subject}.")))
    # Texts, half of which describe another panel.
    for number in range(texts):
        shown = described = rng.choice(pool)
        if number % 2:
            described = characters.redrawn_once(shown, rng, names=tuple(characters.VALUES))
        image = characters.draw(shown, rng.choice((32, 64)))
        posed.append(Question((image,), questions.shows_text(described.text)))

    # A missing answer counts as No.
    verdicts = judge.verdicts(posed)
    accuracy = {"pairs": float(pairs), "texts": float(texts)}
    for kind, judged in {"pair": verdicts[:pairs], "text": verdicts[pairs:]}.items():
        right = []
        for number, verdict in enumerate(judged):
            says_yes = (verdict.p_yes or 0.0) > 0.5
            right.append(says_yes == (number % 2 == 0))
        if right:
            accuracy[f"{kind}_accuracy"] = fmean(right)
    return accuracy


# --- the summary -----------------------------------------------------------------------------------------------


def summarize(config: PolicyConfig, oracle: Oracle, *, judge: Mapping[str, float]) -> JsonObject:
    """Summarise before, after and their difference, with 95 % bootstrap intervals over prompts (docs/metrics.md)."""
    # The first evaluation and the last.
    evaluations = sorted((config.out / "samples").glob("evaluation-*.jsonl"))
    before = _read_evaluation(evaluations[0], oracle)
    after = _read_evaluation(evaluations[-1], oracle)
    count = len(before.majorities)
    # Paired: the same prompts are drawn on both sides, so that a prompt's difficulty cancels out.
    draws = np.random.default_rng(0).integers(0, count, (BOOTSTRAP_DRAWS, count))
    tables = {"before": _intervals(before, draws), "after": _intervals(after, draws)}

    def change(name: str, rows: NDArray[np.int64]) -> float:
        return after.mean(name, rows) - before.mean(name, rows)

    # Differences, and a verdict on the three that matter most.
    difference = {name: _interval(partial(change, name), draws) for name in METRICS}
    verdict = []
    for name, words in VERDICT.items():
        verdict.append(_verdict(words, tables["before"][name], tables["after"][name], difference[name]))

    libraries = ("pacorl", "torch", "diffusers", "transformers", "peft", "accelerate")
    return {
        "title": "pacorl quickstart",
        "judge": dict(judge),
        **tables,
        "difference": difference,
        "prompts": count,
        "seconds": _seconds(config.out),
        "versions": versions(libraries),
        "seed": config.seed,
        "config_hash": text_digest(configs.dump(config))[:12],
        "verdict": verdict,
    }


@dataclass(frozen=True, slots=True)
class Graded:
    """Grades of an evaluation: one value per image and metric, and each set's majority values."""

    values: dict[str, NDArray[np.float64]]
    majorities: list[Majority]

    def mean(self, name: str, rows: NDArray[np.int64]) -> float:
        """Compute the metric over some images."""
        if name == "diversity":
            return characters.evenness([self.majorities[row] for row in rows])
        return float(self.values[name][rows].mean())


def _read_evaluation(path: Path, oracle: Oracle) -> Graded:
    values: dict[str, list[float]] = {}
    majorities = []
    for line in read_jsonl(path):
        seen = oracle.read(split(open_image(path.parent / line["image"]), parse_layout(line["grid"])))
        p_yes = [value for value in chain(*line["p_yes"]) if value is not None]
        described = [Panel.parse(text) for text in line["panels"]]
        for name, value in {"consistency": fmean(p_yes), **characters.grade(described, seen)}.items():
            values.setdefault(name, []).append(value)
        majorities.append(characters.majority(seen))
    return Graded({name: np.array(column) for name, column in values.items()}, majorities)


def _intervals(graded: Graded, draws: NDArray[np.int64]) -> dict[str, dict[str, float]]:
    intervals = {}
    for name in METRICS:
        interval = _interval(partial(graded.mean, name), draws)
        # The correction of the bias may move an end out of 0..1.
        intervals[name] = {end: min(1.0, max(0.0, value)) for end, value in interval.items()}
    return intervals


def _interval(mean_of: Callable[[NDArray[np.int64]], float], draws: NDArray[np.int64]) -> dict[str, float]:
    """Return percentiles of the draws, corrected for their bias: repeated prompts always reduce the diversity."""
    mean = mean_of(np.arange(draws.shape[1]))
    drawn = [mean_of(rows) for rows in draws]
    low, high = np.quantile(drawn, [0.025, 0.975]) + mean - np.mean(drawn)
    return {"mean": round(mean, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def _seconds(out: Path) -> dict[str, float]:
    """Add up the seconds per phase over the whole run, resumed parts included."""
    total: dict[str, float] = {}
    for line in read_jsonl(out / "metrics.jsonl"):
        for name, seconds in line.items():
            # Hidden work ran during another phase and took no additional time.
            if name.startswith("seconds/") and not name.startswith("seconds/hidden"):
                phase = name.removeprefix("seconds/")
                total[phase] = round(total.get(phase, 0.0) + seconds, 2)
    return total


def _verdict(words: str, before: Mapping[str, float], after: Mapping[str, float], change: Mapping[str, float]) -> str:
    return (
        f"{words}: {before['mean']:.2f} → {after['mean']:.2f} "
        f"({change['mean']:+.2f}, 95 % interval {change['low']:+.2f} to {change['high']:+.2f})"
    )
