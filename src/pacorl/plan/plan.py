"""Requirements of a run before it starts: `pacorl train-policy CONFIG --dry-run`.

The config's prompts and sizes are checked, absent data and weights are listed with their source, and memory and hours
are computed from passes on meta tensors. No weights are loaded, and of the network only a judge's own server is asked.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pacorl.core.devices import available_device
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.builders import read_prompts, without_idle_judges
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan import sources
from pacorl.plan.hours import CARDS, Forwards, forwards_of, hours_of
from pacorl.plan.judges import clip_scorers, judge_scorer, judging_flops
from pacorl.plan.peaks import PHASES, Batch, Job, Memory, Training, measure
from pacorl.plan.sources import MissingFile
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
    hours: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Card → hours of a policy's training on one for each process: at best, and as measured."""
    processes: int = 1
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
        """What the run does not fit, with the fix; empty if it fits, and without a card."""
        if self.device_bytes and self.peak_bytes + CUDA_BYTES > self.device_bytes:
            return (
                "does not fit this card: lower sampling.batch or evaluation.batch, take memory: low or lowest, or set "
                "model.gradient_checkpointing"
            )
        if self.device_bytes and self.main_bytes and self.memory.held > self.main_bytes:
            return "does not fit main memory: start fewer processes, or take memory: normal"
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
        fits = self.shortage or ("fits this card" if self.device_bytes else "no card here")
        return f"verdict: {fits}; {absent}" if self.memory.phases else f"verdict: {absent}"

    @property
    def exit_code(self) -> int:
        """Exit code of the dry run."""
        return NOT_READY if self.absences or self.shortage else 0

    def to_json(self) -> str:
        """Return the whole plan; sizes in bytes."""
        names = ("verdict", "shortage", "peak_bytes", "download_bytes")
        document = dataclasses.asdict(self) | {name: getattr(self, name) for name in names}
        return json.dumps(document, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(plan: Plan) -> Iterator[str]:
    """List the lines of the screen."""
    yield plan.verdict
    for absence in plan.absences:
        yield f"absent {absence.key} = {absence.source}: {absence.remedy}"
    if plan.download_bytes:
        yield f"to download: {plan.download_bytes / 10**9:.0f} GB"
    for note in plan.notes:
        yield f"note {note}"

    memory = plan.memory
    if memory.phases:
        yield f"card: {size_text(plan.peak_bytes, plan.device_bytes)}, and about 1 GiB for CUDA; {plan.device}"
        yield "  " + ", ".join(f"{PHASES[phase]} {size_text(size)}" for phase, size in memory.phases.items())
        yield f"main memory: {size_text(memory.host, plan.main_bytes)}, loading included"
    for name, fact in plan.facts.items():
        yield re.sub("[{}']", "", f"{name}: {fact}").replace("_", " ")

    # On the card that is here or those of its size, else on the smallest that hold the run.
    shown = [card for card in CARDS if plan.device == card.name or plan.device_bytes == card.gigabytes * 2**30]
    fitting = [card for card in CARDS if plan.peak_bytes + CARD_MARGIN <= card.gigabytes * 10**9]
    hours = []
    for card in shown or fitting[:SHOWN_CARDS]:
        low, high = plan.hours.get(card.name, (0, 0))
        if high > LEAST_HOURS:
            hours.append(f"{low:.2g} to {high:.2g} on {plan.processes} × {card.name}")
    if hours:
        yield f"hours, with evaluations and judging: {', '.join(hours)}"


def size_text(number: int, of: int | None = None) -> str:
    """Format bytes as `3.0 GiB`, or as `3.0 GiB of 8.0 GiB`."""
    text = f"{number / 2**30:.1f} GiB"
    if number < 2**30:
        text = f"{number / 2**20:.1f} MiB"
    return f"{text} of {size_text(of)}" if of else text


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
    evaluation = config.evaluation
    config.generator.check_trainable(config.model.checkpoint)

    # Prompts, if all are here.
    absences = list(sources.absent_prompts(config))
    train, shown, leaks = ([], [], "") if absences else read_prompts(config)
    prompts = [*train, *shown]
    for rewards, checked in ((config.rewards, prompts), (evaluation.rewards, shown)):
        for reward in sources.rewards_of(rewards).values():
            reward.check(checked)

    # Checkpoints.
    generator = sources.generator_of(config.model, config.generator)
    judge = sources.judge("judge.checkpoint", config.judge, ask=ask)
    other = sources.judge("evaluation.judge", evaluation.judge_settings, ask=ask)
    absences += [*sources.absences_of(config), *generator.absences, *judge.absences, *other.absences]
    notes = [leaks] if leaks else []
    if other.configs:
        notes.append("the memory and work of evaluation.judge are not in the plan")

    # Images of the run. There is an evaluation before, one after, and some between.
    images = config.epochs * forwards.samples
    between = (config.epochs - 1) // evaluation.every if evaluation.every else 0
    images_shown = (2 + between) * evaluation.samples_per_prompt * (len(shown) or config.prompts.evaluation_limit)

    # What scores them: an evaluation's questions are as many per pixel.
    scorers = list(clip_scorers(config, prompts))
    judging = 0.0
    if config.judge and judge.configs:
        scorers.append(judge_scorer(config.judge, judge.configs))
        area = math.prod(evaluation.size) / math.prod(config.sampling.size)
        per_image = judging_flops(config, scorers[-1], judge.configs, prompts)
        judging = per_image * (images + images_shown * area)

    job = _job(config, forwards, images=images, images_shown=images_shown, prompts=prompts)
    in_turns = config.in_turns and bool(scorers)
    memory = measure(dataclasses.replace(job, configs=generator.configs, scorers=scorers, in_turns=in_turns))
    facts: dict[str, Any] = {
        "epochs": config.epochs,
        "images_per_epoch": forwards.samples,
        "forwards_per_image": forwards.per_image,
        "prompts": {"training": len(train), "evaluation": len(shown)},
    }
    if train:
        facts["times_seen"] = round(images / config.group_size / len(train), 1)
    hours = hours_of(config, flops=memory.flops + judging)
    return Plan(absences, notes, memory, facts, hours, config.processes)


def _job(config: PolicyConfig, forwards: Forwards, *, images: int, images_shown: int, prompts: Sequence[Prompt]) -> Job:
    """Describe a run that samples and evaluates so many images."""
    training = config.sampling
    evaluation = config.evaluation
    per_image = forwards.per_image
    sampled = images * (per_image["sampling"] + per_image["other_policies"])
    is_path = OBJECTIVES[config.objective.name].needs == "path"
    return Job(
        spec=config.generator,
        options=config.model,
        configs=config.generator.parts,
        batches=(
            Batch(
                Size(*training.size), "sampling.size", training.batch, forwards=sampled / training.batch, images=images
            ),
            Batch(
                Size(*evaluation.size),
                "evaluation.size",
                evaluation.batch,
                averaged=True,
                forwards=images_shown * evaluation.steps / evaluation.batch,
                images=images_shown,
            ),
        ),
        training=Training(
            config,
            forwards.sampler,
            forwards.node_batch,
            compiles_sampling=config.model.compile != "none" and is_path,
            steps=images * per_image["training"] / forwards.node_batch,
        ),
        # Besides the four: gradients' buckets of DDP, and the adapter that samples for an objective of the endpoint.
        copies=4 + (config.processes > 1) + (not is_path),
        images=sources.planned_images(config, prompts),
        prompts=prompts,
        encoded=len(prompts) or config.prompts_per_epoch + config.prompts.evaluation_limit,
        world=config.processes,
    )


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
    if not rewards:
        return plan
    note = f"the memory of {', '.join(map(repr, rewards))}, of Python, is not in the plan"
    return dataclasses.replace(plan, notes=[*plan.notes, note])


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
