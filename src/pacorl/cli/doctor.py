"""`pacorl doctor`: whether a run would run here, or whether a judge is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pacorl.serve.probe import JudgeProbe

MARKS = {"fine": "ok", "warning": "look", "error": "ERROR"}


def register(app: typer.Typer) -> None:
    """Adds this file's command."""
    app.command("doctor")(doctor)


def doctor(
    target: str = typer.Argument(
        "tiny",
        help="A run's config (YAML), or a judge: a checkpoint folder, hub name, server's URL or endpoints YAML.",
    ),
    overrides: list[str] = typer.Argument(None, help="With a config: changes, as section.key=value."),
    *,
    ask: bool = typer.Option(True, help="With a config: ask its judges and try its rewards."),
    model: str = typer.Option("", help="With a judge: its name at a server."),
    adapter: str = typer.Option("", help="With a judge: a PEFT adapter on top of the checkpoint."),
    api_key_env: str = typer.Option("", help="With a judge: the environment variable that holds the server's key."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check a whole run, or a judge alone. Exit code 0: fine; 1: something deserves a look; 2: it would not run."""
    from pacorl.engine.threads import use_cores

    use_cores()
    try:
        if _is_run(target):
            if model or adapter or api_key_env:
                raise ValueError(f"{target} is a run's config, which names its judge; change it with judge.key=value")
            code = _run(Path(target), overrides or [], ask=ask, as_json=as_json)
        else:
            if overrides:
                raise ValueError(f"{overrides[0]}: only a run's config takes changes, and {target} is a judge")
            code = _judge(target, model=model, adapter=adapter, api_key_env=api_key_env, as_json=as_json)
    except (ValueError, OSError, RuntimeError, ImportError) as fault:
        typer.echo(f"pacorl: {fault}", err=True)
        code = 2
    raise typer.Exit(code)


def _is_run(target: str) -> bool:
    """Whether a YAML is a run's config and not a list of endpoints. Raises ValueError for a judge's training."""
    from pacorl.io.documents import read_yaml

    if not target.endswith((".yaml", ".yml")):
        return False
    try:
        document = read_yaml(Path(target))
    except ValueError:
        return True  # loading it says where it is wrong
    keys = set(document) if isinstance(document, dict) else set()
    if keys & {"tuning", "data", "loss"}:
        raise ValueError(f"{target} trains a judge; check it with `pacorl train-reward {target} --dry-run`")
    return "judges" not in keys


def _run(path: Path, overrides: list[str], *, ask: bool, as_json: bool) -> int:
    from rich.console import Console

    from pacorl.config.base import load
    from pacorl.config.policy_run import PolicyRun
    from pacorl.plan.doctor import EXIT_CODES, examine
    from pacorl.plan.plan import print_components

    found = examine(load(PolicyRun, path, overrides), ask=ask)
    if as_json:
        typer.echo(found.to_json())
        return EXIT_CODES[found.severity]
    if found.plan:
        print_components(found.plan, Console())
    for finding in found.findings:
        typer.echo(f"{MARKS[finding.severity]:<6}{finding.topic:<18}{finding.text}")
    return EXIT_CODES[found.severity]


def _judge(judge: str, *, model: str, adapter: str, api_key_env: str, as_json: bool) -> int:
    """Names served, a real question either way, token ids, versions, memory."""
    import json

    from pacorl.plan.doctor import EXIT_CODES, judge_severity
    from pacorl.score.reward import PacoReward
    from pacorl.serve.probe import probe

    with PacoReward.from_pretrained(judge, model=model, adapter=adapter, api_key_env=api_key_env) as reward:
        found = probe(reward.judge, name=reward.name)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else "\n".join(_lines(found)))
    return EXIT_CODES[judge_severity(found)]


def _lines(found: JudgeProbe) -> list[str]:
    """The probe for a terminal."""
    lines = [f"judge               {found.judge}"]
    lines += [f"served              {url}: {', '.join(names) or 'does not say'}" for url, names in found.served.items()]
    ids = ", ".join(f"{word} {'+'.join(map(str, ids))}" for word, ids in found.token_ids.items())
    lines.append(f"token ids           {ids or 'not told; answers are read by their text'}")
    lines.append(f"P(Yes), one hero    {_number(found.p_yes_same)}")
    lines.append(f"P(Yes), two heroes  {_number(found.p_yes_different)}")
    lines.append(f"seconds             {found.seconds:.2f}")
    lines += [f"{'memory':<20}{what}: {gib:.2f} GiB" for what, gib in found.memory_gib.items()]
    lines += [f"{'version':<20}{what} {number}" for what, number in found.versions.items()]
    return lines + [f"{'problem':<20}{problem}" for problem in found.problems]


def _number(value: float | None) -> str:
    return "no answer" if value is None else f"{value:.4f}"
