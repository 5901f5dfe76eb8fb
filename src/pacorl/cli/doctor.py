"""`pacorl doctor`: whether a run would run here, or whether a judge is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Exit, Option

from pacorl.cli.shared import OnlyJudge, echo, echo_errors, echo_json, print_json
from pacorl.types import TINY

if TYPE_CHECKING:
    from pacorl.serve.readiness import JudgeProbe

MARKS = {"fine": "ok", "warning": "look", "error": "ERROR"}


@dataclass(frozen=True, kw_only=True)
class ExaminedJudge(OnlyJudge):
    """Access to the judge in the command's argument."""

    judge: str = ""


def doctor(
    target: str = Argument(
        "tiny",
        help="A run's config (YAML) or recipe, or a judge: a checkpoint, server's URL or endpoints YAML.",
    ),
    overrides: list[str] = Argument(None, help="With a config: changes, as section.key=value."),
    *,
    ask: bool = Option(True, help="With a config: ask its judges and try its rewards."),
    access: ExaminedJudge,
    as_json: bool = Option(False, "--json", help="Print JSON."),
) -> None:
    """Check a whole run, or a judge alone. Exit code 0: fine; 1: something deserves a look; 2: it would not run."""
    from pacorl.runtime.cores import use_cores

    # The answer's exit code depends on the kind of the target.
    use_cores()
    try:
        if _is_run(target):
            # They would have no effect, and the user would take the config's judge for this one.
            if access != ExaminedJudge():
                raise ValueError(f"{target} is a run's config, which names its judge; change it with judge.key=value")
            code = _examine_run(Path(target), overrides or [], ask=ask, as_json=as_json)
        else:
            if overrides:
                raise ValueError(f"{overrides[0]}: only a run's config takes changes, and {target} is a judge")
            code = _examine_judge(target, access, as_json=as_json)
    # Exit code 1 means "deserves a look" here, so faults are not left to the command line, which would return 1.
    except (ValueError, OSError, RuntimeError, ImportError) as fault:
        echo_errors(f"pacorl: {fault}")
        code = 2
    raise Exit(code)


def _is_run(target: str) -> bool:
    """Whether a YAML is a run's config and not a list of endpoints. Raises ValueError for a judge's training."""
    from pacorl.config.recipes import YAML, config_file, recipe_names
    from pacorl.io.documents import read_yaml

    is_recipe = target != TINY and target in recipe_names()  # `tiny` is the embedded judge
    if not is_recipe and not target.endswith(YAML):
        return False
    try:
        document = read_yaml(config_file(Path(target)))
    except ValueError:
        return True  # loading it reports the fault's line
    # Trainings of judges and of characters have plans of their own.
    keys = set(document) if isinstance(document, dict) else set()
    if keys & {"tuning", "data", "loss"}:
        raise ValueError(f"{target} trains a judge; check it with `pacorl train-reward {target} --dry-run`")
    if keys & {"gallery", "prior", "trigger"}:
        raise ValueError(
            f"{target} trains a character; check it with `pacorl train-character FOLDER --config {target} --dry-run`"
        )
    # A description of servers is a YAML too; `judges` is no key of a run.
    return "judges" not in keys


def _examine_run(path: Path, overrides: list[str], *, ask: bool, as_json: bool) -> int:
    from pacorl.config.base import load
    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.io.console import PlainConsole
    from pacorl.io.quiet import quiet_loading
    from pacorl.lab.doctor import EXIT_CODES, examine
    from pacorl.lab.plan.plan import print_components

    run = load(PolicyConfig, path, overrides)
    quiet_loading()
    # Findings, or with --json the whole diagnosis.
    diagnosis = examine(run, ask=ask)
    if as_json:
        echo_json(diagnosis.to_json())
        return EXIT_CODES[diagnosis.severity]
    if diagnosis.plan:
        print_components(diagnosis.plan, PlainConsole())
    for finding in diagnosis.findings:
        echo(f"{MARKS[finding.severity]:<6}{finding.topic:<18}{finding.text}")
    return EXIT_CODES[diagnosis.severity]


def _examine_judge(judge: str, access: ExaminedJudge, *, as_json: bool) -> int:
    """Probe a judge: served names, a real question either way, token ids, versions, memory."""
    from pacorl.judge import check_judge

    check_judge(judge, adapter=access.judge_adapter)
    from pacorl.judge.paco_reward import PacoReward
    from pacorl.lab.doctor import EXIT_CODES, judge_severity
    from pacorl.serve.readiness import probe

    with PacoReward.from_pretrained(judge, **access.judge_access) as reward:
        answers = probe(reward.judge, name=reward.name)
    if as_json:
        print_json(answers.to_dict())
    else:
        echo("\n".join(_lines(answers)))
    return EXIT_CODES[judge_severity(answers)]


def _lines(probe: JudgeProbe) -> list[str]:
    """Format the probe for a terminal."""
    facts = [("judge", probe.judge)]
    for url, names in probe.served.items():
        facts.append(("served", f"{url}: {', '.join(names) or 'does not say'}"))

    # The test questions.
    words = []
    for word, ids in probe.token_ids.items():
        words.append(f"{word} {'+'.join([str(number) for number in ids])}")
    facts.append(("token ids", ", ".join(words) or "not told; answers are read by their text"))
    for label, p_yes in (("one hero", probe.p_yes_same), ("two heroes", probe.p_yes_different)):
        facts.append((f"P(Yes), {label}", "no answer" if p_yes is None else f"{p_yes:.4f}"))
    facts.append(("seconds", f"{probe.seconds:.2f}"))

    # The environment.
    facts += [("memory", f"{holder}: {gib:.2f} GiB") for holder, gib in probe.memory_gib.items()]
    facts += [("version", f"{library} {number}") for library, number in probe.versions.items()]
    facts += [("problem", problem) for problem in probe.problems]
    return [f"{label:<20}{fact}" for label, fact in facts]
