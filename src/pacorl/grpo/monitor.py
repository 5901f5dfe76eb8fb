"""Monitor of reward hacking: signs of the images, compared with the start of the run.

Equal panels, or one image for every prompt, can win a reward, while its curve rises. So each epoch's images are
measured without a model, the judge compares sets of an epoch, held-out rewards (`held_out/…`) are evaluated, and a sign
beyond its limit warns or stops the run.

    duplicates      share of a grid image's pairs of panels that are nearly the same, blank panels included
    diversity       root mean squared distance, over pairs of prompts, of their mean images
    across          P(Yes) of panels of different sets of one prompt, by the run's judge
    held_out/…      an evaluation's measures that are not rewarded
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from pacorl.core.batches import grouped, in_batches
from pacorl.core.grid import split
from pacorl.core.metric_names import HELD_OUT, MONITOR, sign_meaning
from pacorl.core.schedule import seed_of
from pacorl.core.set_scores import kappa, pairs_within
from pacorl.grpo.rows import Row
from pacorl.types import Prompt

if TYPE_CHECKING:
    from pacorl.grpo.trainer import PolicyTrainer

SIDE = 32
"""Size at which panels are compared, whatever theirs: noise and compression differ there little."""
SAME_DISTANCE = 0.02
"""Root mean squared difference (0..1) below which two panels are one image: redrawing the smallest attribute of the
tiny world changes more."""
THUMBNAIL = 8
LEAST_PROMPTS = 4
"""Prompts of which diversity is measured, at least."""
EPOCHS = 3
DIVERSITY_PROMPTS = 24
"""Signs of training images are averaged over EPOCHS, and signs that compare prompts or sets over so many prompts too:
of twelve prompts, diversity falls by 0.4 from its best within 300 epochs by their draws alone."""
LIMITS = {"duplicates": 0.2, "diversity": 0.4, "across": 0.15, "held_out": 0.15}
"""Sign → its largest rise since the start, or its largest fall as a share of the best so far. They are far above the
changes of healthy runs."""
SHARED = 0.1
"""κ at the start from which `across` is a sign. Where prompts describe the shared content, κ is near 0: sets of one
prompt agree as much as the panels of a set, and both rise during training."""

COUPLES = 16
"""Pairs of sets whose agreement is measured in an epoch, each of one prompt."""
PAIRS = 4
"""Pairs of panels within a couple's sets, and as many across them."""


@dataclass(frozen=True, slots=True)
class PanelStatistics:
    """Signs of one grid image, measured without a model."""

    group: int
    duplicates: float
    thumbnail: tuple[float, ...]
    """Downscaled mean panel, RGB in 0..1."""


def panel_statistics(prompt: Prompt, image: Image.Image) -> PanelStatistics:
    """Measure one grid image without a model."""
    panels = split(image.convert("RGB"), prompt.grid)
    # Panels at two sizes, in 0..1.
    pixels = []
    for side in (SIDE, THUMBNAIL):
        shrunk = [np.asarray(panel.resize((side, side), Image.Resampling.BOX)) for panel in panels]
        pixels.append(np.stack(shrunk) / 255)
    small_PHWC, tiny_PHWC = pixels
    first, second = np.triu_indices(len(panels), 1)
    distance = np.sqrt(((small_PHWC[first] - small_PHWC[second]) ** 2).mean((1, 2, 3)))
    return PanelStatistics(
        group=prompt.id,
        duplicates=float((distance < SAME_DISTANCE).mean()) if len(first) else 0.0,
        thumbnail=tuple(tiny_PHWC.mean(0).reshape(-1).tolist()),
    )


def signs_of(statistics: Sequence[PanelStatistics]) -> dict[str, float]:
    """Average the signs over images, as metrics. Diversity, absent with few prompts, is the root mean squared distance
    of groups' mean thumbnails over pairs of groups."""
    signs = {f"{MONITOR}duplicates": fmean(image.duplicates for image in statistics)}
    groups = grouped((image.group, image.thumbnail) for image in statistics)
    if len(groups) >= LEAST_PROMPTS:
        # Group means first, so that variety within a group does not count.
        mean_GC = np.stack([np.mean(thumbnails, axis=0) for thumbnails in groups.values()])
        # Over pairs the mean of (a − b)² is twice the variance, which looks at each group once.
        signs[f"{MONITOR}diversity"] = float(np.sqrt(2 * mean_GC.var(axis=0, ddof=1).mean()))
    return signs


def measure_agreement(
    trainer: PolicyTrainer, rows: Sequence[Row], images: Mapping[int, Image.Image]
) -> dict[str, float]:
    """Measure P(Yes) of pairs of panels within sets and across sets of one prompt. All ranks call it.

    The judge is asked about a fixed number of pairs an epoch, whatever the rewards. Their draw follows from (seed,
    epoch), and the main process asks them, so that they do not depend on the number of processes.

    Args:
        images: global row → image, of this rank.

    Returns:
        `monitor/within`, `monitor/across` and `monitor/kappa`; empty without a judge, without sets, and with the
        monitor off.

    Raises:
        SharedFault: wraps an exception of the judge, on all ranks.
    """
    config, runtime, reward = trainer.config, trainer.runtime, trainer.consistency
    groups = [group for group in in_batches(rows, config.group_size) if group[0].prompt.grid.count > 1]
    if reward is None or config.monitor == "off" or not groups:
        return {}

    # 1. The couples, from all groups in turn, and their images, which may be on two processes.
    # Shuffled, since there may be more groups than couples.
    rng = Random(seed_of(config.seed, trainer.epoch, "agreement"))
    rng.shuffle(groups)
    couples = [rng.sample(groups[turn % len(groups)], 2) for turn in range(COUPLES)]
    numbers = {row.number for couple in couples for row in couple}
    shared = runtime.gather_rows(lambda: {row: image for row, image in images.items() if row in numbers})

    # 2. The pairs: a couple's panels are numbered over both of its sets.
    prompts = [first.prompt for first, _ in couples]
    panels, pairs = [], []
    for first, second in couples:
        grid = first.prompt.grid
        count = grid.count
        panels.append([*split(shared[first.number], grid), *split(shared[second.number], grid)])
        same_set = pairs_within(2, count)
        other_set = [*product(range(count), range(count, 2 * count))]
        # A small grid has fewer than PAIRS pairs within its sets.
        pairs.append([*rng.sample(same_set, min(PAIRS, len(same_set))), *rng.sample(other_set, PAIRS)])

    # 3. The answers, and their means without missing ones.
    ask = partial(reward.mean_verdicts, prompts, panels, pairs=pairs)
    what = f"the judge (agreement of {COUPLES} pairs of sets)"
    # The main process asks, and the others receive its answers.
    answers = runtime.gather_rows(lambda: {0: trainer.scorer.begin(reward, ask, what)()} if runtime.is_main else {})[0]
    within: list[float] = []
    across: list[float] = []
    for prompt, verdicts in zip(prompts, answers, strict=True):
        for (left, right), verdict in verdicts.items():
            if verdict.p_yes is not None:
                is_within = left // prompt.grid.count == right // prompt.grid.count
                (within if is_within else across).append(verdict.p_yes)
    # κ compares both kinds of pairs.
    if not (within and across):
        return {}
    means = fmean(within), fmean(across)
    return {f"{MONITOR}within": means[0], f"{MONITOR}across": means[1], f"{MONITOR}kappa": kappa(*means)}


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign beyond its limit."""

    sign: str
    reference: float
    """Start of the sign if it should not rise, or its best if it should not fall."""
    now: float
    limit: float

    def __str__(self) -> str:
        return (
            f"{self.sign} went from {self.reference:.3f} to {self.now:.3f}, beyond the limit of {self.limit:g} "
            f"({sign_meaning(self.sign)})"
        )


class HackingMonitor:
    """History of every sign since the start of a run, and its alarms.

    Signs that should not rise are compared with their start, signs that should not fall with their best, so that losing
    an earlier gain counts.
    """

    def __init__(self, *, prompts: int) -> None:
        """Begin with the number of `prompts` of an epoch."""
        compares_prompts = max(EPOCHS, math.ceil(DIVERSITY_PROMPTS / prompts))
        self._epochs = {"diversity": compares_prompts, "across": compares_prompts}
        """Sign of training images → epochs that it is averaged over, if not EPOCHS."""
        self._history: dict[str, list[float]] = defaultdict(list)

    def update(self, values: Mapping[str, Any]) -> list[Alarm]:
        """Add a line of the log (`monitor/…` and `held_out/…`), and return its alarms."""
        alarms = []
        for name, value in values.items():
            if value is not None and name.startswith((HELD_OUT, MONITOR)):
                sign = name.removeprefix(MONITOR)
                self._history[sign].append(value)
                alarm = self._alarm(sign)
                if alarm:
                    alarms.append(alarm)
        return alarms

    def _alarm(self, sign: str) -> Alarm | None:
        """Compare the newest value of a sign, an average in training, with the earlier ones."""
        is_held_out = sign.startswith(HELD_OUT)
        limit = LIMITS.get("held_out" if is_held_out else sign)
        history = self._history[sign]
        # Every evaluation has the same prompts.
        average = 1 if is_held_out else self._epochs.get(sign, EPOCHS)
        if limit is None or len(history) <= average:
            return None
        if sign == "across" and fmean(self._history["kappa"][:average]) < SHARED:
            return None

        # Moving averages over the history, the newest last.
        *before, now = (fmean(history[end - average : end]) for end in range(average, len(history) + 1))
        if sign == "diversity" or is_held_out:
            # These should not fall. Their units differ, so the fall is a share of the best; of 0 there is none.
            reference = max(before)
            change = (reference - now) / abs(reference) if reference else 0.0
        else:
            reference = before[0]
            change = now - reference
        if change > limit:
            return Alarm(sign, reference, now, limit)
        return None
