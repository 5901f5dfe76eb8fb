"""`pacorl verify`: compare a run with its ledger, or compute an epoch or an evaluation again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Exit, Option

from pacorl.cli.shared import JsonOption, echo, print_json
from pacorl.config.options import LARGEST

if TYPE_CHECKING:
    from pacorl.lab.verify.audit import Kind
    from pacorl.lab.verify.recompute import Comparison


def verify(
    run: Path = Argument(help="A policy run's folder."),
    *,
    epoch: int | None = Option(
        None, min=1, max=LARGEST, help="Make this epoch again from the checkpoint before it, and compare."
    ),
    evaluation: int | None = Option(
        None, min=0, max=LARGEST, help="Make the evaluation after this epoch again from its checkpoint, and compare."
    ),
    output: JsonOption,
) -> None:
    """Hold a run to its ledger; with --epoch or --evaluation, compute one again. Exit code 1: something differs."""
    if epoch is not None and evaluation is not None:
        raise ValueError(f"--epoch {epoch} and --evaluation {evaluation} are two computations; name one of them")
    if epoch is not None:
        fine = _recompute(run, epoch, "epoch", as_json=output.as_json)
    elif evaluation is not None:
        fine = _recompute(run, evaluation, "evaluation", as_json=output.as_json)
    else:
        fine = _check(run, as_json=output.as_json)
    raise Exit(0 if fine else 1)


def _check(run: Path, *, as_json: bool) -> bool:
    from pacorl.lab.verify.audit import audit, ranges

    report = audit(run)
    if as_json:
        print_json(report.to_dict())
    else:
        for finding in report.findings:
            echo(f"{'ok' if finding.fine else 'ERROR':<6}{finding.topic:<13}{finding.text}")
        repeatable = f"--epoch may be {ranges(report.epochs)}, --evaluation may be {ranges(report.evaluations)}"
        echo(f"hashing took {report.overhead:.1%} of the epochs' time; {repeatable}")
    return report.fine


def _recompute(run: Path, epoch: int, kind: Kind, *, as_json: bool) -> bool:
    from pacorl.io.quiet import quiet_loading
    from pacorl.lab.verify.recompute import recompute
    from pacorl.runtime.processes import destroy_process_group

    quiet_loading()
    comparison = recompute(run, epoch, kind)
    # Else torch warns at the exit of every rank.
    destroy_process_group()
    if comparison is None:  # only the main process prints
        return True
    if as_json:
        print_json(comparison.to_dict())
    else:
        echo("\n".join(_lines(comparison)))
    return comparison.answer != "differs"


def _lines(comparison: Comparison) -> list[str]:
    lines = []
    for quantity in comparison.quantities:
        result = "equal bits"
        if not quantity.equal:
            result = f"{quantity.difference:.1e} apart, and the tolerance is {quantity.tolerance:.0e}"
        lines.append(f"{quantity.name:<19}{result}")

    # The verdict, with changes of the environment as a possible reason.
    first = f": {comparison.first.name} first" if comparison.first else ""
    reason = "in the same environment"
    changes = []
    for name, (then, now) in comparison.environment.items():
        changes.append(f"{name} was {then} and is {now}")

    if changes:
        link = "although" if comparison.answer == "equal bits" else "perhaps since"
        reason = f"{link} {', '.join(changes)}"
    return [*lines, f"{comparison.kind} {comparison.epoch} {comparison.answer}{first}; {reason}"]
