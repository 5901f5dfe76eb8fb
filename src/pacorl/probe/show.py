"""A probe's findings as a document for programs, as tables for a terminal, and as a plot."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from pacorl.probe.forms import Form, Signal
from pacorl.probe.run import Finding, Findings
from pacorl.probe.variance import JUDGE, START, Estimate, Variances
from pacorl.report.figures import Scale, amount, duration, tag, ticks

if TYPE_CHECKING:
    from pacorl.io.console import PlainConsole

PIPE_WIDTH = 120
SCHEMA = 1
"""Of the document; it rises if a key changes its meaning or goes."""


# --- for programs ----------------------------------------------------------------------------------------------


def to_dict(findings: Findings) -> dict[str, Any]:
    """The whole probe; figures that cannot be told are null."""
    design = findings.design
    document = {
        "schema": SCHEMA,
        "design": {
            "prompts": design.prompts,
            "starts": design.seeds,
            "children": 2,
            "readings": ["as trained", *findings.readings],
            "samples": design.samples,
            "budget": design.budget,
        },
        "candidates": [_finding(finding) for finding in findings.candidates],
        "rewards": {name: _variances(variances) for name, variances in findings.rewards.items()},
        "temperatures": [_finding(finding) | {"temperature": finding.temperature} for finding in findings.temperatures],
        "forms": [_form(form) for form in findings.forms],
        "clock": asdict(findings.clock),
        "recommended": {
            name: asdict(choice) | {"changes": choice.changes} for name, choice in findings.recommended.items()
        },
        "notes": list(findings.notes),
        "seconds": dict(findings.seconds),
    }
    return _without_nan(document)  # type: ignore[no-any-return]


def _finding(finding: Finding) -> dict[str, Any]:
    candidate = finding.candidate
    return {
        "name": candidate.name,
        "sde_steps": list(candidate.sde_steps),
        "noise_level": candidate.noise_level,
        "size": [candidate.size.height, candidate.size.width],
        "mean": finding.mean,
        "levels": _variances(finding.variances),
        "signal": _signal(finding.signal),
        "groups_alike": finding.alike,
        "groups_missing": finding.missing_groups,
    }


def _variances(variances: Variances) -> dict[str, Any]:
    return {
        name: {
            "variance": asdict(variances.variance(name)),
            "unbiased": float(variance),
            "share": asdict(variances.share(name)) if name in variances.within else None,
            "degrees_of_freedom": int(freedom),
            "clamped": name in variances.clamped,
        }
        for name, variance, freedom in zip(variances.names, variances.unbiased_L, variances.freedom_L, strict=True)
    }


def _signal(signal: Signal) -> dict[str, Any]:
    return {"share": asdict(signal.share), "snr": asdict(signal.snr), "gain": asdict(signal.gain)}


def _form(form: Form) -> dict[str, Any]:
    return {
        "seeds": form.tree.seeds,
        "branches": list(form.tree.branches),
        "suffix": form.suffix.model_dump(),
        "own": form.is_configured,
        "signal": _signal(form.signal),
        "forwards": form.forwards,
        "trained": form.trained,
        "questions": form.questions,
        "seconds": form.seconds | {"total": form.total},
    }


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- for a terminal --------------------------------------------------------------------------------------------


def print_findings(findings: Findings, console: PlainConsole | None = None) -> None:
    """Shows what was drawn, what each form of an epoch would carry and cost, and what to take."""
    from pacorl.io.console import PlainConsole, labelled

    # A pipe has no width of its own, and rich's 80 columns would cut numbers.
    console = console or PlainConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH)
    for title, columns, rows in _tables(findings):
        _print_table(console, title, columns, rows)
    for name, choice in findings.recommended.items():
        change = f"{choice.configured} → {choice.value}" if choice.changes else f"{choice.configured} stays"
        label = f"{name.replace('_', ' ')}:"
        console.print(labelled(label, f"{change}: {choice.reason}", style="bold"), highlight=False)
    for note in findings.notes:
        console.print(labelled("note", note, style="yellow"), highlight=False)
    console.print(f"the probe took {duration(findings.seconds['probe'])}", highlight=False)


Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, columns, rows."""


def _tables(findings: Findings) -> Iterator[Table]:
    design, has_judge = findings.design, JUDGE in findings.candidates[0].variances.names
    drawn = f"{design.prompts} prompts × {design.seeds} starts × 2 children per step"
    read = f", read {', '.join(['as trained', *findings.readings])}" if has_judge else ""
    signal = ("signal", "S/N", "gain")
    shares = ("mean", "step", "start", *(["judge"] if has_judge else []))
    rows = [[finding.candidate.name, *_cells(finding, has_judge)] for finding in findings.candidates]
    yield f"who owns the reward's variance: {drawn}{read}", ("", *shares, *signal, "alike"), rows
    if findings.temperatures:
        rows = [[_temperature(finding), *_cells(finding, has_judge)] for finding in findings.temperatures]
        yield "temperature of the rewards, same images", ("", *shares, *signal, "alike"), rows
    columns = (
        "tree",
        "suffix",
        "signal",
        "gain",
        "forwards",
        "trained",
        "asked",
        "sampling",
        "reward",
        "update",
        "epoch",
    )
    yield "an epoch by its form; seconds, one phase after the other", columns, [_form_cells(f) for f in findings.forms]


def _print_table(console: PlainConsole, title: str, columns: Sequence[str], rows: list[list[str]]) -> None:
    from rich.table import Table as RichTable

    table = RichTable(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _cells(finding: Finding, has_judge: bool) -> list[str]:
    variances, signal = finding.variances, finding.signal
    return [
        f"{finding.mean:.3f}",
        _with_interval(variances.share(*variances.steps), "{:.0%}".format),
        *(f"{variances.share(name).value:.0%}" for name in (START, *([JUDGE] if has_judge else []))),
        f"{signal.share.value:.0%}",
        f"{signal.snr.value:.2g}",
        _with_interval(signal.gain, "{:.3f}".format),
        f"{finding.alike:.0%}",
    ]


def _form_cells(form: Form) -> list[str]:
    counts = [f"{count:,}" for count in (form.forwards, form.trained, form.questions)]
    signal = [f"{form.signal.share.value:.0%}", f"{form.signal.gain.value:.3f}"]
    return [*_form_name(form), *signal, *counts, *map("{:.1f}".format, [*form.seconds.values(), form.total])]


def _form_name(form: Form) -> tuple[str, str]:
    tree = f"{form.tree.seeds} × {' × '.join(map(str, form.tree.branches))}"
    return f"{tree} (own)" if form.is_configured else tree, form.suffix.says.removeprefix("solver ") or "all steps"


def _temperature(finding: Finding) -> str:
    return "as configured" if finding.temperature is None else f"{finding.temperature:g}"


def _with_interval(figure: Estimate, words: Callable[[float], str]) -> str:
    return f"{words(figure.value)} [{words(figure.low)}, {words(figure.high)}]"


# --- a plot ----------------------------------------------------------------------------------------------------

COLOURS = {"judge": "#dd8452", "start": "#b9b4aa", "sampling": "#46969a", "reward": "#dd8452", "update": "#9b8bc0"}
STEP_COLOURS = ("#46969a", "#7db8b8", "#b0d3cf")
WIDTH, LEFT, RIGHT, ROW, HEAD = 920, 230, 880, 24, 44


def plot(findings: Findings) -> str:
    """Three panels over each other: shares of variance, predicted gains, seconds of an epoch by its form."""
    panels = [_shares_panel(findings.candidates), _gains_panel(findings.candidates), _costs_panel(findings.forms)]
    drawn, y = [tag("rect", width="100%", height="100%", fill="white")], 8.0
    for marks, height in panels:
        drawn.append(tag("g", *marks, transform=f"translate(0 {y:g})"))
        y += height
    look = {"font_family": "sans-serif", "font_size": 12}
    return str(tag("svg", *drawn, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {y:g}", width=WIDTH,
                   height=y, **look))  # fmt: skip


Panel = tuple[list[Markup], float]
"""Its marks and its height."""


def _shares_panel(findings: Sequence[Finding]) -> Panel:
    names = ["step", *(name for name in (JUDGE, START) if name in findings[0].variances.names)]
    scale, marks = Scale(0, 1, LEFT, RIGHT), _head("Share of the reward's variance within a prompt")
    marks += _legend([(name, COLOURS.get(name, STEP_COLOURS[0])) for name in names])
    for row, finding in enumerate(findings):
        variances, y, x = finding.variances, HEAD + row * ROW, float(LEFT)
        stages = [(name, STEP_COLOURS[i % len(STEP_COLOURS)]) for i, name in enumerate(variances.steps)]
        stages += [(name, COLOURS[name]) for name in (JUDGE, START) if name in variances.names]
        marks.append(_row_label(finding.candidate.name, y))
        # Steps first: their whisker is then read on the same axis as their end.
        for name, colour in stages:
            width = variances.share(name).value * (RIGHT - LEFT)
            title = tag("title", f"{name}: {variances.share(name).value:.1%}")
            marks.append(tag("rect", title, x=x, y=y, width=width, height=ROW - 8, fill=colour))
            x += width
        marks.append(_whisker(variances.share(*variances.steps), scale, y + (ROW - 8) / 2))
    return _with_axis(marks, scale, len(findings), lambda value: f"{value:.0%}")


def _gains_panel(findings: Sequence[Finding]) -> Panel:
    scale = Scale(0, max(finding.signal.gain.high for finding in findings) or 1.0, LEFT, RIGHT)
    marks = _head("Predicted gain of one selection in a group as configured, in units of the reward")
    for row, finding in enumerate(findings):
        y = HEAD + row * ROW
        marks.append(_row_label(finding.candidate.name, y))
        marks.append(_whisker(finding.signal.gain, scale, y + (ROW - 8) / 2))
        marks.append(
            tag("circle", cx=scale(finding.signal.gain.value), cy=y + (ROW - 8) / 2, r=4.5, fill=STEP_COLOURS[0])
        )
    return _with_axis(marks, scale, len(findings), amount)


def _costs_panel(forms: Sequence[Form]) -> Panel:
    scale = Scale(0, max(form.total for form in forms) or 1.0, LEFT, RIGHT)
    marks = _head("Seconds of an epoch by tree (starts × children) and suffix")
    marks += _legend([(name, COLOURS[name]) for name in forms[0].seconds])
    for row, form in enumerate(forms):
        y, x = HEAD + row * ROW, float(LEFT)
        marks.append(_row_label(", ".join(_form_name(form)), y))
        for name, seconds in form.seconds.items():
            width = scale(seconds) - LEFT
            marks.append(tag("rect", x=x, y=y, width=width, height=ROW - 8, fill=COLOURS[name]))
            x += width
    return _with_axis(marks, scale, len(forms), amount)


def _head(title: str) -> list[Markup]:
    return [tag("text", title, x=LEFT, y=16, font_weight="bold")]


def _legend(entries: Sequence[tuple[str, str]]) -> list[Markup]:
    marks = []
    for index, (name, colour) in enumerate(entries):
        x = LEFT + 100 * index
        marks += [tag("rect", x=x, y=24, width=10, height=10, fill=colour), tag("text", name, x=x + 15, y=33)]
    return marks


def _row_label(name: str, y: float) -> Markup:
    return tag("text", name, x=LEFT - 10, y=y + 12, text_anchor="end")


def _whisker(figure: Estimate, scale: Scale, y: float) -> Markup:
    ends = scale(figure.low), scale(figure.high)
    line = tag("line", x1=ends[0], x2=ends[1], y1=y, y2=y)
    caps = [tag("line", x1=x, x2=x, y1=y - 4, y2=y + 4) for x in ends]
    return tag("g", line, *caps, stroke="#222", stroke_width=1.4)


def _with_axis(marks: list[Markup], scale: Scale, rows: int, words: Callable[[float], str]) -> Panel:
    bottom = HEAD + rows * ROW
    for value in ticks(scale.low, scale.high):
        x = scale(value)
        marks.insert(0, tag("line", x1=x, x2=x, y1=HEAD - 4, y2=bottom, stroke="#e4e0d8"))
        marks.append(tag("text", words(value), x=x, y=bottom + 14, text_anchor="middle", fill="#666"))
    return marks, bottom + 34.0
