"""The page of claims: an overview, predictions with their figures and verdicts, and means by arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill

from pacorl.core.ranking import Interval
from tools import figures
from tools.claims.claim import ROOT, Claim, Prediction, Results, read_results
from tools.claims.summary import FAILS, HOLDS, NOT_RUN, UNDECIDED, Judged, judged, mean_of, runs_of

PAGE = Path("docs/claims.md")
ORDER = (
    "log_taming",
    "alpha",
    "resolution",
    "resolution_sizes",
    "table5",
    "hacking",
    "hacking_fast",
    "long_run",
    "judge_quality",
)
"""The paper's claims first, as the page lists them; any other follows."""
INTRODUCTION = """# Claims

The paper's claims ([arXiv:2512.04784](https://arxiv.org/abs/2512.04784)), asked in the [tiny world](tiny.md). Each
prediction was committed before its first run, with the rule that decides. `claims/*.yaml` contains them, with the arms,
seeds and commands, and `claims/results` one JSON per run.

A figure is of one arm, or compares two over the seeds that both have. Brackets are a 95 % bootstrap interval over
seeds. A prediction *holds* if the whole interval satisfies its rule and *does not hold* if the interval lies outside.
It is *undecided* if the interval has both, or as long as seeds are missing. The rule alone decides; a figure outside
the predicted interval is marked.

```sh
make claims                                      # every missing run, each committed alone, after a table of prices
make claims ARGS="--only alpha --minutes 20"     # what fits into 20 CPU minutes
python -m tools.claims render                    # this page
```
"""


def render(claims: Sequence[Claim], root: Path = ROOT) -> str:
    """Render the page from the claims and their results."""
    claims = sorted(claims, key=position)
    results_of = {}
    rows_of = {}
    for claim in claims:
        results_of[claim.name] = read_results(claim, root)
        rows_of[claim.name] = judged(claim, results_of[claim.name])

    records = figures.reader(root)
    sections = [INTRODUCTION, overview(claims, rows_of)]
    for claim in claims:
        results = results_of[claim.name]
        sections += [f"## {claim.title}\n", paragraph(claim.claim), paragraph(f"The paper: {claim.paper}")]
        sections.append(predictions_table(claim, rows_of[claim.name]))
        if results:
            sections.append(arms_table(claim, results))
            sections += by_seconds_table(claim, results)
        if claim.needs:
            sections.append(paragraph(f"It cannot run yet: {claim.needs}"))
        if claim.notes:
            sections.append(paragraph(figures.noted(claim.notes, records)))
    return "\n".join(sections)


def position(claim: Claim) -> int:
    """Return a claim's position on the page."""
    return ORDER.index(claim.name) if claim.name in ORDER else len(ORDER)


def paragraph(text: str) -> str:
    """Wrap a text to the width of the other pages."""
    return fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def overview(claims: Sequence[Claim], rows_of: Mapping[str, Sequence[Judged]]) -> str:
    """Tabulate the verdicts by claim, and list the open questions."""
    lines = ["| Claim | In this world | Hold | Undecided | Do not hold | Not run |", "|---|---|---|---|---|---|"]
    for claim in claims:
        count = Counter(verdict for *_, verdict in rows_of[claim.name])
        cells = [claim.title, claim.answer.strip()]
        for verdict in (HOLDS, UNDECIDED, FAILS, NOT_RUN):
            cells.append(str(count[verdict] or ""))
        lines.append(f"| {' | '.join(cells)} |")

    lines += ["", "What cannot be asked here:", ""]
    for claim in claims:
        if claim.not_asked:
            text = f"- {claim.title}: {claim.not_asked.strip()}"
            lines.append(fill(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def predictions_table(claim: Claim, rows: Sequence[Judged]) -> str:
    """Tabulate the predictions, their figures and verdicts."""
    lines = ["| Prediction | Predicted | Rule | Figure | Seeds | Verdict |", "|---|---|---|---|---|---|"]
    for prediction, figure, count, verdict in rows:
        low, high = prediction.interval
        lines.append(
            f"| {prediction.text} | {low:g} to {high:g} | {prediction.figure} {prediction.rule} | {cell(figure)} "
            f"| {count} of {len(claim.seeds)} | {verdict}{outside(prediction, figure)} |"
        )
    return "\n".join(lines) + "\n"


def outside(prediction: Prediction, figure: Interval | None) -> str:
    """Mark a figure outside of its predicted interval."""
    low, high = prediction.interval
    if figure is None or low <= figure.mean <= high:
        return ""
    return f", {'below' if figure.mean < low else 'above'} the predicted"


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


def by_seconds_table(claim: Claim, results: Results) -> list[str]:
    """Tabulate rises at several epochs (`rise_N`) beside their CPU seconds, the epochs' share of the whole run's."""
    epochs = sorted(int(name.removeprefix("rise_")) for name in claim.metrics if name.startswith("rise_"))
    if not epochs or "cpu_seconds" not in claim.metrics:
        return []
    lines = [f"| Arm | {' | '.join(f'epoch {epoch}' for epoch in epochs)} |", "|---" * (len(epochs) + 1) + "|"]
    for arm in claim.arms:
        of_arm = runs_of(arm, claim, results)
        if not of_arm:
            continue
        cells = []
        for epoch in epochs:
            rise = fmean(result.metrics[f"rise_{epoch}"] for result in of_arm)
            seconds = fmean(result.metrics["cpu_seconds"] for result in of_arm) * epoch / epochs[-1]
            cells.append(f"{rise:.3f} after {seconds:.0f} CPU s")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return ["\n".join(lines) + "\n", "CPU seconds are a run's, shared equally over its epochs.\n"]


def cell(figure: Interval | None) -> str:
    """Format a figure with its interval."""
    if figure is None:
        return "–"
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.3f}"
    return f"{figure.mean:.3f} ({figure.low:.3f} to {figure.high:.3f})"
