"""Requirements before the start: `pacorl train-policy CONFIG --dry-run`, and of `pacorl generate --dry-run`.

The config's prompts and sizes are checked, absent data and weights are listed with their source, and memory and hours
are computed from passes on meta tensors. No weights are loaded, and of the network only a judge's own server is asked.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jinja2
import torch

from pacorl.config.options import MEMORY
from pacorl.core.devices import available_device
from pacorl.core.objectives import OBJECTIVES
from pacorl.generate.generator import SIZE
from pacorl.grpo.builders import checked_config, read_prompts
from pacorl.grpo.lora_config import LoraConfig
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import divide
from pacorl.judge import settings_of
from pacorl.models.policies import POLICIES
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan import sources
from pacorl.plan.hours import CARDS, SCORED_PIXELS, forwards_of, hours_of
from pacorl.plan.judges import clip_scorer, judge_scorer
from pacorl.plan.peaks import PHASES, Batch, Job, Memory, Training, measure
from pacorl.plan.sources import MissingFile
from pacorl.records.prompts import kinds_of
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
LEAKS = "leaks"
"""Fact: training prompts that are also evaluated."""
FEW_IMAGES = 8
"""Images of an evaluation below which an interval shows hardly any change."""
NO_CARD = "no card here"
LEAST_HOURS = 0.1
"""Hours below which a run's time is not its products', and none is shown."""


def device() -> tuple[str, int | None]:
    """Return the card's name and its bytes, which are None without a GPU."""
    match available_device():
        case "cuda":
            card = torch.cuda.get_device_properties(0)
            return card.name, int(card.total_memory)
        case "mps":
            return "Apple GPU", int(torch.mps.recommended_max_memory())
    return NO_CARD, None


def machine(card: int = 0) -> dict[str, Any]:
    """Return a plan's fields for this machine, or for one with a card of this size, whose main memory is unknown."""
    if card:
        return {"device": f"a card of {card} GB", "device_bytes": card * 2**30}
    name, size = device()
    main = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"device": name, "device_bytes": size, "main_bytes": main}


@dataclass(frozen=True, slots=True)
class Plan:
    """Requirements of a command."""

    memory: Memory
    absences: Sequence[MissingFile] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Counts of data and steps, and findings about the data such as leaks."""
    less_memory: Sequence[str] = ()
    """Settings with which the command needs less of a card."""
    hours: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Card → hours of a training on one for each process: at best, and at most."""
    processes: int = 1
    device: str = NO_CARD
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
        """What the run does not fit, with the fix; empty if it fits."""
        if self.device_bytes and self.peak_bytes + CUDA_BYTES > self.device_bytes:
            ways = ", or ".join([*self.less_memory, "a smaller batch, size or model"])
            return f"does not fit {self.device}: try {ways}"
        if self.main_bytes and self.memory.held > self.main_bytes:
            ways = "start fewer processes, keep models on the card (memory normal), or take a smaller model"
            return f"does not fit {size_text(self.main_bytes)} of main memory: {ways}"
        return ""

    @property
    def download_bytes(self) -> int:
        """Bytes of the absent weights, each source counted once."""
        return sum({absence.source: absence.bytes for absence in self.absences}.values())

    @property
    def verdict(self) -> str:
        """The first line of the dry run."""
        fit = self.shortage or f"fits {self.device}"
        if not self.device_bytes:
            size = size_text(self.peak_bytes + CUDA_BYTES)
            fit = f"{self.device}, so the CPU computes; a card would need {size}; {self.shortage}"
        main_memory = size_text(self.memory.held, self.main_bytes)
        with_files = f"{size_text(self.memory.host)} with cached files"
        findings = [fit.removesuffix("; "), f"main memory {main_memory} ({with_files})"]
        keys = dict.fromkeys(absence.key for absence in self.absences)
        findings.append(f"absent or broken: {', '.join(keys) or 'nothing'}")
        if LEAKS in self.facts:
            findings.append("nothing is held out, see leaks")
        return "; ".join(findings)

    @property
    def exit_code(self) -> int:
        """Exit code of the dry run."""
        return NOT_READY if self.absences or self.shortage else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the whole plan, for JSON; sizes in bytes."""
        names = ("verdict", "shortage", "peak_bytes", "download_bytes")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        phases = [f"{PHASES[phase]} {size_text(size)}" for phase, size in self.memory.phases.items()]
        card = size_text(self.peak_bytes, self.device_bytes)
        screen = jinja2.Template(SCREEN, trim_blocks=True)
        text: str = screen.render(plan=self, card=card, phases=phases, hours=_hours(self))
        return text.strip()


SCREEN = """\
verdict: {{ plan.verdict }}
{% for absence in plan.absences %}
  {{ absence.key }} = {{ absence.source }}: {{ absence.remedy }}
{% endfor %}
{% if plan.download_bytes %}
to download: {{ "%.0f"|format(plan.download_bytes / 10**9) }} GB
{% endif %}
card: {{ card }}, and about 1 GiB for CUDA
  {{ phases|join(", ") }}
{% for name, fact in plan.facts.items() %}
{{ name.replace("_", " ") }}: {{ fact }}
{% endfor %}
{% for line in hours %}
{{ line }}
{% endfor %}
"""


def _hours(plan: Plan) -> Iterator[str]:
    """List a training's hours on the card that is here, else on the listed ones of the named size, or that hold it."""
    least = max(plan.device_bytes or 0, plan.peak_bytes + CARD_MARGIN)
    here = [card for card in CARDS if card.name == plan.device]
    for card in here or [card for card in CARDS if card.gigabytes * 2**30 >= least]:
        low, high = plan.hours.get(card.name, (0.0, 0.0))
        if high >= LEAST_HOURS:
            yield f"hours on {plan.processes} × {card.name}: {figure(low)} to {figure(high)}"


def smaller_forms(memory: str, *, setting: str = "memory: ") -> list[str]:
    """List the settings whose forms of the weights need less of a card than that of `memory`."""
    return [f"{setting}{form}" for form in MEMORY[MEMORY.index(memory) + 1 :]]


def less_memory(config: LoraConfig) -> list[str]:
    """List the settings with which a training needs less of a card."""
    recomputing = [] if config.model.gradient_checkpointing else ["model.gradient_checkpointing: true"]
    return [*recomputing, *smaller_forms(config.memory)]


def figure(value: float, digits: int = 2) -> str:
    """Round to significant digits, and never write `1e+03`."""
    return f"{float(f'{value:.{digits}g}'):g}"


def size_text(number: int, of: int | None = None) -> str:
    """Format bytes as `3.1 GiB`, or as `3.1 GiB of 8 GiB`."""
    text = f"{figure(number / 2**30, 3)} GiB"
    if of:
        return f"{text} of {size_text(of)}"
    return text


# --- a policy's training ---------------------------------------------------------------------------------------


def plan_training(config: PolicyConfig, rewards: Collection[str] = (), *, ask: bool = True, card: int = 0) -> Plan:
    """Check a config against its data and a card, and measure its memory, as `--dry-run` does; `print` shows the plan.

    Weights are neither loaded nor required. Users' files are executed.

    Args:
        config: the run. The published architecture replaces absent weights.
        rewards: names of the functions that `PolicyTrainer` is to get. Their memory is not in the plan.
        ask: whether judges over HTTP and rewards of users' files are asked, and listed as absent if they do not answer.
        card: gigabytes of the card that the run is for; 0 for this machine's.

    Raises:
        ConfigError: A size or the number of samples does not divide.
        ValueError: A reward is unknown, or a prompt is bad (with file and line) or lacks an input of a reward.
    """
    config = config.model_copy(update={"rewards": tuple(it for it in config.rewards if it.name not in rewards)})
    forwards = forwards_of(config)
    config = checked_config(config, {})
    sampling, evaluation = config.sampling, config.evaluation
    data = _read(config, samples=forwards.samples, ask=ask)
    absences = data.absences
    prompts = sources.prompts_or_example(config, data.prompts)

    # Images of the run. There is an evaluation before, one after, and some between.
    images = config.epochs * forwards.samples
    evaluations = 2 + ((config.epochs - 1) // evaluation.every if evaluation.every else 0)
    images_shown = evaluations * evaluation.samples_per_prompt * (data.shown or config.prompts.evaluation_limit)

    # Checkpoints, and what scores the images.
    configs, missing = sources.generator_of(config.model)
    absences += missing
    scorers = [clip_scorer(encoder, config, prompts[0]) for encoder in data.encoders]
    for key, settings in (("judge.checkpoint", config.judge), ("evaluation.judge", config.held_out_judge)):
        judge_configs, missing = sources.judge(key, settings, ask=ask)
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
        images=max(len(prompt.sources) + len(prompt.references) for prompt in prompts),
        prompts=data.prompts,
        training=training,
        scorers=scorers,
        encoded=len(data.prompts) or config.prompts_per_epoch + config.prompts.evaluation_limit,
        world=config.processes,
    )

    memory = measure(job)
    # A token takes two FLOPs for each weight, which has two bytes.
    tokens = (images * math.prod(sampling.size) + images_shown * math.prod(evaluation.size)) / SCORED_PIXELS
    scoring = tokens * sum(scorer.files for scorer in scorers)
    hours = hours_of(memory.flops, memory=config.memory, processes=config.processes, scoring=scoring)
    return Plan(memory, absences, data.facts, less_memory(config), hours, config.processes, **machine(card))


class Data(NamedTuple):
    """Prompts of a run, and encoders of its rewards, which are not loaded."""

    prompts: list[Prompt]
    """Of training and evaluation; empty if a file is absent."""
    shown: int
    """Number of evaluation prompts."""
    encoders: set[ClipEncoder]
    absences: list[MissingFile]
    facts: dict[str, Any]


def _read(config: PolicyConfig, *, samples: int, ask: bool) -> Data:
    """Read a run's prompts, if all are here, and check them and the rewards.

    Args:
        samples: images of an epoch.
    """
    # With a file absent the prompts stay unread: the plan lists all absences at once.
    absences = list(sources.absent_prompts(config))
    train, shown, leaks = ([], [], "") if absences else read_prompts(config)
    prompts = [*train, *shown]
    facts = _counts(config, train, shown, samples=samples)
    if leaks:
        facts[LEAKS] = leaks

    # Each reward checks the prompts that it will score; a user's reward scores trial images too.
    encoders = set()
    for configs, scored, size in (
        (config.rewards, prompts, config.sampling.size),
        (config.evaluation.rewards, shown, config.evaluation.size),
    ):
        for name, reward in sources.rewards_of(configs).items():
            reward.check(scored)
            if isinstance(reward, ClipReward):
                encoders.add(reward.clip)
            elif ask and scored and isinstance(reward, UserReward) and not hasattr(reward.reward, "load"):
                try:
                    smoke_test(name, reward, scored, size=Size(*size))
                except RewardError as fault:
                    absences.append(MissingFile("rewards", name, str(fault)))
    return Data(prompts, len(shown), encoders, [*absences, *sources.absences_of(config, encoders)], facts)


def _counts(config: PolicyConfig, train: list[Prompt], shown: list[Prompt], *, samples: int) -> dict[str, Any]:
    """Count a run's prompts, and the `samples` of an epoch; with few images of an evaluation, warn of them."""
    facts: dict[str, Any] = {
        "images_per_epoch": samples,
        "training_prompts": len(train),
        "evaluation_prompts": len(shown),
    }
    if train:
        facts["read_as"] = kinds_of(train)
        facts["times_seen"] = round(config.epochs * samples / config.group_size / len(train), 1)
    if rounded := divide(config, world=config.processes).differences(config):
        facts["rounded"] = rounded
    evaluated = len(shown) * config.evaluation.samples_per_prompt
    if 0 < evaluated < FEW_IMAGES:
        facts["few_images"] = (
            f"an evaluation has {evaluated}, and its interval shows large changes alone; hold out more prompts, or "
            "raise evaluation.samples_per_prompt"
        )
    return facts


# --- generating ------------------------------------------------------------------------------------------------


def plan_generation(options: PolicyOptions, *, size: Size | None = None, judge: str = "", images: int = 0) -> Plan:
    """Measure the memory of generating one image at a time.

    Args:
        options: the generator's. The published architecture replaces absent weights.
        size: size of the image; 1024 × 1024, or the tiny checkpoint's own, by default.
        judge: the judge of candidates; behind HTTP it takes no memory here, and is asked whether it answers.
        images: number of sources and references.
    """
    spec = POLICIES[options.kind]
    configs, missing = sources.generator_of(options)
    settings = settings_of(judge, memory=options.memory) if judge else None
    judge_configs, missing_judge = sources.judge("--judge", settings, ask=True)
    job = Job(
        options=options,
        configs=configs,
        batches=[Batch(size or (spec.committed.size if options.checkpoint == TINY else SIZE), "size")],
        images=images or int(spec.edits and not spec.sets),
        scorers=[judge_scorer(settings, judge_configs)] if settings and judge_configs else [],
    )
    absences = [*missing, *missing_judge]
    return Plan(measure(job), absences, less_memory=smaller_forms(options.memory, setting="--memory "), **machine())
