"""`pacorl train-reward`."""

from __future__ import annotations

from pathlib import Path

import typer

from pacorl.cli.resume import AUTO, ResumableCommand


def register(app: typer.Typer) -> None:
    """Adds this file's command."""
    app.command("train-reward", cls=ResumableCommand)(train_reward)


def train_reward(
    config: Path = typer.Argument(help="A YAML file, such as configs/reward/tiny.yaml."),
    overrides: list[str] = typer.Argument(None, help="Changes, as section.key=value."),
    resume: str = typer.Option(
        "", "--resume", metavar="auto", help="Go on from the newest complete checkpoint of the run's folder."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Check everything and print what it would do. Exit code 2: something is absent."
    ),
    as_json: bool = typer.Option(False, "--json", help="With --dry-run: print it as JSON."),
) -> None:
    """Train a judge on comparisons; `pacorl dataset import` and `export` make them of your own rankings."""
    from transformers.utils import logging

    from pacorl.config.base import load
    from pacorl.config.judge_run import RewardRun
    from pacorl.engine.threads import use_cores

    if resume not in {"", AUTO}:
        raise ValueError(
            f"--resume {resume}: a judge's training goes on from its run's newest checkpoint: --resume auto"
        )
    run = load(RewardRun, config, overrides or [])
    use_cores()
    logging.disable_progress_bar()  # of loading weights; training has its own
    if dry_run:
        from pacorl.plan.judge_plan import plan_reward

        plan = plan_reward(run)
        typer.echo(plan.to_json() if as_json else "\n".join(plan.lines()))
        raise typer.Exit(plan.exit_code)
    from pacorl.train_judge.run import JudgeTrainer

    folder = JudgeTrainer(run, resume=bool(resume)).run()
    typer.echo(f"done: {folder / 'summary.json'}")
