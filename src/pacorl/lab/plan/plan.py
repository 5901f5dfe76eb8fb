"""What a run would need, before it is run: `pacorl train-policy CONFIG --dry-run`.

The config's prompts and sizes are checked, absent data and weights are listed with where to get them, and a table
says how much memory each component takes. No weights are loaded and no network is asked.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pacorl.config.base import ConfigError
from pacorl.core.devices import available_device
from pacorl.generate.generator import SIZE
from pacorl.grpo.builders import without_idle_judges
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.judge import BackendOptions, InProcessOptions
from pacorl.lab.plan import sources
from pacorl.lab.plan.balance import Balance, balance_of
from pacorl.lab.plan.components import (
    PHASES,
    PLACES,
    Phase,
    Place,
    Row,
    generation_rows,
    judge_rows,
    policy_on_meta,
    rows,
)
from pacorl.lab.plan.sources import MissingFile
from pacorl.lab.plan.work import Work, work_of
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import PolicyOptions
from pacorl.records.leaks import check_leaks
from pacorl.records.prompts import prompts_from
from pacorl.rewards import check_rewards
from pacorl.runtime.logbook import check_trackers
from pacorl.types import TINY, Prompt, Size

if TYPE_CHECKING:
    from pacorl.io.console import PlainConsole

AUTO = "auto"
CARD_MARGIN = 2 * 2**30
"""Bytes of a card that a decision leaves free: CUDA's context, kernels' scratch space and the allocator's fragments
take about half of it, and the plan counts none of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would need."""

    rows: tuple[Row, ...]
    absences: tuple[MissingFile, ...]
    warnings: tuple[str, ...]
    device: str
    device_bytes: int | None
    """Memory of the card; None without CUDA."""
    forwards_per_image: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By phase, as `lab.plan.work` counts them."""
    balance: Balance | None = None
    """Of trainers and judges; None if no reward asks a judge, and of a plan to generate."""

    def phase_bytes(self, phase: Phase, *, place: Place = "device", files: bool = True) -> int:
        """What is on a device in a phase, or elsewhere, with the pages of files or without them."""
        rows = (row for row in self.rows if row.place == place and phase in row.phases)
        return sum(row.bytes for row in rows if files or not row.is_file)

    @property
    def peak_bytes(self) -> int:
        """What the device must hold."""
        return max(map(self.phase_bytes, PHASES))

    @property
    def host_bytes(self) -> int:
        """What the main memory of a machine must hold of all its processes, loading included."""
        return max(self.phase_bytes(phase, place="host") for phase in PHASES)

    @property
    def held_bytes(self) -> int:
        """Those of `host_bytes` that no other program can have: all but pages of files."""
        return max(self.phase_bytes(phase, place="host", files=False) for phase in PHASES)

    @property
    def disk_bytes(self) -> int:
        """What the disk must hold."""
        return sum(row.bytes for row in self.rows if row.place == "disk")

    @property
    def verdict(self) -> str:
        """Whether everything is here, in one line."""
        return sources.verdict(self.absences, notes=len(self.warnings))

    @property
    def exit_code(self) -> int:
        """Of the dry run."""
        return sources.NOT_READY if self.absences else 0

    def to_json(self) -> str:
        """The whole plan; sizes in bytes."""
        phases = {phase: self.phase_bytes(phase) for phase in PHASES}
        totals = {
            "phases": phases,
            "peak_bytes": self.peak_bytes,
            "peak_gib": round(self.peak_bytes / 2**30, 2),
            "host_gib": round(self.host_bytes / 2**30, 2),
            "verdict": self.verdict,
        }
        return json.dumps(dataclasses.asdict(self) | totals, indent=2)


def plan_policy(config: PolicyConfig, *, world: int | None = None) -> Plan:
    """Check a config against its data and this machine, and measure what it needs.

    The processes are `world`, or as many as torchrun or accelerate started. Absent data and weights are listed; the
    published architecture stands in for absent weights.

    Raises:
        ConfigError: A size or the number of samples does not divide.
        ValueError: A reward is unknown, or a prompt is bad (with file and line) or lacks what a reward needs.
    """
    config = decided(config, card_bytes=device()[1])
    # Cheapest first: what the config alone can say, then the prompts, then models on meta tensors.
    world = world or int(os.environ.get("WORLD_SIZE", "1"))
    work = _checked_work(config, world)
    check_trackers(config.trackers)
    # A plan runs nobody's code.
    check_rewards(config.rewards, run=False)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards", run=False)
    config = without_idle_judges(config, run=False)
    train = _prompts(config, config.prompts.train)
    evaluation = _prompts(config, config.prompts.evaluation, limit=config.prompts.evaluation_limit)
    config.check_prompts([*train, *evaluation])
    for key, reward in sources.rewards_of(config):  # whether the prompts hold what it needs, which takes no judge
        reward.check(evaluation if key.startswith("evaluation.") else [*train, *evaluation])
    leaks = check_leaks(
        train,
        evaluation,
        benchmarks={name: _prompts(config, name) for name in config.prompts.benchmarks},
        action=config.prompts.leaks,
        near=config.prompts.near,
    )
    config.generator.check_trainable(config.model.checkpoint)
    generator, judge = sources.generator(config), sources.judge(config.judge, key="judge")
    held_out_judge = sources.judge(config.evaluation.judge, key="evaluation.judge")
    policy = policy_on_meta(config, generator.configs)
    policy.planned_sources = sources.planned_sources(config, [*train, *evaluation])
    for prompt in [*train, *evaluation]:
        # A source that is missing or has no usable shape is said now, and not in the first epoch.
        policy.size_of(prompt, Size(*config.sampling.size))
    needed = rows(
        _at_largest(config, train, evaluation),
        work=work,
        policy=policy,
        judge=judge.configs,
        held_out_judge=held_out_judge.configs,
        prompts=[*train, *evaluation],
        world=world,
    )
    checkpoints = (generator, judge, held_out_judge)
    balance = balance_of(config, work=work, policy=policy, judge=judge.configs, prompts=train, world=world)
    plan = Plan(needed, sources.all_absences(config, checkpoints), (), *device(), work.forwards_per_image, balance)
    warnings = [leaks, *(checkpoint.note for checkpoint in checkpoints)]
    warnings += [card_shortage(plan), disk_shortage(config, plan)]
    return dataclasses.replace(plan, warnings=tuple(filter(None, warnings)))


def decided(config: PolicyConfig, *, card_bytes: int | None) -> PolicyConfig:
    """The config with `model.gradient_checkpointing: auto` decided: off without a card, or if the run then fits it.

    Raises:
        ValueError: As `plan_policy` does.
    """
    if config.model.gradient_checkpointing != AUTO:
        return config

    def checkpointed(choice: bool) -> PolicyConfig:
        return config.model_copy(update={"model": config.model.model_copy(update={"gradient_checkpointing": choice})})

    without = checkpointed(False)
    fits = card_bytes is None or plan_policy(without).peak_bytes + CARD_MARGIN <= card_bytes
    return checkpointed(not fits)


def plan_generation(
    options: PolicyOptions, *, size: Size | None = None, low: bool = False, judge: BackendOptions | None = None
) -> Plan:
    """What it takes to generate one image at a time.

    Args:
        options: Of the generator; the published architecture stands in for absent weights.
        size: Of the image; 1024 × 1024, or the tiny checkpoint's own, if it is left out.
        low: Whether text encoders, transformer and judge take turns on the device.
        judge: Of candidates; one behind HTTP takes nothing here.
    """
    spec = POLICIES[options.kind]
    checkpoint, judged = sources.generator_of(options, spec), sources.judge(judge, key="judge")
    policy = spec.on_meta(options, checkpoint.configs)
    wanted = size or (spec.committed.size if options.checkpoint == TINY else SIZE)
    policy.check_size(wanted)
    # Candidates that are sets are asked about by panels, of which a grid of 2 × 2 has the largest.
    panel = Size(wanted.height // 2, wanted.width // 2) if spec.sets else wanted
    scoring = judge_rows("judge", judge, judged.configs, panel=panel) if isinstance(judge, InProcessOptions) else []
    needed = generation_rows(options, policy, size=policy.nearest_size(wanted), low=low, judge=scoring)
    notes = tuple(part.note for part in (checkpoint, judged) if part.note)
    return Plan(needed, (*checkpoint.absences, *judged.absences), notes, *device())


def print_plan(plan: Plan, console: PlainConsole | None = None) -> None:
    """Shows a plan: its components, what is absent, what to mind, and the verdict."""
    from pacorl.io.console import PlainConsole, labelled

    console = console or PlainConsole()
    print_components(plan, console)
    absences = [f"{absence.key} = {absence.source}: {absence.remedy}" for absence in plan.absences]
    lines = [labelled("absent", line, style="yellow") for line in absences]
    lines += [labelled("note", warning, style="yellow") for warning in plan.warnings]
    for line in [*lines, plan.verdict]:
        console.print(line, highlight=False, soft_wrap=True)  # a command to copy stays on one line


def print_components(plan: Plan, console: PlainConsole) -> None:
    """Shows what each component takes, and what that comes to."""
    from rich.table import Table

    table = Table("component", "parameters", "memory", "where and when", title="what the run needs")
    table.columns[1].justify = table.columns[2].justify = "right"
    for location, title in PLACES.items():
        for row in (row for row in plan.rows if row.place == location):
            always = location == "disk" or row.phases == tuple(PHASES)
            when = title if always else f"{title}: " * (location == "host") + ", ".join(row.phases)
            note = f"{when}; {row.note}" if row.note else when
            count = row.parameters or 0
            parameters = _in_units(count, {"B": 10**9, "M": 10**6, "k": 10**3}, digits=2) or str(count or "")
            table.add_row(row.component, parameters, size_text(row.bytes), note)
        table.add_section()
    for phase, title in PHASES.items():
        total = plan.phase_bytes(phase)
        device = [row for row in plan.rows if row.place == "device" and row.phases != tuple(PHASES)]
        if not any(phase in row.phases for row in device):
            continue  # generating has no training
        table.add_row(f"device, {title}", "", size_text(total), "peak" if total == plan.peak_bytes else "")
    table.add_row("main memory, all processes", "", size_text(plan.host_bytes), "peak, loading included")
    console.print(table)
    card = f" of {size_text(plan.device_bytes)} needed, and about 1 GiB for CUDA" if plan.device_bytes else " needed"
    console.print(f"device: {plan.device}; {size_text(plan.peak_bytes)}{card}")
    counts = [f"{count:.4g} in {phase.replace('_', ' ')}" for phase, count in plan.forwards_per_image.items() if count]
    if counts:
        console.print(f"forwards per image: {', '.join(counts)}")
    if plan.balance:
        console.print(plan.balance.line)


# --- checks ----------------------------------------------------------------------------------------------------


def _checked_work(config: PolicyConfig, world: int) -> Work:
    """An epoch's work on so many processes, if its samples divide."""
    try:
        return work_of(config, world=world)
    except ValueError as error:
        raise ConfigError(f"sampling.batch: {error}") from None


def _at_largest(config: PolicyConfig, train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> PolicyConfig:
    """The config at the largest sizes that its records ask for, if they decide; memory is planned for these."""
    if not config.prompts.record_sizes:
        return config

    def largest(prompts: Sequence[Prompt], size: tuple[int, int]) -> dict[str, tuple[int, int]]:
        sizes = [(prompt.size.height, prompt.size.width) if prompt.size else size for prompt in prompts]
        return {"size": max(sizes or [size], key=math.prod)}

    sampling = config.sampling.model_copy(update=largest(train, config.sampling.size))
    judged = config.evaluation.model_copy(update=largest(evaluation, config.evaluation.size))
    return config.model_copy(update={"sampling": sampling, "evaluation": judged})


def _prompts(config: PolicyConfig, source: str, *, limit: int | None = None) -> Sequence[Prompt]:
    """None of a source that is not here."""
    absence = sources.prompts_absence("prompts", source, spec=config.generator, edits=config.generator.edits)
    return () if absence else prompts_from(source, limit=limit)


# --- this machine ----------------------------------------------------------------------------------------------


def device() -> tuple[str, int | None]:
    """The card's name and its bytes, which are None without a GPU."""
    match available_device():
        case "cuda":
            card = torch.cuda.get_device_properties(0)
            return card.name, int(card.total_memory)
        case "mps":
            return "Apple GPU", int(torch.mps.recommended_max_memory())
    return "CPU (no GPU here)", None


def card_shortage(plan: Plan) -> str:
    """What to say if the device has too little memory; nothing if it has enough, or is no card."""
    if not plan.device_bytes or plan.peak_bytes <= plan.device_bytes:
        return ""
    return (
        f"the device has {size_text(plan.device_bytes)} and {size_text(plan.peak_bytes)} are needed: lower "
        "sampling.batch, evaluation.batch or judge.batch_tokens, or turn model.gradient_checkpointing on"
    )


def disk_shortage(config: PolicyConfig, plan: Plan) -> str:
    """What to say if the run's folder has too little room; nothing if it has enough."""
    # The run's folder is made by the run: the nearest one that exists is on the same disk.
    existing = next(folder for folder in (config.out.absolute(), *config.out.absolute().parents) if folder.exists())
    free, needed = shutil.disk_usage(existing).free, plan.disk_bytes
    if needed <= free:
        return ""
    return f"out = {config.out} has {size_text(free)} free and needs {size_text(needed)}: lower keep_checkpoints"


# --- words -----------------------------------------------------------------------------------------------------


def size_text(number: int) -> str:
    """`3.0 GiB`."""
    return _in_units(number, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}, digits=1) or f"{number} B"


def _in_units(number: int, units: Mapping[str, int], *, digits: int) -> str:
    """The number in the largest unit that it reaches; nothing if it is below all."""
    return next((f"{number / unit:.{digits}f} {name}" for name, unit in units.items() if number >= unit), "")
