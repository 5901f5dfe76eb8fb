"""Requirements of a run before it starts: `pacorl train-policy CONFIG --dry-run`.

The config's prompts and sizes are checked, absent data and weights are listed with their source, and memory and hours
are computed from passes on meta tensors. No weights are loaded, and of the network only a judge's own server is asked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pacorl.config.base import ConfigError
from pacorl.core.devices import available_device
from pacorl.core.objectives import OBJECTIVES
from pacorl.generate.generator import SIZE
from pacorl.grpo.builders import with_credit, without_idle_judges
from pacorl.grpo.inputs import run_inputs
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.judge import JudgeSettings, is_address
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import Parts, PolicyOptions
from pacorl.plan import sources
from pacorl.plan.generators import policy_on_meta
from pacorl.plan.hours import CARDS, Card, Cost, cost_of
from pacorl.plan.judges import Judging, clip_scorers, judging, pair_judge, scorer_of
from pacorl.plan.passes import shallow
from pacorl.plan.rows import (
    ALL,
    EPOCH,
    FP32,
    PHASES,
    Batch,
    Generator,
    Phase,
    Place,
    Row,
    Training,
    adapter_rows,
    file_rows,
    host_row,
    in_phases,
    measure_generator,
    model_rows,
    pass_rows,
    training_rows,
)
from pacorl.plan.sources import MissingFile
from pacorl.plan.work import Work, work_of
from pacorl.records.leaks import check_leaks
from pacorl.records.prompts import prompts_from
from pacorl.rewards import check_rewards
from pacorl.runtime.logbook import check_trackers
from pacorl.types import TINY, Prompt, Size

if TYPE_CHECKING:
    from pacorl.io.console import PlainConsole

AUTO = "auto"
LEAST_HOURS = 0.05
"""Hours below which a run's time is not printed."""
MUCH = 0.25
"""Share of a run's FLOPs above which its evaluations deserve a note."""
LITTLE = 1e17
"""FLOPs of evaluation below which no note is made: six minutes of an H100."""
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
    prompts: int = 0
    """Training prompts; 0 if they are absent."""
    cost: Cost | None = None
    """FLOPs of the run; None for generating."""
    checkpointed: Plan | None = None
    """The plan with gradient checkpointing, where a card that is not here decides `auto`."""

    def phase_bytes(self, phase: Phase, *, place: Place = "device", files: bool = True) -> int:
        """Add up a phase's bytes on the device or elsewhere, with or without pages of files."""
        rows = [row for row in self.rows if row.place == place and phase in row.phases]
        return sum(row.bytes for row in rows if files or not row.is_file)

    @property
    def phases(self) -> dict[Phase, int]:
        """Bytes on the device in each phase that the command has."""
        used = {phase for row in self.rows if row.place == "device" and row.phases != ALL for phase in row.phases}
        return {phase: self.phase_bytes(phase) for phase in PHASES if phase in used or not used}

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

    @property
    def download_bytes(self) -> int:
        """Bytes of the absent weights, those of one source once."""
        return sum({absence.source: absence.bytes for absence in self.absences}.values())

    def __str__(self) -> str:
        return "\n".join(text_of(self))

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
        totals: dict[str, Any] = {
            "phases": {phase: self.phase_bytes(phase) for phase in PHASES},
            "peak_bytes": self.peak_bytes,
            "peak_gib": round(self.peak_bytes / 2**30, 2),
            "least_gib": round(self.least_bytes / 2**30, 2),
            "host_gib": round(self.host_bytes / 2**30, 2),
            "download_bytes": self.download_bytes,
            "verdict": self.verdict,
        }
        if self.cost:
            totals["hours"] = {card.name: self.cost.hours(card) for card in CARDS}
        return json.dumps(dataclasses.asdict(self) | totals, indent=2)


# --- plans -----------------------------------------------------------------------------------------------------


def plan_policy(config: PolicyConfig, *, world: int | None = None, ask: bool = False) -> Plan:
    """Check a config against its data and this machine, and measure its memory.

    Args:
        config: the run. The published architecture replaces absent weights.
        world: number of processes; by default those that torchrun or accelerate started, else the config's.
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
    world = world or int(os.environ.get("WORLD_SIZE", "0")) or config.processes
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

    # Checkpoints.
    config.generator.check_trainable(config.model.checkpoint)
    checkpoint = sources.generator_of(config.model, config.generator)
    judges = (
        sources.judge(config.judge, key="judge"),
        sources.judge(config.evaluation.judge_settings, key="evaluation.judge"),
    )

    # Memory and work, at the largest of the records' sizes if records decide.
    sizes = _sizes(config, checkpoint.configs, train, evaluation)
    rows, generator, asked = _training(
        config, checkpoint.configs, judges=judges, work=work, sizes=sizes, prompts=prompts, world=world
    )
    evaluated = len(evaluation) or config.prompts.evaluation_limit
    cost = cost_of(
        config,
        work=work,
        generator=generator,
        judge=asked[0],
        held_out_judge=asked[1],
        evaluated=evaluated,
        world=world,
    )

    # Absent weights, and warnings, most of which are empty.
    checkpoints = (checkpoint, *judges)
    absences = sources.all_absences(config, checkpoints)
    if ask:
        absences += tuple(sources.silent_judges(config))
    plan = Plan(rows, absences, (), *device(), work.forwards_per_image, len(train), cost, checkpointed)
    warnings = [leaks, *(each.note for each in checkpoints), _costly_evaluation(cost)]
    warnings += [card_shortage(plan), host_shortage(plan), disk_shortage(config, plan)]
    return dataclasses.replace(plan, warnings=tuple(warning for warning in warnings if warning))


def _training(
    config: PolicyConfig,
    configs: Parts,
    *,
    judges: Sequence[sources.Checkpoint],
    work: Work,
    sizes: tuple[Size, Size],
    prompts: Sequence[Prompt],
    world: int,
) -> tuple[tuple[Row, ...], Generator, tuple[Judging, Judging]]:
    """Measure a run: its components, its generator, and what is asked of both judges."""
    # Models that score. Those of this process may work during sampling.
    size, full = sizes
    options = (config.judge, config.evaluation.judge_settings)
    asked = []
    scorers = []
    for number, (name, judge) in enumerate(zip(("judge", "evaluation's judge"), options, strict=True)):
        parts = judges[number].configs or (sources.published_judge(judge.name)[1] if judge else {})
        work_of_judge = judging(
            config, judge, parts, prompts=prompts, size=size, evaluation_size=full, held_out=number == 1
        )
        asked.append(work_of_judge)
        if judge and not judge.remote:
            scorers.append(scorer_of(name, judge, work_of_judge))
    panels = min((prompt.grid.count for prompt in prompts), default=4)
    scorers += clip_scorers(config, panels=panels)
    in_turns = config.in_turns and bool(scorers)
    beside = 0 if in_turns else max((scorer.buffers for scorer in scorers), default=0)

    # The generator: a batch of nodes is trained if the tree branches, else a batch of samples.
    nodes = work.node_batch or config.sampling.batch
    sampler = work.sampler.model_copy(update={"size": size})
    training = Training(config, sampler, nodes, with_base=config.objective.kl_weight > 0)
    batches = [Batch(size, config.sampling.batch, beside), Batch(full, config.evaluation.batch)]
    images = sources.planned_images(config, prompts)
    generator = measure_generator(
        config.generator,
        config.model,
        configs,
        images=images,
        batches=batches,
        training=training,
        record_sizes=config.prompts.record_sizes,
    )
    # Compiled SDE steps are sampled as they are trained. The average replaces the adapter during an evaluation.
    least = generator.train if config.model.compile != "none" and work.node_batch else 0
    batches = [
        dataclasses.replace(batches[0], least=least),
        dataclasses.replace(batches[1], beside=generator.adapter),
    ]
    rows = [
        *model_rows(config.model, generator, scorers, in_turns=in_turns, world=world),
        *adapter_rows(generator),
        *pass_rows(generator, batches, prompts=generator.inputs.policy.encode_batch),
        *training_rows(generator, training),
        *_records(config, generator, work, size, full, prompts=len(prompts), world=world),
        *file_rows(config, generator.adapter),
    ]
    if world > 1:
        rows.append(Row("gradients' buckets", generator.trained, phases=EPOCH, note="in which DDP sums them"))
    if OBJECTIVES[config.objective.name].needs == "endpoint":
        rows.append(Row("adapter that samples", generator.adapter, phases=EPOCH, note=config.objective.name))
    return tuple(rows), generator, (asked[0], asked[1])


def _records(
    config: PolicyConfig, generator: Generator, work: Work, size: Size, full: Size, *, prompts: int, world: int
) -> Iterator[Row]:
    """List samples, prompts and adapters in main memory."""
    policy = generator.inputs.policy
    # Rollouts: latents of the trained steps in fp32, 8-bit images, and with panel credit a log-probability per token.
    noise_BNC = policy.noise([0], size)
    rollouts = work.latents * noise_BNC.numel() * FP32 + work.samples * 3 * size.height * size.width
    if config.advantages.panel_share:
        rollouts += work.samples * len(work.sampler.stochastic_steps) * noise_BNC.shape[1] * FP32
    yield host_row("an epoch's rollouts", rollouts, EPOCH, note=f"{work.samples} samples")

    # Encoded prompts, in one file for all processes.
    encoded = prompts or config.prompts_per_epoch + config.prompts.evaluation_limit
    of_prompt = sum(tensor.nbytes for tensor in generator.inputs.conditioning(size, batch=1).tensors.values())
    yield host_row("encoded prompts", encoded * of_prompt, ALL, note=f"{encoded} prompts, on disk and mapped")

    # An evaluation's 8-bit images.
    images = config.prompts.evaluation_limit * config.evaluation.samples_per_prompt
    yield host_row("an evaluation's images", images * 3 * full.height * full.width, EPOCH, note=f"at most {images}")
    yield host_row("adapters, before they are placed", world * generator.adapter, ("encode",))


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
    checkpoint = sources.generator_of(options, spec)
    if size is None:
        size = spec.committed.size if options.checkpoint == TINY else SIZE
    policy = policy_on_meta(spec, options, shallow(checkpoint.configs))
    policy.check_size(size)
    batches = [Batch(policy.nearest_size(size), 1)]
    own = 0 if policy.source_optional else min(1, policy.max_sources)
    generator = measure_generator(spec, options, checkpoint.configs, images=max(own, images), batches=batches)

    # Candidates that are sets are compared by panels, the largest of which a grid of 2 × 2 has.
    judge_files = sources.judge(judge, key="judge")
    panel = Size(size.height // 2, size.width // 2) if spec.sets else size
    scorers = []
    if judge and not judge.remote:
        scorers.append(pair_judge(judge, judge_files.configs, panel=panel))

    rows = model_rows(options, generator, scorers, in_turns=low, generates=True)
    rows += pass_rows(generator, batches, prompts=1)
    phases: tuple[Phase, ...] = ("encode", "load", "sample", "decode")
    kept = in_phases(rows, (*phases, "score") if scorers else phases)
    notes = tuple(each.note for each in (checkpoint, judge_files) if each.note)
    return Plan(kept, (*checkpoint.absences, *judge_files.absences), notes, *device())


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


def _sizes(
    config: PolicyConfig, configs: Parts, train: Sequence[Prompt], evaluation: Sequence[Prompt]
) -> tuple[Size, Size]:
    """Check the sizes of training and evaluation, and return the largest that prompts have.

    Raises:
        ConfigError: VAE and patches do not divide a size of the config; the message names the nearest.
    """
    policy = policy_on_meta(config.generator, config.model, shallow(configs), record_sizes=config.prompts.record_sizes)
    sizes = []
    for key, sides, prompts in (
        ("sampling.size", config.sampling.size, train),
        ("evaluation.size", config.evaluation.size, evaluation),
    ):
        size = Size(*sides)
        try:
            policy.check_size(size)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
        # A source image without a usable shape is reported here, before an epoch meets it.
        found = [policy.size_of(prompt, Size(*config.sampling.size)) for prompt in prompts]
        if config.prompts.record_sizes and found:
            size = max((prompt.size or size for prompt in prompts), key=lambda one: one.height * one.width)
        sizes.append(policy.nearest_size(size))
    return sizes[0], sizes[1]


def _prompts(config: PolicyConfig, source: str, *, limit: int | None = None) -> Sequence[Prompt]:
    """Read prompts; none if their source is absent."""
    absence = sources.prompts_absence("prompts", source, spec=config.generator, edits=config.generator.edits)
    return () if absence else prompts_from(source, limit=limit, model=config.model.checkpoint)


# --- the screen ------------------------------------------------------------------------------------------------


def print_plan(plan: Plan, console: PlainConsole | None = None) -> None:
    """Print the plan on one screen: the verdict, absences and notes, memory, work and hours."""
    from pacorl.io.console import PlainConsole

    console = console or PlainConsole()
    # Without wrapping, so that a command can be copied.
    for line in text_of(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def text_of(plan: Plan) -> Iterator[str]:
    """List the lines of a dry run."""
    yield plan.verdict
    for absence in plan.absences:
        yield f"absent {absence.key} = {absence.source}: {absence.remedy}"
    for warning in plan.warnings:
        yield f"note {warning}"

    # The card.
    phases = plan.phases
    largest = max(phases, key=lambda phase: phases[phase])
    card = f" of {size_text(plan.device_bytes)}" if plan.device_bytes else ""
    either = f"; {size_text(plan.checkpointed.peak_bytes)} with gradient checkpointing" if plan.checkpointed else ""
    yield (
        f"device: {plan.device}; {size_text(plan.peak_bytes)}{card} needed at the peak, {PHASES[largest]}, and about "
        f"1 GiB for CUDA{either}"
    )
    yield "  " + ", ".join(f"{PHASES[phase]} {size_text(size)}" for phase, size in phases.items())

    # The machine.
    downloads = f"; to download {plan.download_bytes / 10**9:.0f} GB" if plan.download_bytes else ""
    files = f"; files {size_text(plan.disk_bytes)}" if plan.disk_bytes else ""
    yield f"main memory: {size_text(plan.host_bytes)} for all processes, loading included{files}{downloads}"

    # The work.
    if plan.cost:
        yield _work(plan, plan.cost)
        yield from _hours(plan, plan.cost)


def _work(plan: Plan, cost: Cost) -> str:
    """Describe a run's work."""
    seen = ""
    if plan.prompts:
        drawn = cost.epochs * cost.prompts_per_epoch
        seen = f", each of {plan.prompts} prompts {drawn / plan.prompts:.3g} times"
    counts = {phase.replace("_", " "): count for phase, count in plan.forwards_per_image.items() if count}
    forwards = ", ".join(f"{count:.4g} in {phase}" for phase, count in counts.items())
    return f"work: {cost.epochs} epochs of {cost.samples} images{seen}; forwards per image: {forwards}"


def _hours(plan: Plan, cost: Cost) -> Iterator[str]:
    """Describe the time of a run, and the balance of a judge elsewhere with its trainers."""
    if cost.judge_cards:
        servers = f"{cost.judge_cards} card" + "s" * (cost.judge_cards > 1)
        yield (
            f"judge: {cost.questions} questions about an image are {cost.judged / 1e12:.1f} TFLOP beside "
            f"{cost.image_flops / 1e12:.0f} of training; {servers} of the trainers' kind keep up with {cost.world}"
        )
    shown = timed_cards(plan, cost)
    if not shown and plan.checkpointed and plan.checkpointed.cost:
        cost = plan.checkpointed.cost
        shown = timed_cards(plan.checkpointed, cost)
    if shown:
        hours = []
        for card in shown:
            low, high = cost.hours(card)
            hours.append(f"{low:.2g} to {high:.2g} on {cost.world} × {card.name}")
        yield f"hours, evaluations ({cost.evaluation_share:.0%}), judging and saving included: {', '.join(hours)}"


def timed_cards(plan: Plan, cost: Cost) -> list[Card]:
    """Return this machine's card, or if it is unknown all cards that fit the run; none for a run of minutes."""
    here = [card for card in CARDS if card.name == plan.device]
    fitting = [card for card in CARDS if plan.peak_bytes + CARD_MARGIN <= card.gigabytes * 10**9]
    return [card for card in here or fitting if cost.hours(card)[1] > LEAST_HOURS]


def peak_line(plan: Plan, *, allocated: int, reserved: int) -> str:
    """Compare the measured peak of a card's memory with the planned one, in one line."""
    return (
        f"memory: {size_text(allocated)} allocated and {size_text(reserved)} reserved at the peak, "
        f"{size_text(plan.peak_bytes)} planned"
    )


def size_text(number: int) -> str:
    """Format bytes as `3.0 GiB`."""
    for name, unit in {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}.items():
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number} B"


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
        "sampling.batch or evaluation.batch, take memory: low or lowest, or turn model.gradient_checkpointing on"
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


def _costly_evaluation(cost: Cost) -> str:
    if cost.evaluation_share <= MUCH or cost.evaluations * cost.evaluation.flops <= LITTLE:
        return ""
    return (
        f"evaluation takes {cost.evaluation_share:.0%} of the run's FLOPs: lower evaluation.size, evaluation.steps or "
        "prompts.evaluation_limit, or raise evaluation.every"
    )
