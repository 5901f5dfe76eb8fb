"""Tables of a claim: where each arm ends, whether its curve is flat, and the predictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean

import numpy as np
from scipy import stats

from research.claims.claim import AREA, Claim, Curve, Half, Prediction, read_curves

Curves = dict[tuple[str, int], Curve]
Bounds = tuple[float, float, float]
"""Mean, and its 95 % interval by Student's t."""


def render(claim: Claim) -> str:
    """Render a claim with its results so far."""
    curves = read_curves(claim)
    lines = [f"## {claim.name}", "", claim.question, "", f"Budget: {claim.budget}", ""]
    metrics = list(dict.fromkeys([*(prediction.metric for prediction in claim.predictions), *claim.also]))
    lines += ["| Arm | seeds | " + " | ".join(metrics) + " |", "|---" * (2 + len(metrics)) + "|"]
    for arm in claim.arms:
        of_arm = [curve for (name, _), curve in curves.items() if name == arm]
        if of_arm:
            cells = [_cell(of_arm, metric) for metric in metrics]
            lines.append(f"| {arm} | {len(of_arm)} | " + " | ".join(cells) + " |")
    for metric in (claim.grade, *claim.also):
        lines += ["", f"The way of {metric}, means over seeds:", "", *_way(claim, curves, metric)]
    lines += ["", "| Prediction | Predicted | Found | Seeds that agree | Verdict |", "|---|---|---|---|---|"]
    lines += [_row(prediction, claim, curves) for prediction in claim.predictions]
    lines += [_half_row(half, claim, curves) for half in claim.halves]
    return "\n".join(lines) + "\n"


def _way(claim: Claim, curves: Curves, metric: str) -> list[str]:
    """List a metric at each evaluation, arm by arm. Arms that are evaluated at other points have gaps."""
    points = sorted({evaluation.at for curve in curves.values() for evaluation in curve})
    lines = ["| Arm | " + " | ".join(map(str, points)) + " |", "|---" * (1 + len(points)) + "|"]
    for arm in claim.arms:
        values: dict[int, list[float]] = defaultdict(list)
        for (name, _), curve in curves.items():
            if name == arm:
                for evaluation in curve:
                    values[evaluation.at].append(evaluation.metrics[metric])
        cells = [f"{fmean(values[point]):.2f}" if point in values else "" for point in points]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return lines


def end_of(curve: Curve, metric: str) -> float:
    """Average a metric over the last third of a curve's trained evaluations; an area is of the whole curve."""
    if metric == AREA:
        return curve[-1].metrics[AREA]
    return fmean(evaluation.metrics[metric] for evaluation in last_third(curve))


def last_third(curve: Curve) -> Curve:
    trained = [evaluation for evaluation in curve if evaluation.at]
    return trained[-ceil(len(trained) / 3) :]


def slope(curves: Sequence[Curve], metric: str) -> Bounds | None:
    """Estimate the change of a metric over the last third, of at least three evaluations, by seed.

    None with fewer than three evaluations or seeds.
    """
    changes = []
    for curve in curves:
        trained = [evaluation for evaluation in curve if evaluation.at]
        if len(trained) < 3:
            return None
        last = trained[-max(3, len(last_third(curve))) :]
        at = np.array([evaluation.at for evaluation in last], dtype=float)
        values = np.array([evaluation.metrics[metric] for evaluation in last])
        # Rounded: a constant metric has a slope of rounding errors.
        changes.append(round(float(np.polyfit(at, values, 1)[0] * (at[-1] - at[0])), 6))
    return bounds(changes) if len(changes) >= 3 else None


def is_flat(curves: Sequence[Curve], metric: str) -> bool | None:
    """Tell whether 0 lies in the interval of the slope; None if it cannot be told."""
    found = slope(curves, metric)
    return None if found is None else found[1] <= 0 <= found[2]


def epochs_until(curve: Curve, metric: str, level: float) -> float | None:
    """Interpolate when a curve first reaches a level; None if it never does."""
    for before, after in pairwise(curve):
        low, high = before.metrics[metric], after.metrics[metric]
        if low < level <= high:
            return before.at + (after.at - before.at) * (level - low) / (high - low)
    return None


def bounds(values: Sequence[float]) -> Bounds:
    """Compute a mean and its 95 % interval over seeds by Student's t."""
    mean = fmean(values)
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else float("inf")
    return mean, mean - half, mean + half


def _cell(curves: Sequence[Curve], metric: str) -> str:
    """Means untrained and at the end, and the sign of a curve that still rises or falls."""
    start = fmean(curve[0].metrics[metric] for curve in curves)
    text = f"{start:.3f} → {fmean(end_of(curve, metric) for curve in curves):.3f}"
    if metric == AREA:
        return text
    flat = is_flat(curves, metric)
    if flat is None:
        return f"{text} ?"
    found = slope(curves, metric)
    if flat or found is None:
        return text
    return f"{text} {'↗' if found[0] > 0 else '↘'}"


def _row(prediction: Prediction, claim: Claim, curves: Curves) -> str:
    low, high = prediction.interval
    differences = []
    for seed in claim.seeds:
        curve, other = curves.get((prediction.arm, seed)), curves.get((str(prediction.against), seed))
        if curve is None or (prediction.against is not None and other is None):
            continue
        base = end_of(other, prediction.metric) if other else curve[0].metrics[prediction.metric]
        differences.append(end_of(curve, prediction.metric) - base)
    about = f"| {prediction.text} | {low:+.2f} to {high:+.2f} |"
    if len(differences) < len(claim.seeds):
        return f"{about} not run yet | {len(differences)} of {len(claim.seeds)} ran | |"

    mean, least, most = bounds(differences)
    agree = sum(low <= value <= high for value in differences)
    sides = [prediction.arm] + ([prediction.against] if prediction.against else [])
    rising = []
    for arm in sides:
        # An area rises as long as it is below its grades: the grades tell whether the way has ended.
        metric = claim.grade if prediction.metric == AREA else prediction.metric
        if not is_flat([curve for (name, _), curve in curves.items() if name == arm], metric):
            rising.append(arm)
    if rising:
        verdict = f"undecided: {' and '.join(rising)} not seen to be flat"
    elif low <= least and most <= high:
        verdict = "as predicted"
    elif most < low or least > high:
        verdict = "not as predicted"
    else:
        verdict = "undecided"
    return f"{about} {mean:+.3f} ({least:+.3f} to {most:+.3f}) | {agree} of {len(differences)} | {verdict} |"


def _half_row(half: Half, claim: Claim, curves: Curves) -> str:
    low, high = half.interval
    about = f"| {half.text} | {low:.2f} to {high:.2f} |"
    ratios = []
    ran = never = 0
    for seed in claim.seeds:
        sides = [curves.get((arm, seed)) for arm in (half.arm, half.against)]
        if None in sides:
            continue
        ran += 1
        start = sides[0][0].metrics[half.metric]
        best = max(evaluation.metrics[half.metric] for curve in sides for evaluation in curve)
        epochs = [epochs_until(curve, half.metric, (start + best) / 2) for curve in sides]
        if None in epochs:
            never += 1
        else:
            ratios.append(epochs[0] / epochs[1])
    if ran < len(claim.seeds):
        return f"{about} not run yet | {ran} of {len(claim.seeds)} ran | |"
    if never:
        return f"{about} | | undecided: in {never} of {ran} seeds one arm never gets there |"

    mean, least, most = bounds(ratios)
    agree = sum(low <= ratio <= high for ratio in ratios)
    verdict = "undecided"
    if low <= least and most <= high:
        verdict = "as predicted"
    elif most < low or least > high:
        verdict = "not as predicted"
    return f"{about} {mean:.2f} ({least:.2f} to {most:.2f}) | {agree} of {ran} | {verdict} |"
