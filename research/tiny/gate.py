"""The gate's errors by the number of panels: false alarms, misses and the price in questions, on the tiny world.

    nice python -m research.tiny.gate --out gate.json  # about 6 CPU minutes, one process
    pacorl check PANELS… --character hero --calibration gate.json

Curves and thresholds come from characters of the split `dev`, the table from those of `test`. A sound set shows one
character in n scenes; every panel has noise or JPEG's artefacts. A broken set has one wrong panel: an attribute of the
world has another value, or one that no training image had (a colour, a hat, a size, a missing hat), or the panel has a
generator's artefact (the hero erased in part, smeared, doubled). Every panel is compared with one reference image: n
questions. For up to 16 panels, all pairs are asked as well. Scores are cached per pair of images, and sets of one
character draw their panels from one pool, so that the sets of a character are not independent.

The threshold of n panels minimizes, on sets of `dev`, the larger of false alarms and misses, each over its goal.
`3 references` is the median over three reference images: 3n questions. The file holds the thresholds of one.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter

from pacorl.core.calibration import fit_curve, logits
from pacorl.core.questions import consistent
from pacorl.gate.check import panel_scores
from pacorl.gate.scores import PairScore, Scores, questions_about
from pacorl.io.files import check_new
from pacorl.io.quiet import quiet_loading
from pacorl.judge.calibration import Calibration, Mode
from pacorl.judge.local import LocalJudge
from pacorl.tiny.characters import COLOURS, KEPT, SCENES, Panel, Split, draw, panels_of, redrawn_once
from pacorl.types import Question

SIZES = (4, 8, 16, 32, 64)
MODES: tuple[tuple[Mode, tuple[int, ...], tuple[int, ...]], ...] = (
    ("references", SIZES, (1, 3)),
    ("panels", (4, 8, 16), (1,)),
)
"""Mode, numbers of panels, numbers of reference images."""
SIDE = 64
CHARACTERS = 48  # all of a split: with a few, one hard character decides about many sets
"""Characters of each split."""
VARIANTS = 4
"""Images of one scene, each with an artefact that keeps it sound."""
WRONG = 12
"""Wrong panels of each character and fault."""
REFERENCES = 3
"""Reference images of a character."""
GOAL_FALSE_ALARMS = 0.07
GOAL_MISSES = 0.05

Edit = Callable[[Image.Image, random.Random], Image.Image]


# --- images ------------------------------------------------------------------------------------------------------


def noisy(image: Image.Image, rng: random.Random) -> Image.Image:
    """Add noise with a standard deviation of 1 to 6 of 255."""
    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, rng.uniform(1, 6), (SIDE, SIDE, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def compressed(image: Image.Image, rng: random.Random) -> Image.Image:
    """Compress as JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=rng.randint(70, 95))
    return Image.open(file).convert("RGB")


def recoloured(image: Image.Image, rng: random.Random, *, colour: tuple[int, int, int]) -> Image.Image:
    """Paint the hero's body in a colour that the world does not have."""
    pixels = np.asarray(image).astype(int)
    body = np.abs(pixels - np.array(colour)).max(axis=-1) < 40
    paint = np.array(rng.choice([(255, 140, 0), (255, 90, 190), (120, 70, 30), (70, 220, 220)]))
    return Image.fromarray(np.where(body[..., None], paint, pixels).astype(np.uint8))


def patched(image: Image.Image, rng: random.Random) -> Image.Image:
    """Erase a part of the hero with the sky's colour."""
    image = image.copy()
    x = rng.randint(10, 26)
    y = rng.randint(22, 36)
    sky = image.getpixel((40, 4))
    ImageDraw.Draw(image).rectangle((x, y, x + 18, y + 18), fill=sky)
    return image


def hatless(image: Image.Image, rng: random.Random) -> Image.Image:
    """Remove the hat: the top of the hero becomes sky."""
    image = image.copy()
    ImageDraw.Draw(image).rectangle((6, 0, 42, 23), fill=image.getpixel((50, 4)))
    return image


def smeared(image: Image.Image, rng: random.Random) -> Image.Image:
    """Blur the hero's half beyond recognition."""
    blurred = image.filter(ImageFilter.GaussianBlur(rng.uniform(5, 8)))
    image = image.copy()
    image.paste(blurred.crop((0, 0, 44, SIDE)), (0, 0))
    return image


def enlarged(image: Image.Image, rng: random.Random) -> Image.Image:
    """Enlarge the hero by a half."""
    image = image.copy()
    hero = image.crop((6, 8, 42, 60)).resize((54, 78), Image.Resampling.BICUBIC)
    image.paste(hero.crop((0, 14, 54, 78)), (0, 0))
    return image


def doubled(image: Image.Image, rng: random.Random) -> Image.Image:
    """Put a second hero beside the first."""
    image = image.copy()
    image.paste(image.crop((6, 6, 36, 62)), (34, 6))
    return image


SOUND: tuple[Edit, ...] = (noisy, compressed)
FAULTS = (*KEPT, "recoloured", "hatless", "enlarged", "patched", "smeared", "doubled")


def wrong_panel(panel: Panel, fault: str, rng: random.Random) -> Image.Image:
    """Draw a panel with one fault."""
    if fault in KEPT:
        return rng.choice(SOUND)(draw(redrawn_once(panel, rng, names=[fault]), SIDE), rng)
    edits: dict[str, Edit] = {
        "recoloured": partial(recoloured, colour=COLOURS[panel.colour]),
        "hatless": hatless,
        "enlarged": enlarged,
        "patched": patched,
        "smeared": smeared,
        "doubled": doubled,
    }
    return edits[fault](draw(panel, SIDE), rng)


@dataclass(frozen=True)
class Pool:
    """Images of one character."""

    name: str
    references: list[Image.Image]
    sound: list[Image.Image]
    wrong: list[tuple[str, Image.Image]]


def pools(split: Split, count: int, rng: random.Random, *, variants: int) -> list[Pool]:
    """Draw the images of some characters of a split."""
    subjects = rng.sample(sorted({panel.kept for panel in panels_of(split)}), count)
    drawn = []
    for subject in subjects:
        scenes = [Panel(*subject, *scene) for scene in SCENES]
        sound = []
        for scene in scenes:
            sound += [rng.choice(SOUND)(draw(scene, SIDE), rng) for _ in range(variants)]
        wrong = []
        for fault in FAULTS:
            wrong += [(fault, wrong_panel(rng.choice(scenes), fault, rng)) for _ in range(WRONG)]
        references = [draw(scene, SIDE) for scene in rng.sample(scenes, REFERENCES)]
        drawn.append(Pool(scenes[0].subject, references, sound, wrong))
    return drawn


# --- sets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A set before it is judged."""

    references: list[Image.Image]
    panels: list[Image.Image]
    fault: str
    """Empty for a sound set."""

    def pairs(self, mode: Mode) -> list[tuple[Image.Image, Image.Image]]:
        """List the pairs that the gate asks about."""
        if mode == "references":
            return list(product(self.references, self.panels))
        return list(combinations(self.panels, 2))

    def lowest(self, mode: Mode, p_of: Callable[[Image.Image, Image.Image], float | None]) -> float:
        """Score the lowest panel, by the rule of `pacorl.gate.check`."""
        references = range(len(self.references) if mode == "references" else 0)
        images = [*self.references, *self.panels] if references else self.panels
        panels = range(len(references), len(images))

        pairs = []
        for first, second in product(references, panels) if references else combinations(panels, 2):
            p_yes = p_of(images[first], images[second])
            pairs.append(PairScore(first, second, (p_yes,)))
        names = tuple(map(str, range(len(images))))
        scores = Scores(names, tuple(images), questions_about(), tuple(pairs))
        judged = panel_scores(scores, [references] if references else [])
        return min(panel.score for panel in judged if panel.score is not None)


def sets_of(
    drawn: Sequence[Pool], panels: int, count: int, rng: random.Random, *, references: int = 1
) -> Iterator[Drawn]:
    """Draw `count` sound sets, then `count` broken sets, whose faults take turns."""
    for number in range(2 * count):
        pool = rng.choice(drawn)
        chosen = rng.sample(pool.sound, panels)
        fault = ""
        if number >= count:
            fault = FAULTS[number % len(FAULTS)]
            chosen[rng.randrange(panels)] = rng.choice([image for name, image in pool.wrong if name == fault])
        yield Drawn(rng.sample(pool.references, references), chosen, fault)


class Cached:
    """A judge's P(Yes) of pairs, each pair asked once."""

    def __init__(self, judge: LocalJudge) -> None:
        self.judge = judge
        self.p_of: dict[tuple[int, int], float | None] = {}

    def ask(self, pairs: Sequence[tuple[Image.Image, Image.Image]]) -> None:
        """Ask about the new pairs."""
        new = {(id(a), id(b)): (a, b) for a, b in pairs if (id(a), id(b)) not in self.p_of}
        items = sorted(new.items())
        for start in range(0, len(items), 2000):
            part = items[start : start + 2000]
            verdicts = self.judge.verdicts([Question(pair, consistent()) for _, pair in part])
            for (key, _), verdict in zip(part, verdicts, strict=True):
                self.p_of[key] = verdict.p_yes

    def __call__(self, first: Image.Image, second: Image.Image) -> float | None:
        return self.p_of[id(first), id(second)]


# --- figures -----------------------------------------------------------------------------------------------------


def upper_bound(errors: int, trials: int, *, level: float = 0.95) -> float:
    """Compute the one-sided upper Clopper–Pearson bound of a share, by bisection of the binomial's distribution."""
    if errors == trials:
        return 1.0
    low = errors / trials
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        logs = [
            math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
            + k * math.log(middle) + (trials - k) * math.log1p(-middle)
            for k in range(errors + 1)
        ]  # fmt: skip
        if sum(map(math.exp, logs)) > 1 - level:
            low = middle
        else:
            high = middle
    return high


def threshold_between(sound: Sequence[float], broken: Sequence[float]) -> float:
    """Choose the threshold with the least larger error, each over its goal; midway between two scores' logits."""
    scores = np.unique([*sound, *broken])
    middles = [(first + second) / 2 for first, second in pairwise(logits(scores).tolist())]
    candidates = [1 / (1 + math.exp(-middle)) for middle in middles]

    def worst(threshold: float) -> float:
        alarms = np.mean(np.array(sound) < threshold) / GOAL_FALSE_ALARMS
        return float(max(alarms, np.mean(np.array(broken) >= threshold) / GOAL_MISSES))

    errors = [worst(threshold) for threshold in candidates]
    best = [threshold for threshold, error in zip(candidates, errors, strict=True) if error == min(errors)]
    return best[len(best) // 2]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    panels: int
    threshold: float
    false_alarms: int
    misses: int
    sets: int
    questions: int
    missed: dict[str, int]
    """Fault → missed sets."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Upper bounds of false alarms and misses."""
        return upper_bound(self.false_alarms, self.sets), upper_bound(self.misses, self.sets)

    @property
    def text(self) -> str:
        alarms, misses = self.bounds
        met = "yes" if alarms <= GOAL_FALSE_ALARMS and misses <= GOAL_MISSES else "no"
        missed = ", ".join(f"{name} {count}" for name, count in self.missed.items())
        return (
            f"| {self.name} | {self.panels} | {self.threshold:.3f} | {self.false_alarms} of {self.sets} | {alarms:.3f} "
            f"| {self.misses} of {self.sets} | {misses:.3f} | {self.questions} | {met} | {missed or '–'} |"
        )


def scored(judge: Cached, sets: Sequence[Drawn], mode: Mode) -> tuple[list[float], list[float]]:
    """Score the lowest panels of the sound and of the broken sets."""
    judge.ask([pair for each in sets for pair in each.pairs(mode)])
    sound = [each.lowest(mode, judge) for each in sets if not each.fault]
    return sound, [each.lowest(mode, judge) for each in sets if each.fault]


def measure(judge: Cached, sets: Sequence[Drawn], mode: Mode, threshold: float, *, name: str) -> Row:
    """Count the errors at a threshold."""
    sound, broken = scored(judge, sets, mode)
    missed: dict[str, int] = {}
    for each, score in zip([each for each in sets if each.fault], broken, strict=True):
        if score >= threshold:
            missed[each.fault] = missed.get(each.fault, 0) + 1
    panels = len(sets[0].panels)
    alarms = sum(score < threshold for score in sound)
    return Row(name, panels, threshold, alarms, sum(missed.values()), len(sound), len(sets[0].pairs(mode)), missed)


def curve_of(judge: Cached, drawn: Sequence[Pool], rng: random.Random) -> Calibration:
    """Fit the curve on single pairs: of each character as many sound as wrong panels with a reference."""
    pairs = []
    labels = []
    for pool in drawn:
        for image, label in [(image, False) for _, image in pool.wrong] + [(image, True) for image in pool.sound]:
            pairs.append((rng.choice(pool.references), image))
            labels.append(label)
    judge.ask(pairs)
    p_N = np.array([judge(*pair) for pair in pairs], dtype=float)
    return Calibration("tiny", fit_curve(p_N, np.array(labels)))


def main() -> None:
    options = arguments()
    check_new(options.out, fix="name another file with --out")
    started = time.process_time()
    quiet_loading()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    judge = LocalJudge.from_pretrained("tiny")

    cached = Cached(judge)
    thresholds: dict[Mode, dict[int, float]] = {}
    calibration = None
    print("| with | panels | threshold | false alarms | bound | misses | bound | questions | goals met | missed |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for mode, sizes, counts in MODES:
        variants = VARIANTS if mode == "references" else 1
        dev, test = (pools(split, CHARACTERS, rng, variants=variants) for split in ("dev", "test"))
        calibration = calibration or curve_of(cached, dev, rng)
        curve = calibration.curve
        for references, panels in product(counts, sizes):
            draws = [list(sets_of(pool, panels, options.sets, rng, references=references)) for pool in (dev, test)]
            threshold = threshold_between(*scored(cached, draws[0], mode))
            name = mode if mode == "panels" else f"{references} reference{'s' * (references > 1)}"
            row = measure(cached, draws[1], mode, threshold, name=name)
            # The curve rises, so the order of scores and the errors are those of the calibrated scores.
            if references == 1:
                thresholds.setdefault(mode, {})[panels] = curve(threshold)
            print(replace(row, threshold=curve(threshold)).text, flush=True)
    assert calibration
    replace(calibration, thresholds=thresholds).save(options.out)
    print(f"{len(cached.p_of):,} questions asked, {time.process_time() - started:.0f} CPU seconds, {options.out}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gate.json"), help="the calibration file to write")
    parser.add_argument("--sets", type=int, default=900, help="sound sets, and broken sets, of each size")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
