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
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pacorl.config.base import ConfigError
from pacorl.config.policy_run import PolicyRun
from pacorl.data.leaks import check_leaks
from pacorl.data.records import prompts_from
from pacorl.engine.logbook import check_trackers
from pacorl.engine.rollout import Row as SampleRow
from pacorl.engine.rollout import assign_groups
from pacorl.plan import sources
from pacorl.plan.components import PHASES, PLACES, Phase, Place, Row, policy_on_meta, rows
from pacorl.plan.sources import Checkpoint, MissingFile
from pacorl.rewards import build_rewards, check_rewards
from pacorl.train.builders import without_idle_judges
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would need."""

    rows: tuple[Row, ...]
    absences: tuple[MissingFile, ...]
    warnings: tuple[str, ...]
    device: str
    device_bytes: int | None
    """Memory of the card; None without CUDA."""

    def phase_bytes(self, phase: Phase) -> int:
        """What is on the device in a phase."""
        return sum(row.bytes for row in self.rows if row.place == "device" and phase in row.phases)

    def place_bytes(self, place: Place) -> int:
        """What is in main memory, or on disk."""
        return sum(row.bytes for row in self.rows if row.place == place)

    @property
    def peak_bytes(self) -> int:
        """What the device must hold."""
        return max(map(self.phase_bytes, PHASES))

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
        document = dataclasses.asdict(self) | {
            "phases": {phase: self.phase_bytes(phase) for phase in PHASES},
            "peak_bytes": self.peak_bytes,
            "verdict": self.verdict,
        }
        return json.dumps(document, indent=2)


def plan_policy(config: PolicyRun) -> Plan:
    """Checks a config against its data and this machine, and measures what it needs.

    Absent data and weights are listed; the published architecture stands in for absent weights. Raises ConfigError
    where a size or the number of samples does not divide, and ValueError where a reward is unknown or a prompt is bad
    (with file and line) or lacks what a reward needs.
    """
    _check_samples(config)
    check_trackers(config.trackers)
    check_rewards(config.rewards)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards")
    config = without_idle_judges(config)
    train = _prompts(config, config.prompts.train, limit=None)
    evaluation = _prompts(config, config.prompts.evaluation, limit=config.prompts.evaluation_limit)
    _check_prompts(config, train, evaluation)
    leaks = check_leaks(
        train,
        evaluation,
        benchmarks={name: _prompts(config, name, limit=None) for name in config.prompts.benchmarks},
        action=config.prompts.leaks,
        near=config.prompts.near,
    )
    generator, judge, held_out_judge = (
        source(config) for source in (sources.generator, sources.judge, sources.held_out_judge)
    )
    policy = policy_on_meta(config, generator.parts)
    for prompt in [*train, *evaluation]:
        policy.size_of(prompt, Size(*config.sampling.size))
    sized = _at_largest(config, train, evaluation)
    needed = rows(
        sized,
        policy=policy,
        judge=judge.parts,
        held_out_judge=held_out_judge.parts,
        prompts=[*train, *evaluation],
    )
    absences = sources.all_absences(config, [generator, judge, held_out_judge])
    device, device_bytes = _device()
    found = Plan(needed, absences, (), device, device_bytes)
    checkpoints = {
        "model.checkpoint": (generator, config.generator.published.split("/")[1]),
        "judge.checkpoint": (judge, sources.JUDGE_BASE),
        "evaluation.judge.checkpoint": (held_out_judge, sources.JUDGE_BASE),
    }
    return dataclasses.replace(found, warnings=(*([leaks] if leaks else []), *_warnings(config, found, checkpoints)))


def print_plan(found: Plan, console: Console | None = None) -> None:
    """Shows a plan: its components, what is absent, what to mind, and the verdict."""
    from rich.console import Console
    from rich.markup import escape

    console = console or Console()
    print_components(found, console)
    for absence in found.absences:
        line = escape(f"{absence.key} = {absence.source}: {absence.remedy}")
        console.print(f"[yellow]absent[/] {line}", highlight=False, soft_wrap=True)  # a command stays on one line
    for warning in found.warnings:
        console.print(f"[yellow]note[/] {escape(warning)}", highlight=False, soft_wrap=True)
    console.print(escape(found.verdict), highlight=False, soft_wrap=True)


def print_components(found: Plan, console: Console) -> None:
    """Shows what each component takes, and what that comes to."""
    from rich.table import Table

    table = Table("component", "parameters", "memory", "where and when", title="what the run needs")
    table.columns[1].justify = table.columns[2].justify = "right"
    for place, title in PLACES.items():
        for row in (row for row in found.rows if row.place == place):
            table.add_row(row.component, _count(row.parameters), size_text(row.bytes), _when(row, title))
        table.add_section()
    for phase, title in PHASES.items():
        total = found.phase_bytes(phase)
        table.add_row(f"device, {title}", "", size_text(total), "peak" if total == found.peak_bytes else "")
    console.print(table)
    card = f" of {size_text(found.device_bytes)} needed, and about 1 GiB for CUDA" if found.device_bytes else " needed"
    console.print(f"device: {found.device}; {size_text(found.peak_bytes)}{card}")


# --- checks ----------------------------------------------------------------------------------------------------


def _check_samples(config: PolicyRun) -> None:
    """Whether an epoch's samples can be dealt to the processes that torchrun or accelerate started this under."""
    samples = [
        SampleRow(Prompt(id=0, text=""), number) for number in range(config.prompts_per_epoch * config.group_size)
    ]
    world, updates = int(os.environ.get("WORLD_SIZE", "1")), config.optimizer.updates_per_epoch
    try:
        assign_groups(samples, batch=config.sampling.batch, updates=updates, world=world, rank=0)
    except ValueError as error:
        raise ConfigError(f"sampling.batch: {error}") from None


def _at_largest(config: PolicyRun, train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> PolicyRun:
    """The config at the largest sizes that its records ask for, where they decide; memory is planned for these."""
    if not config.prompts.record_sizes:
        return config

    def largest(prompts: Sequence[Prompt], size: tuple[int, int]) -> tuple[int, int]:
        own = [(prompt.size.height, prompt.size.width) if prompt.size else size for prompt in prompts]
        return max(own or [size], key=math.prod)

    sampling, judged = config.sampling, config.evaluation
    return config.model_copy(
        update={
            "sampling": sampling.model_copy(update={"size": largest(train, sampling.size)}),
            "evaluation": judged.model_copy(update={"size": largest(evaluation, judged.size)}),
        }
    )


def _check_prompts(config: PolicyRun, train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> None:
    """Whether the prompts hold what the rewards need of them, which takes no judge."""
    for reward in build_rewards(config.rewards, judge=None).values():
        reward.check([*train, *evaluation])
    for reward in build_rewards(config.evaluation.rewards, judge=None).values():
        reward.check(evaluation)


def _prompts(config: PolicyRun, source: str, *, limit: int | None) -> Sequence[Prompt]:
    """None of a source that is not here."""
    absent = sources.prompts_absence("prompts", source, spec=config.generator)
    return () if absent else prompts_from(source, limit=limit)


# --- this machine ----------------------------------------------------------------------------------------------


def _device() -> tuple[str, int | None]:
    if not torch.cuda.is_available():
        return "CPU (no CUDA here)", None
    card = torch.cuda.get_device_properties(0)
    return card.name, int(card.total_memory)


def _warnings(config: PolicyRun, found: Plan, checkpoints: Mapping[str, tuple[Checkpoint, str]]) -> list[str]:
    """`checkpoints`: config key → what is known of it, and the published model that stands in if it is not here."""
    warnings = [
        sources.assumed_note(key, published)
        for key, (checkpoint, published) in checkpoints.items()
        if checkpoint.assumed
    ]
    return [*warnings, *card_shortage(found), *disk_shortage(config, found)]


def card_shortage(found: Plan) -> list[str]:
    """What to say where the device has too little memory; nothing where it has enough, or is no card."""
    if not found.device_bytes or found.peak_bytes <= found.device_bytes:
        return []
    return [
        f"the device has {size_text(found.device_bytes)} and {size_text(found.peak_bytes)} are needed: lower "
        "sampling.batch, evaluation.batch or judge.batch_tokens, or turn model.gradient_checkpointing on"
    ]


def disk_shortage(config: PolicyRun, found: Plan) -> list[str]:
    """What to say where the run's folder has too little room."""
    free, needed = _free_disk(config.out), found.place_bytes("disk")
    if needed <= free:
        return []
    return [f"out = {config.out} has {size_text(free)} free and needs {size_text(needed)}: lower keep_checkpoints"]


def _free_disk(folder: Path) -> int:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


# --- words -----------------------------------------------------------------------------------------------------


def _when(row: Row, place: str) -> str:
    shown = place if row.place != "device" or row.phases == tuple(PHASES) else ", ".join(row.phases)
    return f"{shown}; {row.note}" if row.note else shown


def _count(parameters: int | None) -> str:
    if parameters is None:
        return ""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.2f} {name}"
    return str(parameters)


def size_text(number: int) -> str:
    """`3.0 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number} B"
