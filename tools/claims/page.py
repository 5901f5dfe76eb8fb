"""The page of claims: predictions with their figures and verdicts, and means by arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill

import numpy as np

from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from tools.claims.claim import ROOT, Claim, Prediction, Result, Results, read_results

PAGE = Path("docs/claims.md")
INTRODUCTION = """# Claims

The paper's claims ([arXiv:2512.04784](https://arxiv.org/abs/2512.04784)), asked in the [tiny world](tiny.md). Each
prediction was committed before its first run, with the rule that decides. `claims/*.yaml` contains them, with the arms,
seeds and commands, and `claims/results` one JSON per run.

A figure compares two arms over the seeds that both have. Brackets are a 95 % bootstrap interval over seeds. A
prediction *holds* if the whole interval satisfies its rule and *does not hold* if the interval lies outside. It is
*undecided* if the interval has both, or as long as seeds are missing.

```sh
make claims                                      # every missing run, after a table of prices
make claims ARGS="--only alpha --minutes 20"     # what fits into 20 CPU minutes
python -m tools.claims render                    # this page
```
"""


def render(claims: Sequence[Claim], root: Path = ROOT) -> str:
    """Render the page from the claims and their results."""
    sections = [INTRODUCTION]
    for claim in claims:
        results = read_results(claim, root)
        sections += [f"## {claim.title}\n", paragraph(claim.claim), paragraph(f"The paper: {claim.paper}")]
        sections.append(predictions_table(claim, results))
        if results:
            sections.append(arms_table(claim, results))
        if claim.needs:
            sections.append(paragraph(f"It cannot run yet: {claim.needs}"))
        if claim.notes:
            sections.append(paragraph(claim.notes))
    return "\n".join(sections)


def paragraph(text: str) -> str:
    """Wrap a text to the width of the other pages."""
    return fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def predictions_table(claim: Claim, results: Results) -> str:
    """Tabulate the predictions, their figures and verdicts."""
    lines = ["| Prediction | Predicted | Rule | Figure | Seeds | Verdict |", "|---|---|---|---|---|---|"]
    for prediction in claim.predictions:
        figure, count = figure_of(prediction, claim, results)
        low, high = prediction.interval
        words = verdict(prediction, figure, count, len(claim.seeds))
        lines.append(
            f"| {prediction.text} | {low:g} to {high:g} | {prediction.figure} {prediction.rule} | {cell(figure)} "
            f"| {count} of {len(claim.seeds)} | {words} |"
        )
    return "\n".join(lines) + "\n"


def arms_table(claim: Claim, results: Results) -> str:
    """Tabulate the mean of each metric by arm."""
    lines = [f"| Arm | n | {' | '.join(claim.metrics)} | CPU s |", "|---|---|" + "---|" * (len(claim.metrics) + 1)]
    for arm in claim.arms:
        of_arm = runs_of(arm, claim, results)
        if not of_arm:
            continue
        cells = []
        for name in claim.metrics:
            cells.append(cell(mean_of([result.metrics[name] for result in of_arm])))
        seconds = fmean(result.seconds for result in of_arm)
        lines.append(f"| {arm} | {len(of_arm)} | {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def figure_of(prediction: Prediction, claim: Claim, results: Results) -> tuple[Interval | None, int]:
    """Compare the arms over their common seeds. Returns the figure, None without such seeds, and their count."""
    seeds = [seed for seed in claim.seeds if all((side, seed) in results for side in prediction.sides)]
    if not seeds:
        return None, 0
    # Paired by seed: both arms are drawn together.
    columns = []
    for side in prediction.sides:
        columns.append([results[side, seed].metrics[prediction.metric] for seed in seeds])
    values = np.array(columns)

    def compare(rows: Indices) -> Floats:
        first, *second = values[:, rows].mean(1)
        if prediction.figure == "mean":
            return np.array([first])
        return np.array([first / second[0] if prediction.figure == "ratio" else first - second[0]])

    return bootstrap(seeds, compare, fewest=2)[0], len(seeds)


def runs_of(arm: str, claim: Claim, results: Results) -> list[Result]:
    """List an arm's results in the order of the seeds."""
    return [results[arm, seed] for seed in claim.seeds if (arm, seed) in results]


def mean_of(values: Sequence[float]) -> Interval:
    """Average over seeds."""
    column = np.array(values)
    return bootstrap(range(len(values)), lambda rows: np.array([column[rows].mean()]), fewest=2)[0]


def verdict(prediction: Prediction, figure: Interval | None, count: int, seeds: int) -> str:
    """Apply the rule, once every seed has run."""
    if figure is None:
        return "not run yet"
    if count < seeds or figure.low is None or figure.high is None:
        return "undecided"
    low, high = prediction.region
    if low <= figure.low and figure.high <= high:
        return "**holds**"
    if figure.high < low or high < figure.low:
        return "**does not hold**"
    return "undecided"


def cell(figure: Interval | None) -> str:
    """Format a figure with its interval."""
    if figure is None:
        return "–"
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.3f}"
    return f"{figure.mean:.3f} ({figure.low:.3f} to {figure.high:.3f})"
