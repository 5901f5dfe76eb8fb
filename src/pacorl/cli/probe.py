"""`pacorl probe`: the share of a reward's variance that a run can learn from, measured before the run."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument

from pacorl.cli.shared import print_json, progress
from pacorl.cli.train import check_run
from pacorl.config.options import option
from pacorl.lab.probe.options import ProbeOptions

if TYPE_CHECKING:
    from rich.console import Console

    from pacorl.lab.probe.credit import CreditFinding
    from pacorl.lab.probe.probing import Findings

PIPE_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class ProbeFlags(ProbeOptions):
    """Flags of `pacorl probe`."""

    out: Path | None = option(None, "A folder for probe.json.")
    as_json: bool = option(False, "Print JSON.", flags=("--json",))


def probe(
    config: Path = Argument(help="A YAML file, or a recipe of `pacorl recipes`, such as tiny."),
    overrides: list[str] = Argument(None, help="Changes, as section.key=value."),
    *,
    flags: ProbeFlags,
) -> None:
    """Measure which step, noise level and size carry the signal, at the price of about one epoch."""
    from pacorl.config.base import load
    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.io.documents import write_json
    from pacorl.io.files import check_writable, claim_folder
    from pacorl.io.quiet import quiet_loading
    from pacorl.runtime.cores import use_cores

    # Check everything before torch and weights are loaded.
    run = load(PolicyConfig, config, overrides or [])
    if flags.out:
        check_writable(flags.out, folder=True)
        claim_folder(flags.out)
    check_run(run)

    # Draw and score samples.
    use_cores()
    quiet_loading()
    from pacorl.lab.probe.probing import probe as run_probe

    with progress("drawing", shown=not flags.as_json) as advance:
        findings = run_probe(run, flags, advance=advance)

    # Output.
    document = findings.document()
    if flags.as_json:
        print_json(document)
    else:
        print_findings(findings)
    # The folder was claimed above, before the hour of sampling.
    if flags.out:
        write_json(flags.out / "probe.json", document)


def print_findings(findings: Findings) -> None:
    """Print the shares of variance, the cost of an epoch, and the notes."""
    from rich.table import Table

    from pacorl.io.console import PlainConsole, labelled
    from pacorl.lab.probe.variance import JUDGE, START
    from pacorl.report.figures import duration

    # Without a terminal rich assumes 80 columns, which would cut numbers.
    console = PlainConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH)

    # The design.
    design = findings.design
    levels = [name for name in (START, JUDGE) if name in findings.candidates[0].variances.names]
    drawn = f"{design.prompts} prompts × {design.seeds} starts × 2 children per step"
    if JUDGE in levels:
        drawn += f", read {', '.join(findings.readings)}"
    console.print(drawn, highlight=False)

    # Shares of the variance by level.
    table = Table("", "mean", "step", *levels, "signal", "alike", title="shares of the reward's variance")
    for column in table.columns[1:]:
        column.justify = "right"
    for finding in findings.candidates:
        step = finding.variances.share(*finding.variances.steps)
        table.add_row(
            finding.candidate.name,
            f"{finding.mean:.3f}",
            f"{step.value:.0%} [{step.low:.0%}, {step.high:.0%}]",
            *(f"{finding.variances.share(name).value:.0%}" for name in levels),
            f"{finding.signal.value:.0%}",
            f"{finding.alike:.0%}",
        )
    console.print(table)

    if findings.credit is not None:
        print_credit(console, findings.credit)

    # Cost of an epoch.
    cost = findings.cost
    seconds = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in cost.seconds.items())
    work = f"{cost.forwards:,} forwards in sampling, {cost.trained:,} in training, {cost.questions:,} questions"
    console.print(labelled("an epoch:", f"{work}; {seconds}", style="bold"), highlight=False)
    for note in findings.notes:
        console.print(labelled("note", note, style="yellow"), highlight=False)
    console.print(f"the probe took {duration(findings.seconds['probe'])}", highlight=False)


def print_credit(console: Console, finding: CreditFinding) -> None:
    """Print how local panels are, and the signal of a gradient under each credit."""
    from rich.table import Table

    from pacorl.io.console import labelled

    # Both signals, since a credit may help within a prompt and not between prompts.
    table = Table("credit", "between prompts", "within a prompt", title="signal of a group's gradient")
    for signal in finding.signals:
        cells = []
        for estimate in (signal.between, signal.within):
            cells.append(f"{estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]")
        table.add_row(signal.credit, *cells)
    console.print(table)
    locality = f"{finding.share:.0%} of the change lies in parts without the panel: advantages.credit={finding.advice}"
    console.print(labelled("locality:", locality, style="bold"), highlight=False)
