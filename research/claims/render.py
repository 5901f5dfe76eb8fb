"""The page of claims: an overview, predictions with their figures and verdicts, and means by arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from textwrap import fill

from pacorl.core.ranking import Interval
from research.claims.claim import Claim, Prediction, Results, read_results
from research.claims.summary import FAILS, HOLDS, NOT_RUN, UNDECIDED, Judged, judged, mean_of, runs_of


def render(claims: Sequence[Claim]) -> str:
    """Render an overview, and the tables of each claim."""
    rows_of = {claim.name: judged(claim, read_results(claim)) for claim in claims}
    sections = ["# Claims\n", overview(claims, rows_of)]
    for claim in claims:
        results = read_results(claim)
        sections += [f"## {claim.title}\n", paragraph(claim.claim), paragraph(f"The paper: {claim.paper}")]
        sections.append(predictions_table(claim, rows_of[claim.name]))
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


def cell(figure: Interval | None) -> str:
    """Format a figure with its interval."""
    if figure is None:
        return "–"
    if figure.low is None or figure.high is None:
        return f"{figure.mean:.3f}"
    return f"{figure.mean:.3f} ({figure.low:.3f} to {figure.high:.3f})"
