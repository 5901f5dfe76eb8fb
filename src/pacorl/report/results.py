"""Numbers of a page: metrics before and after with paired intervals."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean

import numpy as np

from pacorl.core.batches import grouped
from pacorl.core.metric_names import SECONDS
from pacorl.core.ranking import Interval, bootstrap, t_interval
from pacorl.report.figures import MEANINGS
from pacorl.report.folder import Record, RunFolder, Sample, numbers
from pacorl.report.html import render

Change = tuple[Interval, Interval, Interval]
"""Before, after, and after − before."""

PLACES = 3
"""Decimals of a difference."""
BOOTSTRAP_FROM = 20
"""Groups from which intervals are bootstrapped; with fewer, a bootstrap is too narrow, and Student's t is used."""
INTERVAL_NOTE = (
    "Small figures are 95 % intervals over the n groups of a difference: prompts with their seeds of noise, training "
    f"seeds, or groups of evaluation pairs. They are Student’s t below {BOOTSTRAP_FROM} groups, bootstrapped above; "
    "those of evaluation pairs are always bootstrapped, and too narrow over few groups. There is none over very few "
    "groups, or where all differ alike. A difference is set in bold if its interval leaves out zero."
)
"""Explains the intervals of every table."""


@dataclass(frozen=True, slots=True)
class Result:
    """One metric of the table."""

    name: str
    before: Interval | None
    after: Interval | None
    difference: Interval | None
    """Paired: the same prompts and seeds on both sides."""
    unscored: int = 0
    """Images of both sides that lack this score on one of them."""
    by_seed: Mapping[str, float] = field(default_factory=dict)
    """Training seed → difference; empty for two runs."""
    untrained: Interval | None = None
    """Value before the training of either of two compared runs, if both begin alike."""

    @property
    def higher(self) -> str:
        """Count the seeds with a higher value, as it is shown."""
        higher = [seed for seed, change in self.by_seed.items() if change > 0]
        return f"higher in {len(higher)} of {len(self.by_seed)} seeds"

    @property
    def sure(self) -> bool:
        """Whether the difference has an interval, and 0 is outside of it as it is shown."""
        if self.difference is None or self.difference.low is None or self.difference.high is None:
            return False
        return round(self.difference.low, PLACES) > 0 or round(self.difference.high, PLACES) < 0


def paired(groups: Sequence[Hashable], before: Sequence[float], after: Sequence[float]) -> Change:
    """Average both sides and their difference, with 95 % intervals over groups.

    Values of one group, such as the seeds of a prompt, are not independent, so each group counts as its mean. Below
    BOOTSTRAP_FROM groups the intervals are Student's. Groups that all differ by the same amount have none: their
    spread is unknown, and not zero.
    """
    means = []
    for side in (before, after):
        of_groups = grouped(zip(groups, side, strict=True))
        means.append([fmean(values) for values in of_groups.values()])
    firsts, seconds = means
    return _interval(firsts), _interval(seconds), _interval(np.subtract(seconds, firsts).tolist())


def _interval(values: Sequence[float]) -> Interval:
    """Average values of independent groups, with an interval unless all are equal."""
    if max(values) - min(values) < 1e-12:
        return Interval(fmean(values), groups=len(values))
    if len(values) < BOOTSTRAP_FROM:
        return t_interval(values)
    array = np.array(values)
    return bootstrap(range(len(values)), lambda rows: array[rows].mean(keepdims=True), draws=1000)[0]


def rows_of(run: RunFolder) -> list[Result]:
    """Read the table of a run's page: the summary's results, else its first and newest evaluation compared."""
    if rows := summarised(run.summary):
        return rows
    evaluations = list(run.samples.values())
    if len(evaluations) < 2:
        return []
    return compared(pair_up(evaluations[0], evaluations[-1]))


def verdict_of(run: RunFolder) -> list[str]:
    """Return the summary's verdict, else a line for each measure before and after, with its difference."""
    if run.summary.get("verdict"):
        return list(map(str, run.summary["verdict"]))
    return render("results.txt", rows=rows_of(run), change_text=change_text).splitlines()


def change_text(row: Result) -> str:
    """Format a difference as `+0.120 (0.080 to 0.160), n = 12`."""
    if row.difference is None:
        return "–"
    text = row.difference.text(signed=True)
    return f"{text}, n = {row.difference.groups}" if row.difference.groups else text


def summarised(summary: Record) -> list[Result]:
    """Read every metric that the summary has before or after, in the order of MEANINGS and then the summary's."""
    before, after, difference = (_intervals(summary, key) for key in ("before", "after", "difference"))
    measured = {**before, **after}
    names = dict.fromkeys([name for name in MEANINGS if name in measured] + list(measured))
    return [Result(name, before.get(name), after.get(name), difference.get(name)) for name in names]


def _intervals(summary: Record, key: str) -> dict[str, Interval]:
    """Read a section's entries, intervals or plain numbers; entries without a finite mean are left out."""
    intervals = {}
    entries = summary.get(key) or {}
    if not isinstance(entries, Mapping):
        raise ValueError(f"summary.json: {key!r} should be an object, it is a {type(entries).__name__}")
    for name, entry in entries.items():
        ends = numbers(entry if isinstance(entry, Mapping) else {"mean": entry})
        if "mean" in ends and name not in ("kind", "epoch", "step") and not name.startswith(SECONDS):
            groups = int(ends["groups"]) if "groups" in ends else None
            intervals[name] = Interval(ends["mean"], ends.get("low"), ends.get("high"), groups)
    return intervals


def pair_up(first: Sequence[Sample], last: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Pair the images of one prompt, text and seed, in the order of these."""
    last_by_key = {sample.key: sample for sample in last}
    pairs = []
    for sample in sorted(first, key=attrgetter("key")):
        if sample.key in last_by_key:
            pairs.append((sample, last_by_key[sample.key]))
    return pairs


def compared(pairs: Sequence[tuple[Sample, Sample]]) -> list[Result]:
    """Compare every measure of paired images."""
    # Measure → prompt, value before and value after of each image that has both.
    scored: dict[str, list[tuple[int, float, float]]] = {}
    for first, second in pairs:
        for name, value in first.measures.items():
            values = scored.setdefault(name, [])
            if name in second.measures:
                values.append((first.prompt_id, value, second.measures[name]))
    rows = []
    for name, values in scored.items():
        if values:
            prompts, before, after = zip(*values, strict=True)
            rows.append(Result(name, *paired(prompts, before, after), unscored=len(pairs) - len(values)))
    return rows
