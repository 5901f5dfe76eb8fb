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
from dataclasses import dataclass, field
from typing import Any

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
from pacorl.plan.judges import Scorer, clip_scorers, judges_of, pair_judge
from pacorl.plan.memory import ALL, EPOCH, FP32, PHASES, Phase, Phases, Place, Row, memory_rows
from pacorl.plan.passes import Batch, Generator, Training, measure_generator, shallow
from pacorl.plan.sources import MissingFile
from pacorl.plan.work import Work, work_of
from pacorl.records.leaks import check_leaks
from pacorl.records.prompts import prompts_from
from pacorl.rewards import check_rewards
from pacorl.runtime.logbook import check_trackers
from pacorl.types import TINY, Prompt, Size

AUTO = "auto"
CAPTIONS = "captions"
NOT_READY = 2
"""Exit code of a dry run if something is absent."""
SHOWN_CARDS = 3
LEAST_HOURS = 0.05
"""Hours below which a run's time is not printed."""
CARD_MARGIN = 2 * 2**30
"""Bytes that `auto` leaves free on a card. CUDA's context, kernels' scratch space and the allocator's fragments, which
the plan does not count, take about half of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Requirements of a command."""

    absences: tuple[MissingFile, ...] = ()
    notes: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    """Components in memory; none for a judge's training."""
    command_phases: Phases = ALL
    """Phases that the command has."""
    disk_bytes: int = 0
    """Bytes of the run's files."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Counts of data, steps and weights."""
    cost: Cost | None = None
    """Work of a policy's training."""
    device: str = field(default_factory=lambda: device()[0])
    device_bytes: int | None = field(default_factory=lambda: device()[1])
    """Memory of the card; None without one."""

    def phase_bytes(self, phase: Phase, *, places: Sequence[Place] = ("device",)) -> int:
        """Add up a phase's bytes on the device or elsewhere."""
        return sum(row.bytes for row in self.rows if row.place in places and phase in row.phases)

    @property
    def phases(self) -> dict[Phase, int]:
        """Bytes on the device in each phase of the command."""
        return {phase: size for phase in self.command_phases if (size := self.phase_bytes(phase))}

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the device."""
        return max(self.phases.values(), default=0)

    @property
    def fits(self) -> bool:
        """Whether the card of this machine holds it; true without a card."""
        return self.peak_bytes <= (self.device_bytes or self.peak_bytes)

    @property
    def host_bytes(self) -> int:
        """Peak main memory of all processes of a machine, loading included."""
        return max(self.phase_bytes(phase, places=("host", "files")) for phase in self.command_phases)

    @property
    def held_bytes(self) -> int:
        """`host_bytes` without pages of files, which the system may drop."""
        return max(self.phase_bytes(phase, places=("host",)) for phase in self.command_phases)

    @property
    def download_bytes(self) -> int:
        """Bytes of the absent weights, those of one source once."""
        return sum({absence.source: absence.bytes for absence in self.absences}.values())

    @property
    def verdict(self) -> str:
        """The first line of the dry run."""
        keys = dict.fromkeys(absence.key for absence in self.absences)
        if keys:
            return f"verdict: it would not run: {len(self.absences)} absent ({', '.join(keys)})"
        mind = {0: "", 1: "; mind the note"}.get(len(self.notes), f"; mind the {len(self.notes)} notes")
        return f"verdict: all that it needs is here{mind}"

    @property
    def exit_code(self) -> int:
        """Exit code of the dry run."""
        return NOT_READY if self.absences else 0

    def to_json(self) -> str:
        """Return the whole plan; sizes in bytes."""
        names = ("verdict", "phases", "peak_bytes", "host_bytes", "download_bytes")
        document = dataclasses.asdict(self) | {name: getattr(self, name) for name in names}
        document["rows"] = [row._asdict() for row in self.rows]
        document["hours"] = {card.name: self.cost.hours(card) for card in CARDS} if self.cost else {}
        return json.dumps(document, indent=2, ensure_ascii=False)

    def with_notes(self, *notes: str | None) -> Plan:
        """Add the notes that are not empty."""
        return dataclasses.replace(self, notes=(*self.notes, *(note for note in notes if note)))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# --- plans -----------------------------------------------------------------------------------------------------


def plan_policy(config: PolicyConfig, *, world: int | None = None, ask: bool = False) -> Plan:
    """Check a config against its data and this machine, and measure its memory.

    Args:
        config: the run. The published architecture replaces absent weights. Without a card,
            `gradient_checkpointing: auto` is planned as on, the form of the smallest card.
        world: number of processes; by default those that torchrun or accelerate started, else the config's.
        ask: whether a judge over HTTP that does not answer is listed as absent.

    Raises:
        ConfigError: A size or the number of samples does not divide.
        ValueError: A reward is unknown, or a prompt is bad (with file and line) or lacks what a reward needs.
    """
    # The config alone. A plan does not execute users' files.
    card_bytes = device()[1]
    config = decided(config, card_bytes=card_bytes) if card_bytes else with_checkpointing(config, on=True, only=AUTO)
    world = world or int(os.environ.get("WORLD_SIZE", "0")) or config.processes
    work = work_of(config, world=world)
    check_trackers(config.trackers)
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
    benchmarks = {name: _prompts(config, name) for name in config.prompts.benchmarks}
    leaks = check_leaks(train, evaluation, benchmarks=benchmarks, deliberate=config.prompts.evaluates_training)

    # Checkpoints.
    config.generator.check_trainable(config.model.checkpoint)
    checkpoint = sources.generator_of(config.model, config.generator)
    judges = (
        sources.judge(config.judge, key="judge"),
        sources.judge(config.evaluation.judge_settings, key="evaluation.judge"),
    )
    absences = sources.all_absences(config, (checkpoint, *judges))
    absences += tuple(sources.silent_judges(config)) if ask else ()

    # Memory and work, at the largest of the records' sizes if records decide.
    sizes = _sizes(config, checkpoint.configs, train, evaluation)
    scorers = judges_of(config, judges, prompts=prompts, sizes=sizes)
    generator = _trained_generator(config, checkpoint.configs, work, sizes=sizes, prompts=prompts)
    cost = cost_of(
        config,
        work=work,
        generator=generator,
        judge=scorers[0],
        held_out_judge=scorers[1],
        evaluated=len(evaluation) or config.prompts.evaluation_limit,
        world=world,
    )
    plan = Plan(
        absences,
        rows=_rows(config, generator, scorers, work=work, prompts=prompts, world=world),
        disk_bytes=disk_bytes(generator.adapter, keep=config.keep_checkpoints),
        facts=_work_facts(config, work, prompts=len(train)),
        cost=cost,
    )
    return plan.with_notes(leaks, checkpoint.note, *(judge.note for judge in judges), *shortages(config, plan))


def _trained_generator(
    config: PolicyConfig, configs: Parts, work: Work, *, sizes: Sequence[Size], prompts: Sequence[Prompt]
) -> Generator:
    """Measure a run's generator: a batch of nodes is trained if the tree branches, else a batch of samples."""
    sampler = work.sampler.model_copy(update={"size": sizes[0]})
    nodes = work.node_batch or config.sampling.batch
    return measure_generator(
        config.generator,
        config.model,
        configs,
        images=sources.planned_images(config, prompts),
        batches=[Batch(sizes[0], config.sampling.batch), Batch(sizes[1], config.evaluation.batch)],
        training=Training(config, sampler, nodes, with_base=config.objective.kl_weight > 0),
        record_sizes=config.prompts.record_sizes,
    )


def _rows(
    config: PolicyConfig,
    generator: Generator,
    judges: Sequence[Scorer | None],
    *,
    work: Work,
    prompts: Sequence[Prompt],
    world: int,
) -> tuple[Row, ...]:
    """List the components of a policy's training."""
    # Models that score. Those of this process may work during sampling.
    settings = (config.judge, config.evaluation.judge_settings)
    panels = min((prompt.grid.count for prompt in prompts), default=4)
    scorers = [judge for judge, own in zip(judges, settings, strict=True) if judge and own and not own.remote]
    scorers += clip_scorers(config, panels=panels)
    in_turns = config.in_turns and bool(scorers)
    overlap = 0 if in_turns else max((scorer.buffers for scorer in scorers), default=0)

    # Main memory: latents of the trained steps in fp32, 8-bit images, and with panel credit a log-probability per
    # token; encoded prompts, in one file for all processes.
    policy, adapter = generator.inputs.policy, generator.adapter
    size, full = (batch.size for batch in generator.batches)
    noise_BNC = policy.noise([0], size)
    rollouts = work.latents * noise_BNC.numel() * FP32 + work.samples * 3 * size.height * size.width
    if config.advantages.panel_share:
        rollouts += work.samples * len(work.sampler.stochastic_steps) * noise_BNC.shape[1] * FP32
    encoded = len(prompts) or config.prompts_per_epoch + config.prompts.evaluation_limit
    of_prompt = sum(tensor.nbytes for tensor in generator.inputs.conditioning(size, batch=1).tensors.values())
    evaluated = config.prompts.evaluation_limit * config.evaluation.samples_per_prompt
    rollouts += evaluated * 3 * full.height * full.width
    rows = memory_rows(
        config.model,
        generator,
        scorers,
        prompts=policy.encode_batch,
        in_turns=in_turns,
        # The average replaces the adapter during an evaluation. Compiled SDE steps are sampled as they are trained.
        overlap=(overlap, adapter),
        least=generator.train if config.model.compile != "none" and work.node_batch else 0,
        world=world,
    )
    rows += [
        Row("rollouts, and an evaluation's images", rollouts, EPOCH, "host"),
        Row("encoded prompts", encoded * of_prompt, ALL, "host"),
        Row("adapters, before they are placed", world * adapter, ("encode",), "host"),
    ]
    if world > 1:
        rows.append(Row("gradients' buckets", generator.trained, EPOCH))
    if OBJECTIVES[config.objective.name].needs == "endpoint":
        rows.append(Row("adapter that samples", adapter, EPOCH))
    return tuple(rows)


def disk_bytes(adapter: int, *, keep: int) -> int:
    """Compute the bytes of a run's files: checkpoints and the adapter in PEFT and diffusers form."""
    # Adapter, average and two moments; the newest checkpoint is written aside before the oldest is deleted.
    return 4 * adapter * (keep + 1) + 2 * adapter


def _work_facts(config: PolicyConfig, work: Work, *, prompts: int) -> dict[str, Any]:
    """Count a run's work: epochs, images, how often a prompt is seen, and forwards."""
    drawn = config.epochs * work.samples / config.group_size
    counts: dict[str, float] = {"epochs": config.epochs, "images an epoch": work.samples}
    if prompts:
        counts |= {"prompts": prompts, "each seen": round(drawn / prompts, 1)}
    return {"work": counts, "forwards_per_image": dict(work.forwards_per_image)}


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
    generator = measure_generator(spec, options, checkpoint.configs, images=images or None, batches=batches)

    judge_files = sources.judge(judge, key="judge")
    phases: Phases = ("encode", "load", "sample", "decode")
    scorers = []
    if judge and not judge.remote:
        phases += ("score",)
        scorers.append(pair_judge(judge, judge_files.configs, size=size, sets=spec.sets))
    rows = memory_rows(options, generator, scorers, prompts=1, in_turns=low)
    plan = Plan((*checkpoint.absences, *judge_files.absences), rows=tuple(rows), command_phases=phases)
    return plan.with_notes(checkpoint.note, judge_files.note)


def judge_options(source: str, memory: str) -> JudgeSettings | None:
    """Build the options of a judge of this process; None for a judge behind HTTP, or without one.

    Args:
        source: the judge's checkpoint; empty for none.
        memory: form of its weights, as in `MEMORY`.
    """
    if not source or is_address(source):
        return None
    return JudgeSettings(checkpoint=source).in_memory(memory)


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
    return plan.with_notes(
        *(f"the memory of reward {name!r}, a function, is not in the plan" for name in inputs.functions)
    )


def decided(config: PolicyConfig, *, card_bytes: int | None) -> PolicyConfig:
    """Decide `model.gradient_checkpointing: auto`: off if the run then fits the card, or without a card.

    Raises:
        ValueError: As `plan_policy` does.
    """
    # Recomputing activations costs time, so that it is off wherever the run fits without.
    without = with_checkpointing(config, on=False, only=AUTO)
    if without is config or card_bytes is None:
        return without
    fits = plan_policy(without).peak_bytes + CARD_MARGIN <= card_bytes
    return with_checkpointing(config, on=not fits)


def with_checkpointing(config: PolicyConfig, *, on: bool, only: str = "") -> PolicyConfig:
    """Set `model.gradient_checkpointing`, or only the value `only`."""
    if only and config.model.gradient_checkpointing != only:
        return config
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

    def largest(key: str, sides: tuple[int, int], prompts: Sequence[Prompt]) -> Size:
        size = Size(*sides)
        try:
            policy.check_size(size)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
        # A source image without a usable shape is reported here, before an epoch meets it.
        found = [policy.size_of(prompt, size) for prompt in prompts]
        if config.prompts.record_sizes and found:
            size = max(found, key=lambda one: one.height * one.width)
        return policy.nearest_size(size)

    return (
        largest("sampling.size", config.sampling.size, train),
        largest("evaluation.size", config.evaluation.size, evaluation),
    )


def _prompts(config: PolicyConfig, source: str, *, limit: int | None = None) -> Sequence[Prompt]:
    """Read prompts; none if their source is absent."""
    absence = sources.prompts_absence("prompts", source, spec=config.generator, edits=config.generator.edits)
    return () if absence else prompts_from(source, limit=limit, model=config.model.checkpoint)


# --- the screen ------------------------------------------------------------------------------------------------


def _lines(plan: Plan) -> Iterator[str]:
    """List the lines of a dry run: the verdict, absences and notes, memory, work and hours."""
    yield plan.verdict
    for absence in plan.absences:
        yield f"absent {absence.key} = {absence.source}: {absence.remedy}"
    for note in plan.notes:
        yield f"note {note}"

    if phases := plan.phases:
        largest = max(phases, key=lambda phase: phases[phase])
        card = f" of {size_text(plan.device_bytes)}" if plan.device_bytes else ""
        yield (
            f"device: {plan.device}; {size_text(plan.peak_bytes)}{card} needed at the peak, {PHASES[largest]}, and "
            "about 1 GiB for CUDA"
        )
        yield "  " + ", ".join(f"{PHASES[phase]} {size_text(size)}" for phase, size in phases.items())
        downloads = f"; to download {plan.download_bytes / 10**9:.0f} GB" if plan.download_bytes else ""
        files = f"; files {size_text(plan.disk_bytes)}" if plan.disk_bytes else ""
        yield f"main memory: {size_text(plan.host_bytes)} for all processes, loading included{files}{downloads}"
    for name, fact in plan.facts.items():
        counts = fact if isinstance(fact, Mapping) else {"": fact}
        texts = [f"{key} {_number(value)}".strip() for key, value in counts.items()]
        if name == CAPTIONS:
            yield from ("captions:", *(f"  {text}" for text in texts))
        else:
            yield f"{name.replace('_', ' ')}: {', '.join(texts)}"

    if cost := plan.cost:
        if cost.judge_cards:
            yield f"judge: a server with {cost.judge_cards} of these cards keeps up with {cost.world} that train"
        hours = []
        for timed in timed_cards(plan, cost):
            low, high = cost.hours(timed)
            hours.append(f"{low:.2g} to {high:.2g} on {cost.world} × {timed.name}")
        if hours:
            yield f"hours, with evaluations, judging and saving: {', '.join(hours)}"


def _number(fact: Any) -> str:
    return f"{fact:,}" if isinstance(fact, int) else f"{fact:.4g}" if isinstance(fact, float) else str(fact)


def timed_cards(plan: Plan, cost: Cost) -> list[Card]:
    """Return the plan's card, those of its size, or the smallest that fit the run; none for a run of minutes."""
    here = [card for card in CARDS if card.name == plan.device]
    here = here or [card for card in CARDS if card.gigabytes * 2**30 == plan.device_bytes]
    fitting = [card for card in CARDS if plan.peak_bytes + CARD_MARGIN <= card.gigabytes * 10**9]
    return [card for card in here or fitting[:SHOWN_CARDS] if cost.hours(card)[1] > LEAST_HOURS]


def peak_line(plan: Plan, *, allocated: int, reserved: int) -> str:
    """Compare the measured peak of a card's memory with the planned one, in one line."""
    return (
        f"memory: {size_text(allocated)} allocated and {size_text(reserved)} reserved at the peak, "
        f"{size_text(plan.peak_bytes)} planned"
    )


def size_text(number: int) -> str:
    """Format bytes as `3.0 GiB`."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


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


def shortages(config: LoraConfig, plan: Plan) -> Iterator[str]:
    """Yield a message for the card, main memory and disk, if there is too little for the run."""
    if not plan.fits:
        yield (
            f"the device has {size_text(plan.device_bytes or 0)} and {size_text(plan.peak_bytes)} are needed: lower "
            "sampling.batch or evaluation.batch, take memory: low or lowest, or turn model.gradient_checkpointing on"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.device_bytes and plan.held_bytes > memory:
        yield f"the machine has {size_text(memory)} of main memory and {size_text(plan.held_bytes)} are needed"
    # The run's folder does not exist yet: its nearest existing parent is on the same disk.
    folder = next(parent for parent in (config.out.absolute(), *config.out.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if plan.disk_bytes > free:
        yield f"out = {config.out} has {size_text(free)} free and needs {size_text(plan.disk_bytes)}"
