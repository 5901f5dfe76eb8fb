"""Requirements of a run before it starts: `pacorl train-policy CONFIG --dry-run`.

The config's prompts and sizes are checked, absent data and weights are listed with their source, and memory and hours
are computed from passes on meta tensors. No weights are loaded, and of the network only a judge's own server is asked.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pacorl.core.devices import available_device
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.builders import without_idle_judges
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.documents import blamed_on
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import policy_on_meta
from pacorl.plan.hours import CARDS, Cost, Forwards, cost_of, forwards_of
from pacorl.plan.judges import clip_scorers, run_judge
from pacorl.plan.memory import FP32, PHASES, Memory, memory_of
from pacorl.plan.passes import Batch, Training, measure_generator, shallow
from pacorl.plan.sources import MissingFile
from pacorl.records.leaks import check_leaks
from pacorl.records.prompts import prompts_from
from pacorl.rewards import check_rewards
from pacorl.types import Prompt, Size

NOT_READY = 2
"""Exit code of a dry run if something is absent, or does not fit."""
SHOWN_CARDS = 3
LEAST_HOURS = 0.05
"""Hours below which a run's time is not printed."""
CUDA_BYTES = 2**30
"""CUDA's context, kernels' scratch space and the allocator's fragments, which the plan does not count."""
CARD_MARGIN = 2 * CUDA_BYTES
"""Bytes that `auto` and `pacorl init` leave free on a card."""


def device() -> tuple[str, int | None]:
    """Return the card's name and its bytes, which are None without a GPU."""
    match available_device():
        case "cuda":
            card = torch.cuda.get_device_properties(0)
            return card.name, int(card.total_memory)
        case "mps":
            return "Apple GPU", int(torch.mps.recommended_max_memory())
    return "CPU (no GPU here)", None


@dataclass(frozen=True, slots=True)
class Plan:
    """Requirements of a command."""

    absences: Sequence[MissingFile] = ()
    notes: Sequence[str] = ()
    memory: Memory = field(default_factory=Memory)
    """Empty for a judge's training."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Counts of data, steps and weights."""
    cost: Cost | None = None
    """Work of a policy's training."""
    device: str = field(default_factory=lambda: device()[0])
    device_bytes: int | None = field(default_factory=lambda: device()[1])
    """Memory of the card; None without one."""
    main_bytes: int | None = field(default_factory=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    """Main memory; None if it is unknown."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the device."""
        return max(self.memory.phases.values(), default=0)

    @property
    def shortage(self) -> str:
        """What the card or its main memory lacks, with the fix; empty if the run fits, and without a card."""
        if self.device_bytes and self.peak_bytes + CUDA_BYTES > self.device_bytes:
            return (
                f"{size_text(self.peak_bytes)} and CUDA's 1 GiB do not fit {size_text(self.device_bytes)}: lower "
                "sampling.batch or evaluation.batch, take memory: low or lowest, or set model.gradient_checkpointing"
            )
        if self.device_bytes and self.main_bytes and self.memory.held > self.main_bytes:
            return (
                f"{size_text(self.memory.held)} do not fit {size_text(self.main_bytes)} of main memory: start fewer "
                "processes, or take memory: normal"
            )
        return ""

    @property
    def download_bytes(self) -> int:
        """Bytes of the absent weights, those of one source once."""
        return sum({absence.source: absence.bytes for absence in self.absences}.values())

    @property
    def verdict(self) -> str:
        """The first line of the dry run."""
        keys = ", ".join(dict.fromkeys(absence.key for absence in self.absences))
        absent = f"{len(self.absences)} absent ({keys})" if keys else "nothing is absent"
        if not self.memory.phases:
            return f"verdict: {absent}"
        fits = "does not fit this card" if self.shortage else "fits this card"
        return f"verdict: {fits if self.device_bytes else 'no card here'}; {absent}"

    @property
    def exit_code(self) -> int:
        """Exit code of the dry run."""
        return NOT_READY if self.absences or self.shortage else 0

    @property
    def hours(self) -> dict[str, tuple[float, float]]:
        """Card → hours of the run on one for each process: at best, and as measured."""
        return {card.name: self.cost.hours(card) for card in CARDS} if self.cost else {}

    def to_json(self) -> str:
        """Return the whole plan; sizes in bytes."""
        names = ("verdict", "shortage", "peak_bytes", "download_bytes", "hours")
        document = dataclasses.asdict(self) | {name: getattr(self, name) for name in names}
        return json.dumps(document, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        return "\n".join(filter(None, _lines(self)))


# --- the screen ------------------------------------------------------------------------------------------------


def _lines(plan: Plan) -> Iterator[str]:
    yield plan.verdict
    yield plan.shortage
    yield from (f"absent {absence.key} = {absence.source}: {absence.remedy}" for absence in plan.absences)
    if plan.download_bytes:
        yield f"to download: {plan.download_bytes / 10**9:.0f} GB"
    yield from (f"note {note}" for note in plan.notes)

    if plan.memory.phases:
        phases = ", ".join(f"{PHASES[phase]} {size_text(size)}" for phase, size in plan.memory.phases.items())
        yield f"card: {size_text(plan.peak_bytes)}{_of(plan.device_bytes)}, and about 1 GiB for CUDA; {plan.device}"
        yield f"  {phases}"
        yield f"main memory: {size_text(plan.memory.host)}{_of(plan.main_bytes)}, loading included"
    for name, fact in plan.facts.items():
        counts = fact if isinstance(fact, Mapping) else {"": fact}
        text = ", ".join(f"{key} {_number(value)}".strip() for key, value in counts.items())
        yield f"{name}: {text}".replace("_", " ")
    hours = []
    for card in _timed_cards(plan):
        if plan.cost and plan.hours[card][1] > LEAST_HOURS:
            low, high = plan.hours[card]
            hours.append(f"{low:.2g} to {high:.2g} on {plan.cost.processes} × {card}")
    if hours:
        yield f"hours, with evaluations, judging and saving: {', '.join(hours)}"


def _of(size: int | None) -> str:
    return f" of {size_text(size)}" if size else ""


def _number(fact: float | None) -> str:
    if fact is None:
        return "unknown"
    return f"{fact:.4g}" if isinstance(fact, float) else f"{fact:,}"


def _timed_cards(plan: Plan) -> list[str]:
    """Return the plan's card or those of its size, else the smallest that hold the run."""
    here = [card.name for card in CARDS if plan.device == card.name or plan.device_bytes == card.gigabytes * 2**30]
    fitting = [card.name for card in CARDS if plan.peak_bytes + CARD_MARGIN <= card.gigabytes * 10**9]
    return here or fitting[:SHOWN_CARDS]


def size_text(number: int) -> str:
    """Format bytes as `3.0 GiB`."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


# --- a policy's training ---------------------------------------------------------------------------------------


def plan_policy(config: PolicyConfig, *, ask: bool = False) -> Plan:
    """Check a config against its data and this machine, and measure its memory.

    Args:
        config: the run. The published architecture replaces absent weights. Without a card,
            `gradient_checkpointing: auto` is planned as on, the form of the smallest card.
        ask: whether a judge over HTTP that does not answer is listed as absent.

    Raises:
        ConfigError: A size or the number of samples does not divide.
        ValueError: A reward is unknown, or a prompt is bad (with file and line) or lacks what a reward needs.
    """
    # The config alone. A plan does not execute users' files.
    card_bytes = device()[1]
    config = decided(config, card_bytes=card_bytes) if card_bytes else with_checkpointing(config, on=True)
    forwards = forwards_of(config)
    check_rewards(config.rewards, run=False)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards", run=False)
    config = without_idle_judges(config, run=False)

    # Prompts.
    data, model = config.prompts, config.model.checkpoint
    train = _prompts(data.train, model=model)
    evaluation = _prompts(data.evaluation, model=model, limit=data.evaluation_limit)
    config.check_prompts([*train, *evaluation])
    for key, reward in sources.rewards_of(config):
        reward.check(evaluation if key.startswith("evaluation.") else [*train, *evaluation])
    benchmarks = {name: _prompts(name, model=model) for name in data.benchmarks}
    notes = [check_leaks(train, evaluation, benchmarks=benchmarks, deliberate=data.evaluates_training)]

    # Checkpoints.
    config.generator.check_trainable(model)
    generator = sources.generator_of(config.model, config.generator)
    absences = [*sources.absences_of(config), *generator.absences]
    judges = {"judge.checkpoint": config.judge, "evaluation.judge": config.evaluation.judge_settings}
    checkpoints = {key: sources.judge(settings, key=key) for key, settings in judges.items()}
    for key, settings in judges.items():
        absences += [*checkpoints[key].absences, *(sources.silent_judge(key, settings) if ask else ())]
    if checkpoints["evaluation.judge"].configs:
        notes.append("the memory and work of evaluation.judge are not in the plan")

    # Memory and hours.
    judge = checkpoints["judge.checkpoint"].configs
    memory, cost = _measured(config, generator.configs, judge, train=train, evaluation=evaluation, forwards=forwards)
    facts: dict[str, Any] = {
        "epochs": config.epochs,
        "images_per_epoch": forwards.samples,
        "forwards_per_image": forwards.per_image,
        "prompts": {"training": len(train), "evaluation": len(evaluation)},
    }
    if train:
        drawn = config.epochs * forwards.samples / config.group_size
        facts["times_seen"] = round(drawn / len(train), 1)
    return Plan(absences, [note for note in notes if note], memory, facts, cost)


def _measured(
    config: PolicyConfig,
    configs: Parts,
    judge: Parts,
    *,
    train: Sequence[Prompt],
    evaluation: Sequence[Prompt],
    forwards: Forwards,
) -> tuple[Memory, Cost]:
    """Measure a run's generator, judges and encoders of rewards, at the config's sizes."""
    prompts = [*train, *evaluation]
    sizes = _sizes(config, configs, prompts)
    sampler = forwards.sampler.model_copy(update={"size": sizes[0]})
    generator = measure_generator(
        config.generator,
        config.model,
        configs,
        images=sources.planned_images(config, prompts),
        batches=[Batch(sizes[0], config.sampling.batch), Batch(sizes[1], config.evaluation.batch)],
        training=Training(config, sampler, forwards.node_batch),
    )
    scorers = list(clip_scorers(config, panels=min((prompt.grid.count for prompt in prompts), default=4)))
    judging: Sequence[float] = (0.0, 0.0)
    if config.judge and not config.judge.remote:
        scorers.append(run_judge(config, judge, prompts=prompts, sizes=sizes))
        judging = scorers[-1].flops
    in_turns = config.in_turns and bool(scorers)

    # Main memory: latents in fp32, images in 8 bits, and encoded prompts in each process.
    figures, policy = generator.figures, generator.inputs.policy
    shown = config.prompts.evaluation_limit * config.evaluation.samples_per_prompt
    samples = forwards.latents * policy.noise([0], sizes[0]).numel() * FP32
    for images, size in zip((forwards.samples, shown), sizes, strict=True):
        samples += images * 3 * size.height * size.width
    encoded_prompts = len(prompts) or config.prompts_per_epoch + config.prompts.evaluation_limit
    encoded = sum(tensor.nbytes for tensor in generator.inputs.conditioning(sizes[0], batch=1).tensors.values())

    is_path = OBJECTIVES[config.objective.name].needs == "path"
    memory = memory_of(
        config.model,
        generator,
        scorers,
        in_turns=in_turns,
        prompts=policy.encode_batch,
        # Gradients' buckets of DDP, and the adapter that samples for an objective of the endpoint.
        epoch=(config.processes > 1) * figures.trained + (not is_path) * figures.adapter,
        # Judges work while the next batch is sampled.
        sampling=0 if in_turns else max((scorer.buffers for scorer in scorers), default=0),
        # Compiled SDE steps are sampled as they are trained.
        least=figures.train if config.model.compile != "none" and is_path else 0,
        encoded=config.processes * encoded_prompts * encoded,
        samples=samples,
        world=config.processes,
    )
    evaluated = len(evaluation) or config.prompts.evaluation_limit
    return memory, cost_of(config, forwards=forwards, generator=generator, judging=judging, evaluated=evaluated)


def _prompts(source: str, *, model: str, limit: int | None = None) -> list[Prompt]:
    """Read prompts; none if they are absent."""
    return prompts_from(source, limit=limit, model=model) if sources.has_prompts(source) else []


def _sizes(config: PolicyConfig, configs: Parts, prompts: Sequence[Prompt]) -> list[Size]:
    """Check the sizes of training and evaluation, and return the nearest that the token grid allows.

    Raises:
        ValueError: VAE and patches do not divide a size of the config; the message names the nearest.
    """
    policy = policy_on_meta(config.generator, config.model, shallow(configs))
    sizes = []
    for key, sides in (("sampling.size", config.sampling.size), ("evaluation.size", config.evaluation.size)):
        size = Size(*sides)
        with blamed_on(key):
            policy.check_size(size)
        # A source image without a usable shape is reported here, before an epoch meets it.
        for prompt in prompts:
            policy.size_of(prompt, size)
        sizes.append(policy.nearest_size(size))
    return sizes


def plan_training(config: PolicyConfig, rewards: Collection[str] = ()) -> Plan:
    """Check a run's config and this machine, as `--dry-run` does; `print` shows the plan.

    Weights are neither loaded nor required.

    Args:
        config: the run.
        rewards: names of the functions that `PolicyTrainer` is to get. Their memory is not in the plan.

    Raises:
        ValueError: if the run cannot be made; one line with the key, the value and the fix.
    """
    planned = tuple(reward for reward in config.rewards if reward.name not in rewards)
    plan = plan_policy(config.model_copy(update={"rewards": planned}), ask=True)
    notes = [f"the memory of reward {name!r}, a function, is not in the plan" for name in rewards]
    return dataclasses.replace(plan, notes=(*plan.notes, *notes))


def decided(config: PolicyConfig, *, card_bytes: int | None) -> PolicyConfig:
    """Decide `model.gradient_checkpointing: auto`: off if the run then fits the card, or without a card.

    Raises:
        ValueError: As `plan_policy` does.
    """
    # Recomputing activations costs time, so that it is off wherever the run fits without.
    without = with_checkpointing(config, on=False)
    if without is config or card_bytes is None:
        return without
    fits = plan_policy(without).peak_bytes + CARD_MARGIN <= card_bytes
    return with_checkpointing(config, on=not fits)


def with_checkpointing(config: PolicyConfig, *, on: bool) -> PolicyConfig:
    """Set `model.gradient_checkpointing` if it is `auto`."""
    if config.model.gradient_checkpointing != "auto":
        return config
    model = config.model.model_copy(update={"gradient_checkpointing": on})
    return config.model_copy(update={"model": model})
