"""The step `pacorl dataset diversify`, and the table that compares selections with chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pacorl.dataset.diversify import SELECTIONS, Goal, Spread, select, spread
from pacorl.dataset.embed import embedder
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.records import PromptRecord, read_prompts, write_prompts


def diversify(
    folder: Path,
    *,
    goal: Goal,
    method: str = "independent_set",
    embed: str = "tfidf",
    per_category: bool = False,
    seed: int = 0,
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """prompts.jsonl → diverse.jsonl; returns the spread of what is kept, with the nearest pair by idx.

    `progress` hears of the three stages: embedded, selected, measured.
    """
    source, target = folder / "prompts.jsonl", folder / "diverse.jsonl"
    options = {"number": goal.number, "distance": goal.distance, "method": method, "embed": embed}
    step = DatasetStep(
        folder, "diversify", inputs=[source], options={**options, "per_category": per_category}, seed=seed
    )
    known = step.counts_if_done()
    if known is not None:
        return known
    records = read_prompts(source)
    if dry_run:
        return {"prompts": len(records), **options}
    vectors = embedder(embed, seed=seed)([record.prompt.text for record in records])
    progress(1, 3)
    categories = [record.prompt.category for record in records] if per_category else ()
    kept = select(vectors, goal, method=method, categories=categories, seed=seed)
    progress(2, 3)
    measured = spread(vectors, kept)
    progress(3, 3)
    write_prompts(target, [records[index] for index in kept])
    pair = [records[index].idx for index in measured.pair]
    return step.finish(outputs=[target], counts={**measured.as_dict(), "prompts": len(records), "pair": pair})


@dataclass(frozen=True, slots=True)
class Comparison:
    """One selection, measured in one embedding; for chance, the mean and the extremes over its draws."""

    selection: str
    selected_by: str
    measured_by: str
    nearest: float
    mean_nearest: float
    coverage: float
    best_nearest: float | None = None
    """The largest over the draws; only for chance."""
    best_mean_nearest: float | None = None


def compare(
    records: Sequence[PromptRecord],
    *,
    number: int,
    embeds: Sequence[str] = ("tfidf", "letters"),
    measures: Sequence[str] = ("words",),
    draws: int = 100,
    seed: int = 0,
) -> list[Comparison]:
    """Every selection by each of `embeds`, measured in them and in `measures`, beside `draws` random choices.

    Raises ValueError where `number` leaves nothing to choose.
    """
    if not 2 <= number < len(records):
        raise ValueError(f"of {len(records)} prompts, between 2 and {len(records) - 1} can be chosen, not {number}")
    texts = [record.prompt.text for record in records]
    vectors = {name: embedder(name, seed=seed)(texts) for name in dict.fromkeys([*embeds, *measures])}
    rows = []
    for method in SELECTIONS:
        for by in embeds:
            kept = select(vectors[by], Goal(number=number), method=method, seed=seed)
            rows += [_row(method, by, name, spread(vectors[name], kept)) for name in vectors]
    chance = [random.Random(f"{seed}-{draw}").sample(range(len(records)), number) for draw in range(draws)]
    return rows + [_chance(name, [spread(vectors[name], kept) for kept in chance]) for name in vectors]


def _row(method: str, by: str, measured_by: str, found: Spread) -> Comparison:
    return Comparison(method, by, measured_by, found.nearest, found.mean_nearest, found.coverage)


def _chance(measured_by: str, found: Sequence[Spread]) -> Comparison:
    return Comparison(
        selection="random",
        selected_by="",
        measured_by=measured_by,
        nearest=float(np.mean([one.nearest for one in found])),
        mean_nearest=float(np.mean([one.mean_nearest for one in found])),
        coverage=float(np.mean([one.coverage for one in found])),
        best_nearest=max(one.nearest for one in found),
        best_mean_nearest=max(one.mean_nearest for one in found),
    )


def table(rows: Sequence[Comparison]) -> str:
    """The rows for people: one line each."""
    head = ("selection", "by", "measured in", "nearest pair", "mean nearest", "coverage")
    lines = [
        (
            row.selection,
            row.selected_by or "–",
            row.measured_by,
            _with_best(row.nearest, row.best_nearest),
            _with_best(row.mean_nearest, row.best_mean_nearest),
            f"{row.coverage:.3f}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) + 2 for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in [head, *lines]
    )


def _with_best(value: float, best: float | None) -> str:
    return f"{value:.3f}" if best is None else f"{value:.3f} ({best:.3f})"
