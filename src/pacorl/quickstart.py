"""`pacorl quickstart`: judge, generator, RL and a page on the tiny world, from the committed checkpoints.

The judge rewards. The oracle reads the true attributes of every drawing; its grades are never rewarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

from PIL import Image, ImageOps

from pacorl.config import base as configs
from pacorl.core import questions
from pacorl.core.contrast import kappa
from pacorl.core.grid import join, parse_layout, split
from pacorl.core.ranking import Interval
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import SUMMARY, check_unfinished
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import JsonObject, read_jsonl, write_json
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.io.quiet import quiet_loading
from pacorl.judge import open_judge
from pacorl.judge.judge import Judge, close_judge
from pacorl.report.figures import interval_text
from pacorl.report.page import keep_page, write_report
from pacorl.report.results import paired
from pacorl.runtime.stopping import Interrupted
from pacorl.tiny.oracle import Majority, Oracle, agreement, evenness, grade, majority
from pacorl.tiny.words import asked_in
from pacorl.tiny.world import LOOKS, SCENES, draw, panels_of, theme_text, with_another
from pacorl.types import Grid, Prompt, Question


def run_quickstart(config: PolicyConfig, *, say: Callable[[str], None] = lambda line: None) -> tuple[Path, list[str]]:
    """Run the tiny recipe and grade it, or resume a stopped run.

    Args:
        config: the recipe.
        say: called with a line at the start of each stage.

    Returns:
        The page, and the lines of the verdict.

    Raises:
        ValueError: The folder holds a finished run, or files that no run wrote.
    """
    quiet_loading()  # the models load in less than a second
    out = config.out
    check_unfinished(out)
    if config.judge is None:
        raise configs.ConfigError("judge is none, and the quickstart measures how its judge answers; name one")

    # The judge is measured before it may reward anything.
    say("1 of 3: the judge answers held-out questions")
    judge = open_judge(config.judge, device="cpu")
    try:
        accuracy = pair_accuracy(judge)
    finally:
        close_judge(judge)
    say(f"it is right about {accuracy:.0%} of pairs")

    say(f"2 of 3: the generator is trained for {config.epochs} epochs, and evaluated before and after")
    try:
        PolicyTrainer(config, resume=True, extra_metrics=looks, listeners=[keep_page]).train()
    except Interrupted:
        raise Interrupted(f"stopped, and saved; go on with pacorl quickstart --out {out}") from None

    say("3 of 3: before and after are graded")
    write_atomic(out / "before-after.png", png_bytes(before_and_after(out)))
    summary = summarize(out, accuracy=accuracy)
    # The page reads the summary; a kill between the two leaves a finished run, and `pacorl report` writes its page.
    write_json(out / SUMMARY, summary)
    return write_report(out), summary["verdict"]


def summarize(out: Path, *, accuracy: float) -> JsonObject:
    """Grade the first and the last evaluation, with paired intervals over prompts; `accuracy` is the judge's."""
    evaluations = _evaluations(out)
    (before, first_seen), (after, last_seen) = grades(evaluations[0]), grades(evaluations[-1])
    tables: dict[str, JsonObject] = {"before": {}, "after": {}, "difference": {}}
    verdict = []
    for name, values in before.items():
        sides: tuple[Interval, ...] = paired(range(len(values)), values, after[name])
        for side, interval in zip(tables, sides, strict=True):
            tables[side][name] = interval.document()
        if name in VERDICT:
            change = interval_text(sides[2], signed=True)
            verdict.append(f"{VERDICT[name]}: {sides[0].mean:.2f} → {sides[1].mean:.2f}; {change}")

    # Diversity is a figure of all prompts together; a drop means one answer to everything.
    spread = [evenness(seen) for seen in (first_seen, last_seen)]
    for side, value in zip(tables, (*spread, spread[1] - spread[0]), strict=True):
        tables[side]["diversity"] = value
    facts = {"judge": {"pair_accuracy": accuracy}, "prompts": len(before["consistency"]), "verdict": verdict}
    return {"title": "pacorl quickstart", **tables, **facts}


def before_and_after(out: Path) -> Image.Image:
    """Join the first six evaluation images, before above and after below, without a choice by eye."""
    images = []
    for path in (_evaluations(out)[0], _evaluations(out)[-1]):
        for line in read_jsonl(path)[:6]:
            image = open_image(path.parent / line["image"])
            # Nearest: a blurred enlargement would hide faults of the tiny generator.
            large = image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST)
            images.append(ImageOps.expand(large, 4, "white"))
    return join(images, Grid(2, len(images) // 2))


def _evaluations(out: Path) -> list[Path]:
    return sorted((out / "samples").glob("evaluation-*.jsonl"))


# --- the tiny world --------------------------------------------------------------------------------------------------

VERDICT = {
    "attribute_agreement": "attributes that panels share",
    "all_equal_pairs": "pairs of panels that agree in all of them",
    "prompt_match": "attributes as the prompt asked",
}
"""Metric → its words in the verdict."""


def looks(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> dict[str, float]:
    """Grade an evaluation while training goes on: agreement within sets and across them, and the grades' means."""
    oracle = Oracle()
    sets = [oracle.read(split(image, prompt.grid)) for prompt, image in zip(prompts, images, strict=True)]
    graded = [grade(asked_in(prompt), shown) for prompt, shown in zip(prompts, sets, strict=True)]
    measured = {name: fmean([one[name] for one in graded]) for name in graded[0]}
    # No mean over looks, which would hide one that has collapsed.
    for name, (within, across) in agreement(sets).items():
        measured |= {f"within/{name}": within, f"across/{name}": across, f"kappa/{name}": kappa(within, across)}
    return measured


def grades(evaluation: Path) -> tuple[dict[str, list[float]], list[Majority]]:
    """Grade each image of an evaluation by the judge's P(Yes) and the oracle, and find each set's majority values."""
    oracle = Oracle()
    values: dict[str, list[float]] = {}
    majorities = []
    for line in read_jsonl(evaluation):
        prompt = Prompt(0, line["text"], grid=parse_layout(line["grid"]), panels=tuple(line["panels"]))
        seen = oracle.read(split(open_image(evaluation.parent / line["image"]), prompt.grid))
        p_yes = [value for row in line["p_yes"] for value in row if value is not None]
        measured = {"consistency": fmean(p_yes), **grade(asked_in(prompt), seen)}
        for name, value in measured.items():
            values.setdefault(name, []).append(value)
        majorities.append(majority(seen))
    return values, majorities


def pair_accuracy(judge: Judge, *, pairs: int = 200) -> float:
    """Measure the judge's accuracy on pairs of held-out heroes; a missing answer counts as No.

    Half of the pairs are equal, half have one look redrawn.
    """
    rng = Random(0)  # every run measures on the same questions
    pool = panels_of("test")
    posed = []
    for number in range(pairs):
        first = rng.choice(pool)
        size = rng.choice((32, 64))
        pose, prop = rng.choice(SCENES)
        second = replace(first, pose=pose, prop=prop)
        if number % 2:
            second = with_another(second, rng.choice(LOOKS), rng)
        text = questions.same_theme(f"2x2 grid layout of {theme_text(first.place)}.")
        posed.append(Question((draw(first, size), draw(second, size)), text))
    verdicts = enumerate(judge.verdicts(posed))
    return fmean([((verdict.p_yes or 0.0) > 0.5) == (number % 2 == 0) for number, verdict in verdicts])
