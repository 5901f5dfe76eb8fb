"""`pacorl quickstart`: judge, generator, RL and a page on the tiny world, from the committed checkpoints.

The judge rewards. The oracle reads the true attributes of every drawing; its grades are never rewarded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from PIL import Image, ImageOps

from pacorl.config import base as configs
from pacorl.core import questions
from pacorl.core.grid import join, parse_layout, split
from pacorl.core.ranking import Interval
from pacorl.generate.generator import Generator
from pacorl.grpo.evaluate import noise_seed
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
from pacorl.tiny.generators import COLLAPSED
from pacorl.tiny.grading import jackknife, kappas, looks, names_no_look
from pacorl.tiny.oracle import Oracle, evenness, grade, majority
from pacorl.tiny.words import asked_in
from pacorl.tiny.world import LOOKS, SCENES, Panel, draw, panels_of, theme_text, with_another
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
    write_atomic(out / "before-after.png", png_bytes(before_and_after(config)))
    summary = summarize(out, accuracy=accuracy)
    # The page reads the summary; a kill between the two leaves a finished run, and `pacorl report` writes its page.
    write_json(out / SUMMARY, summary)
    return write_report(out), summary["verdict"]


def summarize(out: Path, *, accuracy: float) -> JsonObject:
    """Grade the first and the last evaluation, with paired intervals over prompts; `accuracy` is the judge's."""
    first, last = (grades(path) for path in _first_and_last(out))
    tables: dict[str, JsonObject] = {"before": {}, "after": {}, "difference": {}}
    verdict = []
    for name, values in first.values.items():
        sides: tuple[Interval, ...] = paired(range(len(values)), values, last.values[name])
        for side, interval in zip(tables, sides, strict=True):
            tables[side][name] = interval.document()
        if name in VERDICT:
            verdict.append(_line(name, sides[0].mean, sides[1].mean, sides[2]))

    # Figures of all prompts together. Diversity drops, and agreement across sets rises, if all sets become alike.
    spread = [evenness(list(map(majority, seen.free))) for seen in (first, last)]
    together = {"diversity": (spread[0], spread[1])}
    last_kappas = kappas(last.free)
    for name, value in kappas(first.free).items():
        together[name] = (value, last_kappas[name])
    for name, (before, after) in together.items():
        tables["before"][name] = before
        tables["after"][name] = after
        tables["difference"][name] = after - before
    for name in ("kappa", "across"):
        change = jackknife(first.free, last.free, name)
        tables["difference"][name] = change.document()
        before, after = together[name]
        verdict.append(_line(name, before, after, change))
    facts = {"judge": {"pair_accuracy": accuracy}, "prompts": len(first.values["consistency"]), "verdict": verdict}
    return {"title": "pacorl quickstart", **tables, **facts}


def _line(name: str, before: float, after: float, change: Interval) -> str:
    return f"{VERDICT[name]}: {before:.2f} → {after:.2f}; {interval_text(change, signed=True)}"


def before_and_after(config: PolicyConfig) -> Image.Image:
    """Join the same prompts and noise in three rows: before, trained by plain consistency, and after.

    The prompts are the first six that name no look. Plain consistency is the committed LoRA `collapsed`, trained by
    this recipe without contrast.
    """
    rows = []
    for path in _first_and_last(config.out):
        lines = [line for line in read_jsonl(path) if names_no_look(_prompt_of(line))][:6]
        rows.append([open_image(path.parent / line["image"]) for line in lines])
    # The prompts are the same in both.
    prompts = [_prompt_of(line) for line in lines]
    plain = Generator.from_pretrained("tiny", adapter=COLLAPSED)
    seeds = [noise_seed(config.seed, (prompt, 0)) for prompt in prompts]
    rows.insert(1, plain.sample(prompts, seeds, size=config.evaluation.size, steps=config.evaluation.steps))

    images = []
    for image in chain(*rows):
        # Nearest: a blurred enlargement would hide faults of the tiny generator.
        large = image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST)
        images.append(ImageOps.expand(large, 4, "white"))
    return join(images, Grid(len(rows), len(prompts)))


def _first_and_last(out: Path) -> tuple[Path, Path]:
    """Find the first and the last evaluation of a run."""
    evaluations = sorted((out / "samples").glob("evaluation-*.jsonl"))
    return evaluations[0], evaluations[-1]


def _prompt_of(line: JsonObject) -> Prompt:
    """Read the prompt of an evaluation's line."""
    return Prompt(line["prompt_id"], line["text"], grid=parse_layout(line["grid"]), panels=tuple(line["panels"]))


# --- the tiny world --------------------------------------------------------------------------------------------------

VERDICT = {
    "attribute_agreement": "attributes that panels share",
    "all_equal_pairs": "pairs of panels that agree in all of them",
    "prompt_match": "attributes as the prompt asked",
    "kappa": "agreement beyond that of other sets, κ",
    "across": "looks that panels of different sets share",
}
"""Metric → its words in the verdict."""


class Grades(NamedTuple):
    """An evaluation by the judge's P(Yes) and the oracle."""

    values: dict[str, list[float]]
    """Measure → its value of each set."""
    free: list[list[Panel | None]]
    """Panels of the sets whose theme names no look: a named one agrees across sets by chance of the theme."""


def grades(evaluation: Path) -> Grades:
    """Grade each image of an evaluation."""
    oracle = Oracle()
    values: dict[str, list[float]] = {}
    free = []
    for line in read_jsonl(evaluation):
        prompt = _prompt_of(line)
        shown = oracle.read(split(open_image(evaluation.parent / line["image"]), prompt.grid))
        p_yes = [value for row in line["p_yes"] for value in row if value is not None]
        for name, value in {"consistency": fmean(p_yes), **grade(asked_in(prompt), shown)}.items():
            values.setdefault(name, []).append(value)
        if names_no_look(prompt):
            free.append(shown)
    return Grades(values, free)


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
