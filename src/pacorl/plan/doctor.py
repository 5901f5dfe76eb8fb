"""Whether a run would run here: `pacorl doctor CONFIG`.

Everything that ends runs in their first hour is tried beforehand: versions, data and what rewards need of it, weights,
memory per component against the card, room for checkpoints, ports, a real question to every judge, and a sheet of
noise to every other reward. Nothing is trained and no network is asked but the addresses that the config names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal

import torch

from pacorl.config.policy_run import PolicyRun
from pacorl.data.records import prompts_from
from pacorl.io.documents import parse_json
from pacorl.judges import JUDGES, open_judge
from pacorl.judges.http.endpoints import listens
from pacorl.judges.judge import BackendOptions, Judge, close_judge
from pacorl.plan import sources
from pacorl.plan.plan import Plan, card_shortage, disk_shortage, plan_policy, size_text
from pacorl.rewards import asks_judge, build_rewards
from pacorl.rewards.reward import smoke_test
from pacorl.serve.probe import JudgeProbe, probe
from pacorl.train.builders import without_idle_judges
from pacorl.types import Size

Severity = Literal["fine", "warning", "error"]
EXIT_CODES: dict[Severity, int] = {"fine": 0, "warning": 1, "error": 2}
"""warning: it would run, and something deserves a look. error: it would not, or not to its end."""

TIGHT = 0.92
"""Share of a card above which fragments of the allocator may tip it over."""
CUDA_BYTES = 2**30
"""The CUDA context and kernels' scratch space, which no plan sees."""
SLOW_ON_CPU = 10**9
"""Parameters of a generator that nobody trains without a card."""
RENDEZVOUS = 29500
"""Where accelerate and torchrun meet unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    severity: Severity
    topic: str
    text: str


NO_JUDGE = Finding("fine", "judge", "none is needed: neither a reward nor a measure asks one")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was looked at."""

    findings: tuple[Finding, ...]
    plan: Plan | None
    """None where the config could not be planned."""

    @property
    def severity(self) -> Severity:
        """The worst."""
        return max((finding.severity for finding in self.findings), key=lambda one: EXIT_CODES[one], default="fine")

    def to_json(self) -> str:
        """Findings, the worst severity and the plan."""
        document = {"severity": self.severity, "findings": [asdict(finding) for finding in self.findings]}
        return json.dumps(document | {"plan": parse_json(self.plan.to_json()) if self.plan else None}, indent=2)


def examine(config: PolicyRun, *, ask: bool = True) -> Diagnosis:
    """Looks at all that a run needs. With `ask` judges are asked and rewards tried, which loads those of this process.

    What is wrong is found, not raised.
    """
    findings = [*_versions(), *_ports(), *_folder(config)]
    try:
        config = without_idle_judges(config)
        planned = plan_policy(config)
    except (ValueError, OSError) as fault:
        return Diagnosis((*findings, Finding("error", "config", str(fault)), *_judges(config, (), ask=ask)), None)
    said = [*card_shortage(planned), *disk_shortage(config, planned)]
    findings += _data(planned)
    findings += [Finding("warning", "plan", text) for text in planned.warnings if text not in said]
    findings += [Finding("error", _topic(one), f"{one.key} = {one.source}: {one.remedy}") for one in planned.absences]
    findings += _weights(planned)
    findings += [*_memory(planned), *_disk(config, planned)]
    findings += _judges(config, planned.absences, ask=ask) if config.judge or config.evaluation.judge else [NO_JUDGE]
    findings += _rewards(config, planned.absences, ask=ask)
    return Diagnosis(tuple(findings), planned)


def judge_severity(found: JudgeProbe) -> Severity:
    """No answer is an error; answers that show no judgement deserve a look."""
    return "error" if found.errors else "warning" if found.problems else "fine"


# --- this installation -----------------------------------------------------------------------------------------


def _versions() -> list[Finding]:
    from packaging.requirements import Requirement

    faults = []
    for requirement in map(Requirement, requires("pacorl") or ()):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue  # of an extra
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            faults.append(f"{requirement.name} is not installed; `pip install '{requirement}'`")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            faults.append(f"{requirement.name} {found} is installed; `pip install '{requirement}'`")
    shown = ", ".join(f"{name} {version(name)}" for name in ("pacorl", "torch", "diffusers", "transformers", "peft"))
    good = Finding("fine", "versions", f"python {sys.version.split()[0]}, {shown}")
    return [good] if not faults else [Finding("error", "versions", fault) for fault in faults]


def _ports() -> list[Finding]:
    port = int(os.environ.get("MASTER_PORT", RENDEZVOUS))
    if not listens("127.0.0.1", port):
        return [Finding("fine", "ports", f"{port}, where processes meet, is free")]
    text = f"{port}, where processes meet, is in use: give another with --main_process_port (torchrun: --master_port)"
    return [Finding("warning", "ports", text)]


def _folder(config: PolicyRun) -> Iterator[Finding]:
    existing = next(one for one in (config.out.absolute(), *config.out.absolute().parents) if one.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Finding("error", "disk", f"out = {config.out} cannot be written; name another folder")
    elif any((config.out / "checkpoints").glob("step-*")):
        yield Finding("warning", "disk", f"out = {config.out} holds a run: go on with --resume auto, or change out")


# --- memory and disk -------------------------------------------------------------------------------------------


def _topic(absence: sources.MissingFile) -> str:
    return "data" if absence.key.startswith("prompts.") else "weights"


def _data(found: Plan) -> Iterator[Finding]:
    if not any(_topic(absence) == "data" for absence in found.absences):
        yield Finding("fine", "data", "prompts are read, kept apart, and hold what the rewards need")


def _weights(found: Plan) -> Iterator[Finding]:
    if not any(_topic(absence) == "weights" for absence in found.absences):
        yield Finding("fine", "weights", "all that are loaded here are on this machine")


def _memory(found: Plan) -> Iterator[Finding]:
    needed, card = found.peak_bytes, found.device_bytes
    if card:
        yield _on_card(found, needed + CUDA_BYTES, card)
    else:
        yield _without_card(found, needed)
    host, here = found.place_bytes("host") + (0 if card else needed), _main_memory()
    text = f"{size_text(host)} of {size_text(here)} main memory, for one process"
    yield Finding("error" if host > here else "fine", "memory", text)


def _on_card(found: Plan, needed: int, card: int) -> Finding:
    if shortage := card_shortage(found):
        return Finding("error", "memory", shortage[0])
    text = f"{size_text(needed)} of {size_text(card)} on {found.device}, with 1 GiB for CUDA"
    if needed > TIGHT * card:
        return Finding("warning", "memory", f"{text}: tight; lower sampling.batch or evaluation.batch to be sure")
    return Finding("fine", "memory", text)


def _without_card(found: Plan, needed: int) -> Finding:
    large = max((row.parameters or 0 for row in found.rows if row.component == "transformer"), default=0)
    if large > SLOW_ON_CPU:
        text = f"no CUDA device is here; the run needs one of {size_text(needed + CUDA_BYTES)} or more"
        return Finding("error", "memory", text)
    return Finding("fine", "memory", f"{size_text(needed)} on the CPU, which a generator of this size can bear")


def _main_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _disk(config: PolicyRun, found: Plan) -> Iterator[Finding]:
    shortage = disk_shortage(config, found)
    yield from (Finding("error", "disk", text) for text in shortage)
    if not shortage:
        yield Finding("fine", "disk", f"{size_text(found.place_bytes('disk'))} for checkpoints fit into {config.out}")


# --- judges and rewards ----------------------------------------------------------------------------------------


def _judges(config: PolicyRun, absences: Sequence[sources.MissingFile], *, ask: bool) -> Iterator[Finding]:
    """Whether each judge that is needed answers."""
    judges = {"judge": config.judge, "evaluation.judge": config.evaluation.judge}
    absent = {absence.key.rpartition(".")[0] for absence in absences}
    for key, judge in judges.items():
        if judge is None:
            continue
        if not ask or (JUDGES[judge.backend].in_process and key in absent):
            why = "its weights are absent" if ask else "--no-ask"
            yield Finding("fine" if not ask else "warning", key, f"not asked: {why}")
        else:
            yield _asked(key, judge)


def _asked(key: str, config: BackendOptions) -> Finding:
    judge: Judge | None = None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        judge = open_judge(config, device=device)
        found = probe(judge, name=config.name)
    except (ValueError, OSError, RuntimeError, ImportError) as fault:
        return Finding("error", key, f"{fault}{JUDGES[config.backend].remedy(config)}")
    finally:
        close_judge(judge)
    if found.problems:
        return Finding(judge_severity(found), key, "; ".join(found.problems))
    answers = f"P(Yes) {found.p_yes_same:.2f} for one hero and {found.p_yes_different:.2f} for two"
    return Finding("fine", key, f"{found.judge} answers: {answers}, {found.seconds:.1f} s")


def _rewards(config: PolicyRun, absences: Sequence[sources.MissingFile], *, ask: bool) -> Iterator[Finding]:
    """Tries every reward that is no judge on one sheet of noise."""
    needed = {absence.key for absence in absences}
    if not ask or needed & {"prompts.train", "prompts.evaluation"}:
        return
    for key, several, source, size in (
        ("rewards", config.rewards, config.prompts.train, config.sampling.size),
        ("evaluation.rewards", config.evaluation.rewards, config.prompts.evaluation, config.evaluation.size),
    ):
        built = build_rewards([one for one in several if not asks_judge(one)], judge=None)
        for name, reward in built.items():
            if any(absence.startswith(f"{key}.{name}.") for absence in needed):
                continue
            try:
                smoke_test({name: reward}, prompts_from(source, limit=1), size=Size(*size))
            except (ValueError, OSError, RuntimeError, ImportError) as fault:
                yield Finding("error", "rewards", str(fault))
            else:
                yield Finding("fine", "rewards", f"{name} scores a trial sheet")
