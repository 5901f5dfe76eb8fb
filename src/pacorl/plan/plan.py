"""Requirements before the start: `pacorl train-policy CONFIG --dry-run`, and of `pacorl generate --dry-run`.

The config's prompts and sizes are checked, absent data and weights are listed with their source, and memory and hours
are computed from passes on meta tensors. No weights are loaded, and of the network only a judge's own server is asked.
"""

import dataclasses
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pacorl.config.user_files import is_in_file
from pacorl.core.objectives import OBJECTIVES
from pacorl.generate.generator import SIZE
from pacorl.grpo.builders import checked_config, read_prompts
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge import settings_of
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan import sources
from pacorl.plan.hours import CARDS, SCORED_PIXELS, forwards_of, hours_of
from pacorl.plan.judges import clip_scorer, judge_scorer
from pacorl.plan.peaks import PHASES, Batch, Job, Memory, Training, measure
from pacorl.plan.sources import MissingFile
from pacorl.records.prompts import kinds_of
from pacorl.report.html import render
from pacorl.rewards.clip import ClipEncoder, ClipReward
from pacorl.rewards.reward import RewardError, smoke_test
from pacorl.rewards.spec import UserReward
from pacorl.types import TINY, Prompt, Size

NOT_READY = 2
"""Exit code of a dry run if something is absent, or does not fit."""
CUDA_BYTES = 2**30
"""CUDA's context, kernels' scratch space and the allocator's fragments, which the plan does not count."""
CARD_MARGIN = 2 * CUDA_BYTES
"""Bytes that `pacorl init` leaves free on a card."""
LEAST_HOURS = 0.1
"""Hours below which a run's time is not its products', and none is shown."""


def machine(card: int = 0) -> dict[str, Any]:
    """Return a plan's fields for this machine, or for one with a card of this size, whose main memory is unknown."""
    if card:
        return {"device": f"a card of {card} GB", "device_bytes": card * 2**30}
    fields: dict[str, Any] = {"main_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        fields |= {"device": properties.name, "device_bytes": int(properties.total_memory)}
    return fields


@dataclass(frozen=True, slots=True)
class Plan:
    """Requirements of a command."""

    memory: Memory
    absences: Sequence[MissingFile] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Counts of data and steps, and findings about the data such as leaks."""
    hours: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Card → hours of a training on one for each process: at best, and at most."""
    processes: int = 1
    device: str = "no card here, so that it runs on the CPU"
    device_bytes: int | None = None
    """Memory of the card, here or named; None without one."""
    main_bytes: int | None = None
    """Main memory; None if it is unknown."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the device."""
        return max(self.memory.phases.values())

    @property
    def shortage(self) -> str:
        """Limit that the run exceeds, with the fix; empty if it fits."""
        if self.device_bytes and self.peak_bytes + CUDA_BYTES > self.device_bytes:
            return (
                f"does not fit {self.device}: try a smaller form of memory (low, then lowest with model.compile none), "
                "in training gradient_checkpointing too, or a smaller batch, size or model"
            )
        if self.main_bytes and self.memory.host > self.main_bytes:
            return (
                f"does not fit {size_text(self.main_bytes)} of main memory: start fewer processes, keep models on the "
                "card (memory normal), or take a smaller model"
            )
        return ""

    @property
    def download_bytes(self) -> int:
        """Bytes of the absent weights, each source counted once."""
        return sum({absence.source: absence.bytes for absence in self.absences}.values())

    @property
    def verdict(self) -> str:
        """First line of the dry run: whether the run fits, and the config keys of absent or broken files."""
        fit = self.shortage
        if not fit:
            fit = f"fits {self.device}" if self.device_bytes else self.device
        keys = dict.fromkeys(absence.key for absence in self.absences)
        return f"{fit}; absent or broken: {', '.join(keys) or 'nothing'}"

    @property
    def exit_code(self) -> int:
        """Exit code of the dry run."""
        return NOT_READY if self.absences or self.shortage else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the whole plan, for JSON; sizes in bytes."""
        document = dataclasses.asdict(self)
        for name in ("verdict", "shortage", "peak_bytes", "download_bytes"):
            document[name] = getattr(self, name)
        return document

    def __str__(self) -> str:
        # A training's hours are shown on the cards of the size that is here or named, or that hold the run.
        least = max(self.device_bytes or 0, self.peak_bytes + CARD_MARGIN)
        cards = [card for card in CARDS if card.gigabytes * 2**30 >= least]
        fields = {"phases": PHASES, "cards": cards, "least_hours": LEAST_HOURS}
        return render("plan.txt", plan=self, size_text=size_text, **fields).strip()


def size_text(number: int) -> str:
    """Format bytes as `3.1 GiB`."""
    return f"{number / 2**30:.1f} GiB"


def plan_training(config: PolicyConfig, rewards: Collection[str] = (), *, card: int = 0) -> Plan:
    """Check a config against its data and a card, and measure its memory, as `--dry-run` does; `print` shows the plan.

    Weights are neither loaded nor required. Users' files are executed.

    Args:
        config: the run. The published architecture replaces absent weights.
        rewards: names of the functions that `PolicyTrainer` is to get. Their memory is not in the plan.
        card: gigabytes of the card that the run is for; 0 for this machine's.

    Raises:
        ConfigError: A size or the number of samples does not divide.
        ValueError: A reward is unknown, or a prompt is bad (with file and line) or lacks an input of a reward.
    """
    config = config.model_copy(update={"rewards": tuple(it for it in config.rewards if it.name not in rewards)})
    forwards = forwards_of(config)
    config = checked_config(config, {})
    sampling, evaluation = config.sampling, config.evaluation

    # Data. With a file absent the prompts stay unread: the plan lists all absences at once.
    absences = list(sources.absent_prompts(config))
    train, shown, leaks = ([], [], "") if absences else read_prompts(config)
    prompts = [*train, *shown]
    facts: dict[str, Any] = {
        "images_per_epoch": forwards.samples,
        "training_prompts": len(train),
        "evaluation_prompts": len(shown),
    }
    if train:
        facts["read_as"] = kinds_of(train)
        facts["times_seen"] = round(config.epochs * forwards.samples / config.group_size / len(train), 1)
    if leaks:
        facts["leaks"] = leaks
    own = sorted({measure.name for measure in (*config.rewards, *evaluation.rewards) if is_in_file(measure.name)})
    if own:
        facts["not_counted"] = f"memory and time of {', '.join(own)}"
    encoders, broken = _check_rewards(config, prompts, shown)
    absences += [*broken, *sources.absences_of(config, encoders)]

    # Images of the run. There is an evaluation before, one after, and some between.
    images = config.epochs * forwards.samples
    evaluations = 2 + ((config.epochs - 1) // evaluation.every if evaluation.every else 0)
    images_shown = evaluations * evaluation.samples_per_prompt * (len(shown) or config.prompts.evaluation_limit)

    # Checkpoints, and what scores the images.
    configs, missing = sources.generator_of(config.model)
    absences += missing
    scorers = [clip_scorer(encoder, config, prompts) for encoder in encoders]
    for key, settings in (("judge.checkpoint", config.judge), ("evaluation.judge", config.held_out_judge)):
        judge_configs, missing = sources.judge(key, settings)
        absences += missing
        if settings and judge_configs:
            scorers.append(judge_scorer(settings, judge_configs))

    # Training, whose forwards per image follow from the tree and the objective.
    sampled = forwards.sampling + forwards.other_policies
    is_path = OBJECTIVES[config.objective.name].needs == "path"
    training = Training(
        config,
        forwards.node_batch,
        # Besides the four: gradients' buckets of DDP, and the adapter that samples for an objective of the endpoint.
        copies=4 + (config.processes > 1) + (not is_path),
        compiles_sampling=config.model.compile != "none" and is_path,
        steps=images * forwards.training / forwards.node_batch,
    )
    job = Job(
        options=config.model,
        configs=configs,
        batches=[
            Batch(Size(*sampling.size), "sampling.size", sampling.batch, images, sampled),
            Batch(Size(*evaluation.size), "evaluation.size", evaluation.batch, images_shown, evaluation.steps),
        ],
        images=_images_of(prompts, config.model),
        prompts=prompts,
        training=training,
        scorers=scorers,
        encoded=len(prompts) or config.prompts_per_epoch + config.prompts.evaluation_limit,
        world=config.processes,
    )

    memory = measure(job)
    # A token takes two FLOPs for each weight, which has two bytes.
    tokens = (images * math.prod(sampling.size) + images_shown * math.prod(evaluation.size)) / SCORED_PIXELS
    scoring = tokens * sum(scorer.files for scorer in scorers)
    hours = hours_of(memory.flops, memory=config.memory, processes=config.processes, scoring=scoring)
    return Plan(memory, absences, facts, hours, config.processes, **machine(card))


def _images_of(prompts: Sequence[Prompt], options: PolicyOptions) -> int:
    """Return the most images of a prompt, at least the editor's one."""
    spec = POLICIES[options.kind]
    least = int(spec.edits and not spec.sets)
    return max([least, *(len(prompt.sources) + len(prompt.references) for prompt in prompts)])


def _check_rewards(
    config: PolicyConfig, prompts: list[Prompt], shown: list[Prompt]
) -> tuple[set[ClipEncoder], list[MissingFile]]:
    """Have each reward check the prompts that it will score; a user's own scores trial images too.

    Returns:
        Encoders of the rewards, which are not loaded, and rewards that fail.
    """
    encoders = set()
    broken = []
    for configs, scored, size in (
        (config.rewards, prompts, config.sampling.size),
        (config.evaluation.rewards, shown, config.evaluation.size),
    ):
        for name, reward in sources.rewards_of(configs).items():
            reward.check(scored)
            if isinstance(reward, ClipReward):
                encoders.add(reward.clip)
            elif scored and isinstance(reward, UserReward) and not hasattr(reward.reward, "load"):
                try:
                    smoke_test(name, reward, scored, size=Size(*size), seconds=config.reward_timeout)
                except RewardError as fault:
                    broken.append(MissingFile("rewards", name, str(fault)))
    return encoders, broken


def plan_generation(
    options: PolicyOptions, *, size: Size | None = None, judge: str = "", prompts: Sequence[Prompt] = (), card: int = 0
) -> Plan:
    """Measure the memory of generating one image at a time.

    Args:
        options: the generator's. The published architecture replaces absent weights.
        size: size of the image; 1024 × 1024, or the tiny checkpoint's own, by default.
        judge: the judge of candidates; behind HTTP it takes no memory here, and is asked whether it answers.
        prompts: the one with the most images decides the peak.
        card: gigabytes of the card that it is for; 0 for this machine's.
    """
    configs, missing = sources.generator_of(options)
    settings = settings_of(judge, memory=options.memory) if judge else None
    judge_configs, missing_judge = sources.judge("--judge", settings)
    if not size:
        size = POLICIES[options.kind].committed.size if options.checkpoint == TINY else SIZE
    job = Job(
        options=options,
        configs=configs,
        batches=[Batch(size, "size")],
        images=_images_of(prompts, options),
        scorers=[judge_scorer(settings, judge_configs)] if settings and judge_configs else [],
    )
    return Plan(measure(job), [*missing, *missing_judge], **machine(card))
