"""`pacorl train-policy` and `pacorl report`."""

from __future__ import annotations

from pathlib import Path

import typer

from pacorl.cli.resume import ResumableCommand


def register(app: typer.Typer) -> None:
    """Adds this file's commands."""
    app.command("train-policy", cls=ResumableCommand)(train_policy)
    app.command("report")(report)


def train_policy(
    config: Path = typer.Argument(help="A YAML file, such as configs/tiny.yaml."),
    overrides: list[str] = typer.Argument(None, help="Changes, as section.key=value."),
    resume: str = typer.Option(
        "",
        "--resume",
        metavar="auto|CHECKPOINT",
        help="auto, or no value: go on from the newest checkpoint of the run's folder, or start where there is none; "
        "or a checkpoint's folder, of this run or another.",
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Check everything and print what it would need. Exit code 2: something is absent."
    ),
    as_json: bool = typer.Option(False, "--json", help="With --dry-run: print the plan as JSON."),
) -> None:
    """Train a generator with PaCo-GRPO."""
    from pacorl.config.base import load
    from pacorl.config.policy_run import PolicyRun

    run = load(PolicyRun, config, overrides or [])
    if dry_run:
        from pacorl.plan.plan import plan, print_plan

        found = plan(run)
        print(found.to_json()) if as_json else print_plan(found)
        raise typer.Exit(found.exit_code)
    from pacorl.engine.runtime import destroy_process_group
    from pacorl.engine.threads import use_cores
    from pacorl.report import write_report
    from pacorl.train.trainer import train_policy as train

    use_cores()
    folder = train(run, resume=resume)
    if destroy_process_group():
        typer.echo(f"done: {write_report(folder)}")


def report(run: Path = typer.Argument(help="A run's folder.")) -> None:
    """Build a run's page again."""
    from pacorl.report import write_report

    typer.echo(write_report(run))
