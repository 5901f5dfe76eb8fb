"""Checks of a run on this machine before it starts: `pacorl doctor CONFIG`.

The common failures of a run's first hour are tested beforehand: versions, data and the requirements of rewards,
weights, memory per component against the card, disk space for checkpoints, ports, a real question to every judge, and
an image of noise to every other reward. It trains nothing, and connects only to the addresses in the config.
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

from pacorl.core.devices import available_device, check_compiled, driver_version
from pacorl.grpo.builders import without_idle_judges
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import parse_json
from pacorl.judge import JUDGES, open_judge
from pacorl.judge.http.endpoints import listens
from pacorl.judge.judge import BackendOptions, Judge, close_judge
from pacorl.lab.plan.plan import Plan, card_shortage, disk_shortage, plan_policy, size_text
from pacorl.lab.plan.sources import MissingFile
from pacorl.records.prompts import prompts_from
from pacorl.rewards import asks_judge, build_rewards
from pacorl.rewards.reward import smoke_test
from pacorl.serve.readiness import JudgeProbe, probe
from pacorl.types import Size

Severity = Literal["fine", "warning", "error"]
EXIT_CODES: dict[Severity, int] = {"fine": 0, "warning": 1, "error": 2}
"""warning: the run would start, possibly with problems. error: it would fail."""

TIGHT = 0.92
"""Share of a card's memory above which fragmentation may cause an out-of-memory error."""
CUDA_BYTES = 2**30
"""The CUDA context and kernels' scratch space, which the plan does not include."""
SLOW_ON_CPU = 10**9
"""Parameters of a transformer above which training on a CPU is impractical."""
RENDEZVOUS = 29500
"""Default port of accelerate and torchrun."""
LEAST_DRIVERS = {12: 525, 13: 580}
"""CUDA's major version → the oldest branch of the driver that runs it
(docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""
OWN_DRIVERS = {(12, 8): 570, (13, 0): 580}
"""CUDA's version → the driver's branch of its release. Between the oldest branch and this one, features are limited."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    severity: Severity
    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Results of all checks."""

    findings: tuple[Finding, ...]
    plan: Plan | None
    """None if the config is invalid."""

    @property
    def severity(self) -> Severity:
        """The worst severity."""
        return max((finding.severity for finding in self.findings), key=EXIT_CODES.__getitem__, default="fine")

    def to_json(self) -> str:
        """Return findings, the worst severity and the plan."""
        document = {
            "severity": self.severity,
            "findings": [asdict(finding) for finding in self.findings],
            "plan": parse_json(self.plan.to_json()) if self.plan else None,
        }
        return json.dumps(document, indent=2)


def examine(config: PolicyConfig, *, ask: bool = True) -> Diagnosis:
    """Check all requirements of a run. Failures become findings, not exceptions.

    Args:
        ask: whether judges are asked and rewards tried, which loads the models of this process.
    """
    # This installation, and the plan.
    findings = [*_versions(), *_driver(torch.version.cuda, driver_version()), *_port_and_folder(config)]
    try:
        config = without_idle_judges(config)
        if config.model.compile != "none":
            check_compiled(config.model.quantize, available_device())
        plan = plan_policy(config)
    except (ValueError, OSError) as fault:
        # The judge is asked all the same, so that its faults are reported in the same run.
        findings.append(Finding("error", "config", str(fault)))
        return Diagnosis((*findings, *_judges(config, (), ask=ask)), None)

    # Data and weights.
    absent: dict[str, list[Finding]] = {"data": [], "weights": []}
    for absence in dict.fromkeys(plan.absences):
        topic = "data" if absence.key.startswith("prompts.") else "weights"
        absent[topic].append(Finding("error", topic, f"{absence.key} = {absence.source}: {absence.remedy}"))
    if not absent["data"]:
        findings.append(Finding("fine", "data", "prompts are readable, without leaks, and complete for the rewards"))
    # Shortages are reported with memory and disk, as errors.
    shortages = (card_shortage(plan), disk_shortage(config, plan))
    findings += [Finding("warning", "plan", text) for text in plan.warnings if text not in shortages]
    findings += absent["data"] + absent["weights"]
    if not absent["weights"]:
        findings.append(Finding("fine", "weights", "all weights to load are on this machine"))

    # Memory, disk, judges and rewards.
    findings += [*_memory(plan), _disk(config, plan)]
    if not (config.judge or config.evaluation.judge):
        findings.append(Finding("fine", "judge", "none is needed: no reward or measure asks one"))
    findings += _judges(config, plan.absences, ask=ask)
    if ask:
        findings += _rewards(config, plan.absences)
    return Diagnosis(tuple(findings), plan)


def judge_severity(answers: JudgeProbe) -> Severity:
    """Return error without an answer, and warning for answers of a poor judge."""
    if answers.errors:
        return "error"
    return "warning" if answers.problems else "fine"


# --- this installation -----------------------------------------------------------------------------------------


def _versions() -> list[Finding]:
    from packaging.requirements import Requirement

    try:
        requirements = requires("pacorl") or ()
    except PackageNotFoundError:
        text = "pacorl runs from a source tree, and its requirements are unchecked; `pip install -e .` installs them"
        return [Finding("warning", "versions", text)]

    faults = []
    for text in requirements:
        requirement = Requirement(text)
        # Requirements of extras have a marker.
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            faults.append(f"{requirement.name} is not installed; `pip install '{requirement}'`")
            continue
        # A nightly build of a newer torch satisfies the requirement, which packaging denies by default.
        if not requirement.specifier.contains(installed, prereleases=True):
            faults.append(f"{requirement.name} {installed} is installed; `pip install '{requirement}'`")
    if faults:
        return [Finding("error", "versions", fault) for fault in faults]
    shown = ", ".join(f"{name} {version(name)}" for name in ("pacorl", "torch", "diffusers", "transformers", "peft"))
    return [Finding("fine", "versions", f"python {sys.version.split()[0]}, {shown}")]


def _driver(cuda: str | None, driver: str) -> Iterator[Finding]:
    """Check that the driver supports torch's version of CUDA. Too old a driver hides the card from torch."""
    branch = driver.partition(".")[0]
    if cuda is None or not branch.isdigit():
        return
    major, minor = map(int, cuda.split(".")[:2])
    least = LEAST_DRIVERS.get(major, max(LEAST_DRIVERS.values()))
    recommended = max((needed for version, needed in OWN_DRIVERS.items() if version <= (major, minor)), default=least)

    # Too old to run at all, too old for some features, or fine.
    fix = f"update the driver to {max(least, recommended)} or newer, or install a torch built for an older CUDA"
    text = f"{driver}, and this torch is built with CUDA {cuda}"
    if int(branch) < least:
        yield Finding("error", "driver", f"{text}, which needs {least} or newer and finds no card: {fix}")
    elif int(branch) < recommended:
        yield Finding("warning", "driver", f"{text}, which came with {recommended} and may lack features here: {fix}")
    else:
        yield Finding("fine", "driver", text)


def _port_and_folder(config: PolicyConfig) -> Iterator[Finding]:
    """Check that the processes' port is free, and that the run's folder can be written and holds no run."""
    port = f"{os.environ.get('MASTER_PORT', RENDEZVOUS)}, where processes meet,"
    if listens("127.0.0.1", int(os.environ.get("MASTER_PORT", RENDEZVOUS))):
        text = f"{port} is in use: give another with --main_process_port (torchrun: --master_port)"
        yield Finding("warning", "ports", text)
    else:
        yield Finding("fine", "ports", f"{port} is free")

    out = config.out.absolute()
    existing = out
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Finding("error", "disk", f"out = {config.out} cannot be written; name another folder")
    elif any((out / "checkpoints").glob("step-*")):
        yield Finding("warning", "disk", f"out = {config.out} holds a run: go on with --resume auto, or change out")


# --- memory and disk -------------------------------------------------------------------------------------------


def _memory(plan: Plan) -> Iterator[Finding]:
    # The device, and all components in main memory, with and without pages of files.
    host = plan.host_bytes
    resident = plan.held_bytes
    if plan.device_bytes:
        yield _on_card(plan, plan.device_bytes)
    else:
        # The CPU is the device, and its memory the host's.
        host += plan.peak_bytes
        resident += plan.peak_bytes
        parameters = next((row.parameters or 0 for row in plan.rows if row.component == "transformer"), 0)
        if parameters > SLOW_ON_CPU:
            needed = size_text(plan.least_bytes + CUDA_BYTES)
            yield Finding("error", "memory", f"no CUDA device is here; the run needs one of {needed} or more")
        else:
            text = f"{size_text(plan.peak_bytes)} on the CPU, enough for a generator of this size"
            yield Finding("fine", "memory", text)

    # Pages of files may be dropped: without them a run fits, but loads slowly.
    memory = _main_memory()
    text = f"{size_text(host)} of {size_text(memory)} main memory, for all processes"
    if resident > memory:
        yield Finding("error", "memory", text)
    elif host > memory:
        pages = f"{size_text(resident)} without pages of the checkpoints' files, which then are read more than once"
        yield Finding("warning", "memory", f"{text}; {pages}: loading is slow")
    else:
        yield Finding("fine", "memory", text)


def _main_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _on_card(plan: Plan, card: int) -> Finding:
    shortage = card_shortage(plan)
    if shortage:
        return Finding("error", "memory", shortage)
    needed = plan.peak_bytes + CUDA_BYTES
    text = f"{size_text(needed)} of {size_text(card)} on {plan.device}, with 1 GiB for CUDA"
    if needed > TIGHT * card:
        return Finding("warning", "memory", f"{text}: tight; lower sampling.batch or evaluation.batch to be sure")
    return Finding("fine", "memory", text)


def _disk(config: PolicyConfig, plan: Plan) -> Finding:
    shortage = disk_shortage(config, plan)
    if shortage:
        return Finding("error", "disk", shortage)
    return Finding("fine", "disk", f"{size_text(plan.disk_bytes)} for checkpoints fit into {config.out}")


# --- judges and rewards ----------------------------------------------------------------------------------------


def _judges(config: PolicyConfig, absences: Sequence[MissingFile], *, ask: bool) -> Iterator[Finding]:
    """Check that each judge of the config answers."""
    absent = {absence.key.rpartition(".")[0] for absence in absences}
    for key, judge in {"judge": config.judge, "evaluation.judge": config.evaluation.judge}.items():
        if not judge:
            continue
        if not ask:
            yield Finding("fine", key, "not asked: --no-ask")
        elif JUDGES[judge.backend].in_process and key in absent:
            yield Finding("warning", key, "not asked: its weights are absent")
        else:
            yield _asked(key, judge)


def _asked(key: str, options: BackendOptions) -> Finding:
    # A fault of loading or asking the judge is a finding, as any other.
    judge: Judge | None = None
    device = torch.device(available_device())
    try:
        judge = open_judge(options, device=device, waits=False)
        answers = probe(judge, name=options.name)
    except (ValueError, OSError, RuntimeError, ImportError) as fault:
        return Finding("error", key, f"{fault}{JUDGES[options.backend].remedy(options)}")
    finally:
        close_judge(judge)
    if answers.problems:
        return Finding(judge_severity(answers), key, "; ".join(answers.problems))
    p_yes = f"P(Yes) {answers.p_yes_same:.2f} for one hero and {answers.p_yes_different:.2f} for two"
    return Finding("fine", key, f"{answers.judge} answers: {p_yes}, {answers.seconds:.1f} s")


def _rewards(config: PolicyConfig, absences: Sequence[MissingFile]) -> Iterator[Finding]:
    """Try every reward without a judge on one image of noise."""
    absent = {absence.key for absence in absences}
    if absent & {"prompts.train", "prompts.evaluation"}:
        return
    for key, rewards, source, size in (
        ("rewards", config.rewards, config.prompts.train, config.sampling.size),
        ("evaluation.rewards", config.evaluation.rewards, config.prompts.evaluation, config.evaluation.size),
    ):
        built = build_rewards([reward for reward in rewards if not asks_judge(reward)], judge=None)
        for name, reward in built.items():
            if any(file.startswith(f"{key}.{name}.") for file in absent):
                continue
            try:
                # Loads the reward's weights.
                smoke_test({name: reward}, prompts_from(source, limit=1), size=Size(*size))
            except (ValueError, OSError, RuntimeError, ImportError) as fault:
                yield Finding("error", "rewards", str(fault))
            else:
                yield Finding("fine", "rewards", f"{name} scores a trial image")
