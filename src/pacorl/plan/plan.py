"""Requirements of a run before it starts: `pacorl train-policy CONFIG --dry-run`.

The config's prompts and sizes are checked, absent data and weights are listed with their source, and memory and hours
are computed from passes on meta tensors. No weights are loaded, and of the network only a judge's own server is asked.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pacorl.core.devices import available_device
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.builders import read_prompts, without_idle_judges
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan import sources
from pacorl.plan.hours import CARDS, forwards_of, hours_of
from pacorl.plan.judges import clip_scorers, judge_scorer, judging_flops
from pacorl.plan.peaks import PHASES, Batch, Job, Memory, Training, measure
from pacorl.plan.sources import MissingFile
from pacorl.rewards import check_rewards
from pacorl.types import Prompt, Size

NOT_READY = 2
"""Exit code of a dry run if something is absent, or does not fit."""
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
    return "no card here", None


@dataclass(frozen=True, slots=True)
class Plan:
    """Requirements of a command."""

    memory: Memory
    absences: Sequence[MissingFile] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Counts of data and steps, and findings about the data such as leaks."""
    hours: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Card → hours of a policy's training on one for each process: at best, and as measured."""
    processes: int = 1
    device: str = field(default_factory=lambda: device()[0])
    device_bytes: int | None = field(default_factory=lambda: device()[1])
    """Memory of the card, here or named; None without one."""
    main_bytes: int | None = field(default_factory=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    """Main memory; None if it is unknown."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the device."""
        return max(self.memory.phases.values())

    @property
    def shortage(self) -> str:
        """What the run does not fit, with the fix; empty if it fits, and without a card."""
        if self.device_bytes and self.peak_bytes + CUDA_BYTES > self.device_bytes:
            return (
                f"does not fit {self.device}: lower sampling.batch or evaluation.batch, take memory: low or lowest, "
                "or set model.gradient_checkpointing"
            )
        if self.device_bytes and self.main_bytes and self.memory.held > self.main_bytes:
            return "does not fit main memory: start fewer processes, or take memory: normal"
        return ""

    @property
    def download_bytes(self) -> int:
        """Bytes of the absent weights, each source counted once."""
        return sum({absence.source: absence.bytes for absence in self.absences}.values())

    @property
    def verdict(self) -> str:
        """The first line of the dry run."""
        fits = self.shortage or (f"fits {self.device}" if self.device_bytes else self.device)
        keys = ", ".join(dict.fromkeys(absence.key for absence in self.absences))
        return f"{fits}; absent: {keys or 'nothing'}"

    @property
    def exit_code(self) -> int:
        """Exit code of the dry run."""
        if self.absences or self.shortage:
            return NOT_READY
        return 0

    def to_json(self) -> str:
        """Return the whole plan; sizes in bytes."""
        names = ("verdict", "shortage", "peak_bytes", "download_bytes")
        document = dataclasses.asdict(self) | {name: getattr(self, name) for name in names}
        return json.dumps(document, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(plan: Plan) -> Iterator[str]:
    """List the lines of the screen."""
    yield f"verdict: {plan.verdict}"
    for absence in plan.absences:
        yield f"absent {absence.key} = {absence.source}: {absence.remedy}"
    if plan.download_bytes:
        yield f"to download: {plan.download_bytes / 10**9:.0f} GB"

    memory = plan.memory
    phases = ", ".join(f"{PHASES[phase]} {size_text(size)}" for phase, size in memory.phases.items())
    yield f"card: {size_text(plan.peak_bytes, plan.device_bytes)}, and about 1 GiB for CUDA; {plan.device}\n  {phases}"
    yield f"main memory: {size_text(memory.host, plan.main_bytes)}, loading included"
    for name, fact in plan.facts.items():
        text = fact
        if isinstance(fact, Mapping):
            text = ", ".join(f"{key.replace('_', ' ')} {round(value, 3)}" for key, value in fact.items())
        yield f"{name.replace('_', ' ')}: {text}"

    # On the card that is here; else on those of the size that is named, or that holds the run.
    least = max(plan.device_bytes or 0, plan.peak_bytes + CARD_MARGIN)
    size = min((card.gigabytes for card in CARDS if least <= card.gigabytes * 2**30), default=0)
    for card in CARDS:
        is_shown = card.name == plan.device if plan.device in plan.hours else card.gigabytes == size
        if is_shown and card.name in plan.hours:
            low, high = plan.hours[card.name]
            yield f"hours on {plan.processes} × {card.name}, with evaluations and judging: {low:.2g} to {high:.2g}"


def size_text(number: int, of: int | None = None) -> str:
    """Format bytes as `3.1 GiB`, or as `3.1 GiB of 8 GiB`."""
    text = f"{number / 2**30:.3g} GiB"
    if of:
        return f"{text} of {size_text(of)}"
    return text


# --- a policy's training ---------------------------------------------------------------------------------------


def plan_training(config: PolicyConfig, rewards: Collection[str] = (), *, ask: bool = True, card: int = 0) -> Plan:
    """Check a config against its data and a card, and measure its memory, as `--dry-run` does; `print` shows the plan.

    Weights are neither loaded nor required.

    Args:
        config: the run. The published architecture replaces absent weights. `gradient_checkpointing: auto` is off if
            the run then fits the card, since recomputing activations costs time; without a card it is on, the form of
            the smallest one.
        rewards: names of the functions that `PolicyTrainer` is to get. Their memory is not in the plan.
        ask: whether a judge over HTTP that does not answer is listed as absent.
        card: gigabytes of the card that the run is for; 0 for this machine's.

    Raises:
        ConfigError: A size or the number of samples does not divide.
        ValueError: A reward is unknown, or a prompt is bad (with file and line) or lacks an input of a reward.
    """
    planned = tuple(reward for reward in config.rewards if reward.name not in rewards)
    config = config.model_copy(update={"rewards": planned})
    name, size = (f"a card of {card} GB", card * 2**30) if card else device()
    plan = None
    if size and config.model.gradient_checkpointing == "auto":
        plan = _plan(with_checkpointing(config, on=False), ask=ask)
    if plan is None or plan.peak_bytes + CARD_MARGIN > (size or 0):
        plan = _plan(with_checkpointing(config, on=True), ask=ask)
    # Main memory of another machine is unknown.
    return dataclasses.replace(plan, device=name, device_bytes=size, main_bytes=None if card else plan.main_bytes)


def _plan(config: PolicyConfig, *, ask: bool) -> Plan:
    """Plan a config whose gradient checkpointing is decided."""
    # The config alone. A plan does not execute users' files.
    forwards = forwards_of(config)
    check_rewards(config.rewards, run=False)
    check_rewards(config.evaluation.rewards, key="evaluation.rewards", run=False)
    config = without_idle_judges(config, run=False)
    sampling, evaluation = config.sampling, config.evaluation
    config.generator.check_trainable(config.model.checkpoint)

    # Prompts, if all are here.
    absences = list(sources.absent_prompts(config))
    train, shown, leaks = ([], [], "") if absences else read_prompts(config)
    prompts = [*train, *shown]
    for rewards, checked in ((config.rewards, prompts), (evaluation.rewards, shown)):
        for reward in sources.rewards_of(rewards):
            reward.check(checked)

    # Images of the run. There is an evaluation before, one after, and some between.
    images = config.epochs * forwards.samples
    evaluations = 2
    if evaluation.every:
        evaluations += (config.epochs - 1) // evaluation.every
    images_shown = evaluations * evaluation.samples_per_prompt * (len(shown) or config.prompts.evaluation_limit)

    # Checkpoints, and what scores the images: an evaluation's questions are as many per pixel.
    generator = sources.generator_of(config.model, config.generator)
    absences += [*sources.absences_of(config), *generator.absences]
    scorers = list(clip_scorers(config, prompts))
    judging = 0.0
    for key, settings in (("judge.checkpoint", config.judge), ("evaluation.judge", evaluation.judge_settings)):
        judge = sources.judge(key, settings, ask=ask)
        absences += judge.absences
        if settings and judge.configs:
            scorers.append(judge_scorer(settings, judge.configs))
            if settings is config.judge:
                area = math.prod(evaluation.size) / math.prod(sampling.size)
                judging = judging_flops(config, scorers[-1], judge.configs, prompts) * (images + images_shown * area)

    per_image = forwards.per_image
    sampled = per_image["sampling"] + per_image["other_policies"]
    is_path = OBJECTIVES[config.objective.name].needs == "path"
    job = Job(
        spec=config.generator,
        options=config.model,
        configs=generator.configs,
        batches=[
            Batch(Size(*sampling.size), "sampling.size", sampling.batch, images, sampled),
            Batch(Size(*evaluation.size), "evaluation.size", evaluation.batch, images_shown, evaluation.steps),
        ],
        training=Training(
            config,
            forwards.sampler,
            forwards.node_batch,
            # Besides the four: gradients' buckets of DDP, and the adapter that samples for an objective of the
            # endpoint.
            copies=4 + (config.processes > 1) + (not is_path),
            compiles_sampling=config.model.compile != "none" and is_path,
            steps=images * per_image["training"] / forwards.node_batch,
        ),
        images=sources.planned_images(config, prompts),
        prompts=prompts,
        scorers=scorers,
        in_turns=config.memory != "normal" and bool(scorers),
        encoded=len(prompts) or config.prompts_per_epoch + config.prompts.evaluation_limit,
        world=config.processes,
    )
    memory = measure(job)
    facts: dict[str, Any] = {
        "gradient_checkpointing": "on" if config.model.gradient_checkpointing else "off",
        "images_per_epoch": forwards.samples,
        "forwards_per_image": per_image,
        "prompts": {"training": len(train), "evaluation": len(shown)},
    }
    if train:
        facts["read_as"] = kinds_of(train)
        facts["times_seen"] = round(images / config.group_size / len(train), 1)
    if leaks:
        facts["leaks"] = leaks
    hours = hours_of(config, flops=memory.flops + judging)
    return Plan(memory, absences, facts, hours, config.processes)


def kinds_of(prompts: Sequence[Prompt]) -> str:
    """Count prompts by how they were read, with the first of each kind: sets by their panels, single images, edits."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kind = f"as sets of {prompt.grid.count} panels"
        if prompt.sources:
            kind = "as edits"
        elif prompt.grid.count == 1:
            kind = "as one image"
        kinds.setdefault(kind, []).append(prompt)
    counts = []
    for kind, (first, *others) in kinds.items():
        text = " | ".join([first.theme or first.text, *first.panels])
        counts.append(f"{len(others) + 1} {kind}, the first {first.place} {text[:80]!r}")
    # A sentence whose number was not understood trains without a word, if its reward takes single images too.
    if len(kinds) > 1 and "as one image" in kinds:
        counts.append("a sentence asks for a set by its number, such as 'Four pictures of …'")
    return "; ".join(counts)


def decided(config: PolicyConfig) -> PolicyConfig:
    """Decide `model.gradient_checkpointing: auto` as the plan does; without a card it is off."""
    if device()[1] is None or config.model.gradient_checkpointing != "auto":
        return with_checkpointing(config, on=False)
    return with_checkpointing(config, on=plan_training(config, ask=False).facts["gradient_checkpointing"] == "on")


def with_checkpointing(config: PolicyConfig, *, on: bool) -> PolicyConfig:
    """Set `model.gradient_checkpointing` if it is `auto`."""
    if config.model.gradient_checkpointing != "auto":
        return config
    model = config.model.model_copy(update={"gradient_checkpointing": on})
    return config.model_copy(update={"model": model})
