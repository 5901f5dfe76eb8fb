"""Requirements of a run before it starts: `pacorl train-policy CONFIG --dry-run`.

The config's prompts and sizes are checked, absent data and weights are listed with their source, and a table lists the
memory of each component. No weights are loaded, and of the network only a judge's own server is asked.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch

from pacorl.config.base import ConfigError
from pacorl.core.devices import available_device
from pacorl.generate.generator import SIZE
from pacorl.grpo.builders import with_credit, without_idle_judges
from pacorl.grpo.inputs import run_inputs
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.judge import JudgeSettings, is_address
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan import sources
from pacorl.plan.components import (
    PHASES,
    PLACES,
    Phase,
    Place,
    Row,
    generation_rows,
    inputs_on_meta,
    judge_scorer,
    training_rows,
)
from pacorl.plan.cost import CARDS, Card, Cost, cost_of
from pacorl.plan.generators import Inputs, policy_on_meta
from pacorl.plan.sources import MissingFile
from pacorl.plan.work import work_of
from pacorl.records.leaks import check_leaks
from pacorl.records.prompts import prompts_from
from pacorl.rewards import check_rewards
from pacorl.runtime.logbook import check_trackers
from pacorl.types import TINY, Prompt, Size

if TYPE_CHECKING:
    from rich.text import Text

    from pacorl.io.console import PlainConsole

AUTO = "auto"
PRINTED_WIDTH = 120
"""Columns of a plan as a text."""
LEAST_HOURS = 0.05
"""Hours below which a run's time is not printed."""
CARD_MARGIN = 2 * 2**30
"""Bytes that `auto` leaves free on a card. CUDA's context, kernels' scratch space and the allocator's fragments, which
the plan does not count, take about half of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Requirements of a run."""

    rows: tuple[Row, ...]
    absences: tuple[MissingFile, ...]
    warnings: tuple[str, ...]
    device: str
    device_bytes: int | None
    """Memory of the card; None without CUDA."""
    forwards_per_image: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Forwards by phase, counted by `plan.work`."""
    cost: Cost | None = None
    """FLOPs of the run; None for generating."""
    checkpointed: Plan | None = None
    """The plan with gradient checkpointing, where a card that is not here decides `auto`."""

    def phase_bytes(self, phase: Phase, *, place: Place = "device", files: bool = True) -> int:
        """Add up a phase's bytes on the device or elsewhere, with or without pages of files."""
        total = 0
        for row in self.rows:
            if row.place == place and phase in row.phases and (files or not row.is_file):
                total += row.bytes
        return total

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the device."""
        return max(self.phase_bytes(phase) for phase in PHASES)

    @property
    def least_bytes(self) -> int:
        """Peak memory of the device, with gradient checkpointing where a card decides it."""
        return min(self.peak_bytes, self.checkpointed.peak_bytes) if self.checkpointed else self.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Peak main memory of all processes of a machine, loading included."""
        return max(self.phase_bytes(phase, place="host") for phase in PHASES)

    @property
    def held_bytes(self) -> int:
        """`host_bytes` without pages of files, which the system may drop."""
        return max(self.phase_bytes(phase, place="host", files=False) for phase in PHASES)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the run's files."""
        return sum(row.bytes for row in self.rows if row.place == "disk")

    def __str__(self) -> str:
        """Return the dry run's text."""
        from pacorl.io.console import PlainConsole

        console = PlainConsole(file=StringIO(), width=PRINTED_WIDTH)
        print_plan(self, console)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined,no-any-return]

    @property
    def verdict(self) -> str:
        """The first line of the dry run."""
        return sources.verdict(self.absences, notes=len(self.warnings))

    @property
    def exit_code(self) -> int:
        """Exit code of the dry run."""
        return sources.NOT_READY if self.absences else 0

    def to_json(self) -> str:
        """Return the whole plan; sizes in bytes."""
        # Totals follow from the rows, and are printed for programs that do not add up.
        phases = {phase: self.phase_bytes(phase) for phase in PHASES}
        totals = {
            "phases": phases,
            "peak_bytes": self.peak_bytes,
            "peak_gib": round(self.peak_bytes / 2**30, 2),
            "least_gib": round(self.least_bytes / 2**30, 2),
            "host_gib": round(self.host_bytes / 2**30, 2),
            "verdict": self.verdict,
        }
        return json.dumps(dataclasses.asdict(self) | totals, indent=2)


def plan_policy(config: PolicyConfig, *, world: int | None = None, ask: bool = False) -> Plan:
    """Check a config against its data and this machine, and measure its memory.

    Args:
        config: the run. The published architecture replaces absent weights.
        world: number of processes; by default those that torchrun or accelerate started.
        ask: whether a judge over HTTP that does not answer is listed as absent.

    Raises:
        ConfigError: A size or the number of samples does not divide.
        ValueError: A reward is unknown, or a prompt is bad (with file and line) or lacks what a reward needs.
    """
    # The config alone. Without a card both of `auto`'s choices are planned.
    checkpointed = None
    if config.model.gradient_checkpointing == AUTO and device()[1] is None:
        checkpointed = plan_policy(with_checkpointing(config, on=True), world=world)
    config = decided(config, card_bytes=device()[1])
    world = world or int(os.environ.get("WORLD_SIZE", "1"))
    try:
        work = work_of(config, world=world)
    except ValueError as error:
        raise ConfigError(f"sampling.batch: {error}") from None
    check_trackers(config.trackers)
    # A plan does not execute users' files.
    check_rewards(config.rewards, run=False)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards", run=False)
    config = without_idle_judges(config, run=False)

    # Prompts.
    train = _prompts(config, config.prompts.train)
    evaluation = _prompts(config, config.prompts.evaluation, limit=config.prompts.evaluation_limit)
    prompts = [*train, *evaluation]
    config.check_prompts(prompts)
    config, _ = with_credit(config, {}, train, run=False)
    for key, reward in sources.rewards_of(config):
        reward.check(evaluation if key.startswith("evaluation.") else prompts)
    leaks = check_leaks(
        train,
        evaluation,
        benchmarks={name: _prompts(config, name) for name in config.prompts.benchmarks},
        action=config.prompts.leaks,
    )

    # Checkpoints. A source image without a usable shape is reported here, before an epoch meets it.
    config.generator.check_trainable(config.model.checkpoint)
    generator = sources.generator_of(config.model, config.generator)
    judge = sources.judge(config.judge, key="judge")
    held_out_judge = sources.judge(config.evaluation.judge, key="evaluation.judge")
    inputs = inputs_on_meta(config, generator.configs)
    inputs.images = sources.planned_images(config, prompts)
    for prompt in prompts:
        inputs.policy.size_of(prompt, Size(*config.sampling.size))

    # Memory and work, at the largest of the records' sizes if records decide.
    largest = config
    if config.prompts.record_sizes:
        sampling = config.sampling.model_copy(update={"size": _largest_size(train, config.sampling.size)})
        judged = config.evaluation.model_copy(update={"size": _largest_size(evaluation, config.evaluation.size)})
        largest = config.model_copy(update={"sampling": sampling, "evaluation": judged})
    rows = training_rows(
        largest,
        work=work,
        inputs=inputs,
        judge=judge.configs,
        held_out_judge=held_out_judge.configs,
        prompts=prompts,
        world=world,
    )
    cost = cost_of(
        config,
        work=work,
        inputs=inputs,
        judge=judge.configs,
        prompts=train,
        evaluated=len(evaluation),
        world=world,
    )

    # Absent weights, and warnings, most of which are empty.
    checkpoints = (generator, judge, held_out_judge)
    absences = sources.all_absences(config, checkpoints)
    if ask:
        absences += tuple(sources.silent_judges(config))
    plan = Plan(rows, absences, (), *device(), work.forwards_per_image, cost, checkpointed)
    warnings = [leaks, *(checkpoint.note for checkpoint in checkpoints), *cost.warnings()]
    warnings += [card_shortage(plan), host_shortage(plan), disk_shortage(config, plan)]
    return dataclasses.replace(plan, warnings=tuple(warning for warning in warnings if warning))


def decided(config: PolicyConfig, *, card_bytes: int | None) -> PolicyConfig:
    """Decide `model.gradient_checkpointing: auto`: off if the run then fits the card, or without a card.

    Raises:
        ValueError: As `plan_policy` does.
    """
    if config.model.gradient_checkpointing != AUTO:
        return config
    # Recomputing activations costs time, so that it is off wherever the run fits without.
    without = with_checkpointing(config, on=False)
    if card_bytes is None or plan_policy(without).peak_bytes + CARD_MARGIN <= card_bytes:
        return without
    return with_checkpointing(config, on=True)


def with_checkpointing(config: PolicyConfig, *, on: bool) -> PolicyConfig:
    """Set `model.gradient_checkpointing`."""
    model = config.model.model_copy(update={"gradient_checkpointing": on})
    return config.model_copy(update={"model": model})


def plan_generation(
    options: PolicyOptions,
    *,
    size: Size | None = None,
    low: bool = False,
    judge: JudgeSettings | None = None,
    images: int = 0,
) -> Plan:
    """Measure the memory of generating one image at a time.

    Args:
        options: the generator's. The published architecture replaces absent weights.
        size: size of the image; 1024 × 1024, or the tiny checkpoint's own, by default.
        low: whether text encoders, transformer and judge share the device.
        judge: the judge of candidates; behind HTTP it takes no memory here.
        images: number of sources and references.
    """
    # The generator, in the shapes of its own or the published configs.
    spec = POLICIES[options.kind]
    generator = sources.generator_of(options, spec)
    inputs = Inputs.of(policy_on_meta(spec, options, generator.configs))
    inputs.images = max(inputs.images, images)
    if size is None:
        size = spec.committed.size if options.checkpoint == TINY else SIZE
    inputs.policy.check_size(size)

    judge_files = sources.judge(judge, key="judge")
    scorer = None
    if judge and not judge.remote:
        # Candidates that are sets are compared by panels, the largest of which a grid of 2 × 2 has.
        panel = Size(size.height // 2, size.width // 2) if spec.sets else size
        scorer = judge_scorer("judge", judge, judge_files.configs, panel=panel)

    # Memory.
    rows = generation_rows(options, inputs, size=inputs.policy.nearest_size(size), low=low, judge=scorer)
    notes = tuple(checkpoint.note for checkpoint in (generator, judge_files) if checkpoint.note)
    return Plan(rows, (*generator.absences, *judge_files.absences), notes, *device())


def judge_options(source: str, adapter: str, weights: Mapping[str, Any]) -> JudgeSettings | None:
    """Build the options of a judge of this process; None for a judge behind HTTP, or without one.

    Args:
        source: the judge's checkpoint; empty for none.
        adapter: an adapter on it.
        weights: settings of its weights, as in `MEMORY`.
    """
    if not source or is_address(source):
        return None
    dtype = "float32" if source == TINY else "bfloat16"
    settings = {"checkpoint": source, "adapter": adapter, **weights, "dtype": dtype}
    return JudgeSettings.model_validate(settings)


def plan_training(model: Any, **arguments: Any) -> Plan:
    """Check the arguments of a `PolicyTrainer` and this machine, as `--dry-run` does; `print` shows the plan.

    Weights are neither loaded nor required, and functions are not called. Prompts are written into the run's folder.

    Args:
        model: As for `PolicyTrainer`.
        arguments: Its further arguments, without callbacks, `allow_changes` and `extra_metrics`.

    Raises:
        ValueError: if the run cannot be made; one line with the argument or key, the value and the fix.
    """
    inputs = run_inputs(model, **arguments)
    # Nothing is known of a function but its name.
    planned = [reward for reward in inputs.config.rewards if reward.name not in inputs.functions]
    plan = plan_policy(inputs.config.model_copy(update={"rewards": tuple(planned)}), ask=True)
    notes = [f"the memory of reward {name!r}, a function, is not in the plan" for name in inputs.functions]
    return dataclasses.replace(plan, warnings=(*plan.warnings, *notes))


def print_plan(plan: Plan, console: PlainConsole | None = None) -> None:
    """Print the verdict, absences, warnings and components."""
    from pacorl.io.console import PlainConsole, labelled

    console = console or PlainConsole()
    lines: list[str | Text] = [plan.verdict]
    for absence in plan.absences:
        lines.append(labelled("absent", f"{absence.key} = {absence.source}: {absence.remedy}", style="yellow"))
    for warning in plan.warnings:
        lines.append(labelled("note", warning, style="yellow"))
    # Without wrapping, so that a command can be copied.
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    _print_components(plan, console)


def _print_components(plan: Plan, console: PlainConsole) -> None:
    """Print the memory of each component and the totals."""
    from rich.table import Table

    table = Table("component", "parameters", "memory", "where and when", title="what the run needs")
    for column in table.columns[1:3]:
        column.justify = "right"

    # Components, by place.
    for place in PLACES:
        for row in plan.rows:
            if row.place == place:
                table.add_row(row.component, _count_text(row.parameters), size_text(row.bytes), _where(row))
        table.add_section()

    # Totals of the phases that have components of their own: generating has no training.
    phases = set[Phase]()
    for row in plan.rows:
        if row.place == "device" and row.phases != tuple(PHASES):
            phases.update(row.phases)
    for phase, title in PHASES.items():
        if phase in phases:
            total = plan.phase_bytes(phase)
            remark = "peak" if total == plan.peak_bytes else ""
            table.add_row(f"device, {title}", "", size_text(total), remark)
    table.add_row("main memory, all processes", "", size_text(plan.host_bytes), "peak, loading included")
    console.print(table)

    # The totals in sentences.
    for line in summary(plan):
        console.print(line)


def summary(plan: Plan) -> Iterator[str]:
    """Describe the device and the work, a line each."""
    # The device.
    card = ""
    if plan.device_bytes:
        card = f" of {size_text(plan.device_bytes)}"
    cuda = ", and about 1 GiB for CUDA" if card else ""
    either = ""
    if plan.checkpointed:
        either = (
            f" without gradient checkpointing, {size_text(plan.checkpointed.peak_bytes)} with it (`auto`: by the card)"
        )
    yield f"device: {plan.device}; {size_text(plan.peak_bytes)}{card} needed{cuda}{either}"

    # The work of an image, by phase.
    counts = []
    for phase, count in plan.forwards_per_image.items():
        if count:
            counts.append(f"{count:.4g} in {phase.replace('_', ' ')}")
    if counts:
        yield f"forwards per image: {', '.join(counts)}"

    # Judging beside training, evaluations, and hours on known cards.
    if plan.cost:
        if plan.cost.questions:
            yield plan.cost.balance_line
        yield plan.cost.evaluation_line
        yield from _time_lines(plan, plan.cost)


def _time_lines(plan: Plan, cost: Cost) -> Iterator[str]:
    cards = timed_cards(plan, cost)
    if cards:
        yield cost.time_line(cards)
    # Cards that hold the run with gradient checkpointing alone.
    if plan.checkpointed and plan.checkpointed.cost:
        cost = plan.checkpointed.cost
        further = [card for card in timed_cards(plan.checkpointed, cost) if card not in cards]
        if further:
            yield cost.time_line(further, " with gradient checkpointing, which these cards need")


def timed_cards(plan: Plan, cost: Cost) -> list[Card]:
    """Return this machine's card, or if it is unknown all cards that fit the run; none for a run of minutes."""
    here = [card for card in CARDS if card.name == plan.device]
    fitting = [card for card in CARDS if plan.peak_bytes + CARD_MARGIN <= card.gigabytes * 10**9]
    return [card for card in here or fitting if cost.hours(card) > LEAST_HOURS]


def peak_line(plan: Plan, *, allocated: int, reserved: int) -> str:
    """Compare the measured peak of a card's memory with the planned one, in one line."""
    return (
        f"memory: {size_text(allocated)} allocated and {size_text(reserved)} reserved at the peak, "
        f"{size_text(plan.peak_bytes)} planned"
    )


def _where(row: Row) -> str:
    """Describe the place and the phases of a row, with its note."""
    where = PLACES[row.place]
    phases = ", ".join(row.phases)
    if row.phases != tuple(PHASES):
        if row.place == "device":
            where = phases
        elif row.place == "host":
            where = f"{where}: {phases}"
    return f"{where}; {row.note}" if row.note else where


# --- checks ----------------------------------------------------------------------------------------------------


def _largest_size(prompts: Sequence[Prompt], size: tuple[int, int]) -> tuple[int, int]:
    sizes = []
    for prompt in prompts:
        sizes.append((prompt.size.height, prompt.size.width) if prompt.size else size)
    return max(sizes, key=math.prod, default=size)


def _prompts(config: PolicyConfig, source: str, *, limit: int | None = None) -> Sequence[Prompt]:
    """Read prompts; none if their source is absent."""
    absence = sources.prompts_absence("prompts", source, spec=config.generator, edits=config.generator.edits)
    return () if absence else prompts_from(source, limit=limit, model=config.model.checkpoint)


# --- this machine ----------------------------------------------------------------------------------------------


def device() -> tuple[str, int | None]:
    """Return the card's name and its bytes, which are None without a GPU."""
    match available_device():
        case "cuda":
            card = torch.cuda.get_device_properties(0)
            return card.name, int(card.total_memory)
        case "mps":
            return "Apple GPU", int(torch.mps.recommended_max_memory())
    return "CPU (no GPU here)", None


def card_shortage(plan: Plan) -> str:
    """Return a message if the card has too little memory, else an empty string."""
    if not plan.device_bytes or plan.peak_bytes <= plan.device_bytes:
        return ""
    return (
        f"the device has {size_text(plan.device_bytes)} and {size_text(plan.peak_bytes)} are needed: lower "
        "sampling.batch, evaluation.batch or judge.batch_tokens, or turn model.gradient_checkpointing on"
    )


def host_shortage(plan: Plan) -> str:
    """Return a message if a machine with a card has too little main memory for the run, else an empty string."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not plan.device_bytes or plan.held_bytes <= memory:
        return ""
    return f"the machine has {size_text(memory)} of main memory and {size_text(plan.held_bytes)} are needed"


def disk_shortage(config: LoraConfig, plan: Plan) -> str:
    """Return a message if the disk of the run's folder has too little space, else an empty string."""
    # The run's folder does not exist yet: its nearest existing parent is on the same disk.
    folder = config.out.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if plan.disk_bytes <= free:
        return ""
    needed = size_text(plan.disk_bytes)
    return f"out = {config.out} has {size_text(free)} free and needs {needed}: lower keep_checkpoints"


# --- numbers for people ----------------------------------------------------------------------------------------


def size_text(number: int) -> str:
    """Format bytes as `3.0 GiB`."""
    return _in_units(number, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}, digits=1) or f"{number} B"


def _count_text(count: int | None) -> str:
    if not count:
        return ""
    return _in_units(count, {"B": 10**9, "M": 10**6, "k": 10**3}, digits=2) or str(count)


def _in_units(number: int, units: Mapping[str, int], *, digits: int) -> str:
    """Format a number in the largest unit that it reaches; empty if it is below all."""
    for name, unit in units.items():
        if number >= unit:
            return f"{number / unit:.{digits}f} {name}"
    return ""
