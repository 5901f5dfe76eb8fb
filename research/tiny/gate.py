"""The gate's errors by the number of panels: false alarms and misses on the tiny world.

    python -m research.tiny.gate --out gate.json
    pacorl check PANELS… --character hero --calibration gate.json

The curve and thresholds come from heroes of the split `dev`, the table from those of `test`. A sound set shows one hero
in n scenes of one place. A broken set has one wrong panel: another look, a palette that changed by half, or a damaged
hero. Every panel is compared with one reference image, and for up to 16 panels with all others.

The threshold of n panels minimizes, on sets of `dev`, the larger of false alarms and misses, each over its goal.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image
from scipy import stats

from pacorl.core.calibration import fit_curve, logits
from pacorl.core.questions import consistent
from pacorl.gate.check import panel_score
from pacorl.io.files import check_new
from pacorl.io.quiet import quiet_loading
from pacorl.judge.calibration import Calibration, Mode
from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import LOOKS, SCENES, VALUES, Panel, Split, draw, with_another
from pacorl.types import Question
from research.tiny.damage import DEFECTS, mixed, worn
from research.tiny.heroes import heroes_of

SIZES: dict[Mode, tuple[int, ...]] = {"references": (4, 8, 16, 32, 64), "panels": (4, 8, 16)}
"""What panels are compared with → numbers of panels."""
SIDE = 96
VARIANTS = 4
"""Images of one scene, each worn by noise, compression or blur."""
POOLS = 4
"""Pools of each hero, each in a place and palette: the judge's P(Yes) of sound panels depends on all of them."""
WRONG = 4
"""Wrong panels of each pool and fault."""
GOALS = {"false alarms": 0.07, "misses": 0.05}
FAULTS = (*LOOKS, "half a palette", *DEFECTS)
Pair = tuple[Image.Image, Image.Image]


@dataclass(frozen=True)
class Pool:
    """Images of one hero in one place and palette."""

    reference: Image.Image
    sound: list[Image.Image]
    wrong: list[tuple[str, Image.Image]]


@dataclass(frozen=True)
class PanelSet:
    """A set of panels, and its fault; empty for a sound one."""

    reference: Image.Image
    panels: list[Image.Image]
    fault: str

    def pairs(self, mode: Mode) -> list[tuple[int, int]]:
        """List the pairs that the gate asks about, as indices of `images`."""
        count = len(self.panels)
        return [(0, n + 1) for n in range(count)] if mode == "references" else list(combinations(range(count), 2))

    def images(self, mode: Mode) -> list[Image.Image]:
        return [self.reference, *self.panels] if mode == "references" else self.panels


class CachedJudge:
    """A judge's P(Yes) of pairs of images, each pair asked once."""

    def __init__(self, judge: LocalJudge) -> None:
        self.judge = judge
        self.p_of: dict[tuple[int, int], float | None] = {}

    def ask(self, pairs: Sequence[Pair]) -> list[float | None]:
        new = {(id(a), id(b)): (a, b) for a, b in pairs if (id(a), id(b)) not in self.p_of}
        verdicts = self.judge.verdicts([Question(pair, consistent()) for pair in new.values()]) if new else []
        self.p_of |= {key: verdict.p_yes for key, verdict in zip(new, verdicts, strict=True)}
        return [self.p_of[id(a), id(b)] for a, b in pairs]

    def lowest(self, one: PanelSet, mode: Mode) -> float:
        """Score the lowest panel of a set, by the rule of `pacorl check`."""
        images, pairs = one.images(mode), one.pairs(mode)
        answers = self.ask([(images[first], images[second]) for first, second in pairs])
        every = range(len(images))
        lowest = []
        for panel in every[mode == "references" :]:
            others = [0] if mode == "references" else [other for other in every if other != panel]
            of_pair = {"consistent": dict(zip(pairs, answers, strict=True))}
            lowest.append(panel_score(str(panel), panel, [("hero", others)], of_pair).score or 0.0)
        return min(lowest)


def pool_of(hero: Sequence[str], rng: Random) -> Pool:
    """Draw sound and wrong panels of a hero."""
    shared = (*hero, rng.choice(VALUES["palette"]), rng.choice(VALUES["place"]))
    scenes = [Panel(*shared, *scene) for scene in SCENES]
    sound = [worn(draw(scene, SIDE), rng) for scene in scenes for _ in range(VARIANTS)]
    wrong = [(fault, wrong_panel(rng.choice(scenes), fault, rng)) for fault in FAULTS for _ in range(WRONG)]
    return Pool(draw(rng.choice(scenes), SIDE), sound, wrong)


def wrong_panel(panel: Panel, fault: str, rng: Random) -> Image.Image:
    """Draw a panel with one fault."""
    if fault in LOOKS:
        return worn(draw(with_another(panel, fault, rng), SIDE), rng)
    if fault in DEFECTS:
        return DEFECTS[fault](panel, rng)
    return mixed(panel, with_another(panel, "palette", rng).palette, rng)


def draw_sets(pools: Sequence[Pool], panels: int, count: int, rng: Random) -> list[PanelSet]:
    """Draw `count` sound sets and `count` broken ones, whose faults take turns."""
    sets = []
    for number in range(2 * count):
        pool = rng.choice(pools)
        chosen, fault = rng.sample(pool.sound, panels), ""
        if number >= count:
            fault = FAULTS[number % len(FAULTS)]
            chosen[rng.randrange(panels)] = rng.choice([image for name, image in pool.wrong if name == fault])
        sets.append(PanelSet(pool.reference, chosen, fault))
    return sets


def threshold_between(sound: Sequence[float], broken: Sequence[float]) -> float:
    """Choose the threshold with the least larger error, each over its goal; midway between two scores' logits."""
    middles = np.array([(first + second) / 2 for first, second in pairwise(logits(np.unique([*sound, *broken])))])
    candidates = 1 / (1 + np.exp(-middles))
    alarms = (np.array(sound)[:, None] < candidates).mean(0) / GOALS["false alarms"]
    misses = (np.array(broken)[:, None] >= candidates).mean(0) / GOALS["misses"]
    worst = np.maximum(alarms, misses)
    best = candidates[worst == worst.min()]
    return float(best[len(best) // 2])


def upper_bound(errors: int, trials: int) -> float:
    """Compute the one-sided 95 % Clopper–Pearson bound of a share."""
    return 1.0 if errors == trials else float(stats.beta.ppf(0.95, errors + 1, trials - errors))


def curve_of(judge: CachedJudge, pools: Sequence[Pool]) -> Calibration:
    """Fit the curve on single pairs of a reference and a sound or wrong panel."""
    labelled = []
    for pool in pools:
        labelled += [((pool.reference, image), True) for image in pool.sound]
        labelled += [((pool.reference, image), False) for _, image in pool.wrong]
    p_N = np.array(judge.ask([pair for pair, _ in labelled]), dtype=float)
    return Calibration("tiny", fit_curve(p_N, np.array([label for _, label in labelled])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gate.json"), help="the calibration file to write")
    parser.add_argument("--sets", type=int, default=900, help="sound sets, and broken sets, of each size")
    options = parser.parse_args()
    check_new(options.out, fix="name another file with --out")
    quiet_loading()
    torch.set_num_threads(1)
    rng = Random(0)
    judge = CachedJudge(LocalJudge.from_pretrained("tiny"))
    splits: tuple[Split, ...] = ("dev", "test")
    dev, test = ([pool_of(hero, rng) for hero in heroes_of(split) * POOLS] for split in splits)
    calibration = curve_of(judge, dev)

    thresholds: dict[Mode, dict[int, float]] = {mode: {} for mode in SIZES}
    print("| with | panels | threshold | false alarms | bound | misses | bound | missed |", "|---" * 8 + "|", sep="\n")
    for mode, panels in ((mode, panels) for mode, sizes in SIZES.items() for panels in sizes):
        tuning = [(judge.lowest(one, mode), one.fault) for one in draw_sets(dev, panels, options.sets, rng)]
        threshold = threshold_between([p for p, fault in tuning if not fault], [p for p, fault in tuning if fault])
        thresholds[mode][panels] = calibration.curve(threshold)

        tested = [(judge.lowest(one, mode), one.fault) for one in draw_sets(test, panels, options.sets, rng)]
        alarms = sum(p < threshold for p, fault in tested if not fault)
        missed = Counter(fault for p, fault in tested if fault and p >= threshold)
        bounds = [f"{upper_bound(errors, options.sets):.3f}" for errors in (alarms, missed.total())]
        listed = ", ".join(f"{fault} {count}" for fault, count in missed.most_common())
        print(f"| {mode} | {panels} | {thresholds[mode][panels]:.3f} | {alarms} | {bounds[0]}", end=" ")
        print(f"| {missed.total()} | {bounds[1]} | {listed or '–'} |", flush=True)
    replace(calibration, thresholds=thresholds).save(options.out)


if __name__ == "__main__":
    main()
