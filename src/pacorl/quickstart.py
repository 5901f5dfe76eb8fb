"""`pacorl quickstart`: RL of a generator by a judge, and a page on the tiny world, from the committed checkpoints.

The judge rewards. The oracle reads the true attributes of every drawing; its grades are never rewarded.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from PIL import Image, ImageOps

from pacorl.core.grid import join, panel_texts, split
from pacorl.core.ranking import Interval
from pacorl.generate.generator import Generator
from pacorl.grpo.evaluate import noise_seed
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.start import SUMMARY, check_unfinished
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.documents import JsonObject, write_json
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.io.quiet import quiet_loading
from pacorl.report.folder import CONSISTENCY, Sample, read_run
from pacorl.report.page import keep_page, write_report
from pacorl.report.results import Change, paired
from pacorl.runtime.stopping import Interrupted
from pacorl.tiny.generators import COLLAPSED
from pacorl.tiny.grading import jackknife, looks, names_no_look, of_all_sets
from pacorl.tiny.oracle import grade, read_panels
from pacorl.tiny.words import asked_in
from pacorl.tiny.world import Panel
from pacorl.types import Grid, Prompt


def run_quickstart(config: PolicyConfig, *, say: Callable[[str], None]) -> tuple[Path, list[str]]:
    """Run the tiny recipe and grade it, or resume a stopped run.

    Args:
        say: called with a line at the start of each stage.

    Returns:
        The page, and the lines of the verdict.

    Raises:
        ValueError: The folder holds a finished run, or files that no run wrote.
    """
    quiet_loading()  # the models load in less than a second
    out = config.out
    check_unfinished(out)

    say(f"1 of 2: the generator is trained for {config.epochs} epochs, and evaluated before and after")
    try:
        PolicyTrainer(config, resume=True, extra_metrics=looks, listeners=[keep_page]).train()
    except Interrupted:
        raise Interrupted(f"stopped, and saved; go on with pacorl quickstart out={out}") from None

    say("2 of 2: before and after are graded")
    write_atomic(out / "before-after.png", png_bytes(before_and_after(config)))
    summary = summarize(out)
    # The page reads the summary; a kill between the two leaves a finished run, and `pacorl report` writes its page.
    write_json(out / SUMMARY, summary)
    return write_report(out), summary["verdict"]


VERDICT = {
    "attribute_agreement": "attributes that panels share",
    "all_equal_pairs": "pairs of panels that agree in all of them",
    "prompt_match": "attributes as the prompt asked",
    "kappa": "agreement beyond that of other sets, κ",
    "across": "looks that panels of different sets share",
}
"""Metric → its words in the verdict."""


def summarize(out: Path) -> JsonObject:
    """Grade the first and the last evaluation, with paired intervals over prompts."""
    # Grades of each set, and the panels of sets whose prompt names no look.
    values: list[dict[str, list[float]]] = []
    free: list[list[list[Panel | None]]] = []
    evaluations = list(read_run(out).samples.values())
    for samples in (evaluations[0], evaluations[-1]):
        of_sets, shown = grades(samples)
        values.append(of_sets)
        free.append(shown)

    # Before, after and difference: of each set, then of all together.
    figures: dict[str, Change] = {}
    for name, before in values[0].items():
        figures[name] = paired(range(len(before)), before, values[1][name])
    together = list(map(of_all_sets, free))
    for name, first in together[0].items():
        figures[name] = (Interval(first), Interval(together[1][name]), jackknife(free[0], free[1], name))

    # The tables of the report, and its verdict.
    tables = {}
    for column, side in enumerate(("before", "after", "difference")):
        tables[side] = {name: intervals[column].document() for name, intervals in figures.items()}
    verdict = []
    for name, words in VERDICT.items():
        start, end, change = figures[name]
        verdict.append(f"{words}: {start.mean:.2f} → {end.mean:.2f}; {change.text(signed=True)}")
    verdict.append("an oracle of the tiny world read these looks and attributes; it is never rewarded")
    return {"title": "pacorl quickstart", **tables, "verdict": verdict}


def grades(samples: Sequence[Sample]) -> tuple[dict[str, list[float]], list[list[Panel | None]]]:
    """Grade each image of an evaluation by the judge's P(Yes) and the oracle.

    Returns:
        Measure → its value of each set, and the panels of the sets whose theme names no look: a named one agrees across
        sets by chance of the theme.
    """
    values: dict[str, list[float]] = {}
    free = []
    for sample in samples:
        prompt = _prompt_of(sample)
        shown = read_panels(split(open_image(sample.image), prompt.grid))
        p_yes = sample.measures[CONSISTENCY]
        for name, value in {CONSISTENCY: p_yes, **grade(asked_in(prompt), shown)}.items():
            values.setdefault(name, []).append(value)
        if names_no_look(prompt):
            free.append(shown)
    return values, free


def before_and_after(config: PolicyConfig) -> Image.Image:
    """Join the same prompts and noise in three rows: before, trained by plain consistency, and after.

    The prompts are the first six that name no look. Plain consistency is the committed LoRA `collapsed`, trained
    without contrast.
    """
    rows = []
    evaluations = list(read_run(config.out).samples.values())
    for samples in (evaluations[0], evaluations[-1]):
        free = [sample for sample in samples if names_no_look(_prompt_of(sample))][:6]
        rows.append([open_image(sample.image) for sample in free])
    prompts = [_prompt_of(sample) for sample in free]  # the same in both
    plain = Generator.from_pretrained("tiny", adapter=COLLAPSED)
    seeds = [noise_seed(config.seed, (prompt, 0)) for prompt in prompts]
    rows.insert(1, plain.sample(prompts, seeds, size=config.evaluation.size, steps=config.evaluation.steps))

    images = []
    for image in chain(*rows):
        # Nearest: a blurred enlargement would hide faults of the tiny generator.
        large = ImageOps.scale(image, 3, Image.Resampling.NEAREST)
        images.append(ImageOps.expand(large, 4, "white"))
    return join(images, Grid(len(rows), len(prompts)))


def _prompt_of(sample: Sample) -> Prompt:
    return Prompt(sample.prompt_id, sample.text, grid=sample.grid, panels=panel_texts(sample.text))
