"""FLOPs of a run, and the time that they take on a card.

A pass is measured on meta tensors at batch 1, and multiplied by the number of times that the run makes it. Each
question to a judge is counted by itself: prefix caches make judging cheaper than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pacorl.grpo.evaluate import TRAINED_STRIDE
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.net import is_url
from pacorl.judge.http import HttpOptions
from pacorl.judge.http.endpoints import load_endpoints
from pacorl.judge.judge import InProcessOptions
from pacorl.lab.plan import memory, sources
from pacorl.lab.plan.work import Work
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.policy import Parts
from pacorl.models.quantize import NONE
from pacorl.rewards.consistency import JudgedReward
from pacorl.types import Character, Grid, Prompt, Size

REACHED = 0.3
"""Share of a card's peak that a run is assumed to reach; not measured."""
MUCH = 0.25
"""Share of a run's FLOPs above which its evaluations deserve a note."""
LITTLE = 1e17
"""FLOPs of evaluation below which no note is made: six minutes of an H100."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card by the name that torch reports."""

    name: str
    gigabytes: int
    """10^9 bytes."""
    tflops: float
    """Peak of dense bf16 products that are summed in fp32, in TFLOP/s."""

    def hours(self, flops: float) -> float:
        """Hours of some FLOPs at `REACHED` of the peak."""
        return flops / (REACHED * self.tflops * 1e12) / 3600


CARDS = (
    Card("NVIDIA GeForce RTX 3060", 12, 25.5),
    Card("NVIDIA GeForce RTX 4080", 16, 97.5),
    Card("NVIDIA GeForce RTX 4090", 24, 165.2),
    Card("NVIDIA L40S", 48, 362.0),
    Card("NVIDIA A100-SXM4-80GB", 80, 312.0),
    Card("NVIDIA H100 80GB HBM3", 80, 989.4),
)
"""From NVIDIA's data sheets of A100, H100 and L40S, and its whitepaper of the AD102. The RTX 3060's follows from the
whitepaper of the GA102: 512 FLOP a cycle on each of 28 multiprocessors at 1.78 GHz."""


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs of a run on all its processes."""

    image: float
    """Of a training image, from noise to its share of the update."""
    judged: float
    """Of all questions about a training image; 0 if no reward asks a judge."""
    questions: int
    judges_here: bool
    """Whether the judge computes on the cards of the run."""
    judge_servers: int
    """Servers of the judge; 0 for a judge of this process."""
    samples: int
    """Training images of an epoch."""
    epochs: int
    evaluations: tuple[float, ...]
    """Of each evaluation, in the order of the run."""
    world: int
    """Processes of the run."""

    @property
    def epoch(self) -> float:
        """Of an epoch, with the judge's if it computes on the cards of the run."""
        return self.samples * (self.image + self.judged * self.judges_here)

    @property
    def judge_cards(self) -> int:
        """Cards that judge as fast as the processes train."""
        return math.ceil(self.world * self.judged / self.image)

    @property
    def evaluation(self) -> float:
        """Of all evaluations."""
        return sum(self.evaluations)

    @property
    def total(self) -> float:
        """Of the whole run."""
        return self.epochs * self.epoch + self.evaluation

    @property
    def evaluation_share(self) -> float:
        """Share of the evaluations in the whole run."""
        return self.evaluation / self.total

    @property
    def evaluation_line(self) -> str:
        """The evaluations in one line."""
        return (
            f"evaluation: {len(self.evaluations)} evaluations are {self.evaluation_share:.0%} of the run's FLOPs, "
            f"{self.evaluation / 1e15:.3g} of {self.total / 1e15:.3g} PFLOP"
        )

    def time_line(self, cards: Sequence[Card]) -> str:
        """The hours on some cards in one line."""
        hours = ", ".join(f"{card.hours(self.total / self.world):.3g} on {card.name}" for card in cards)
        return f"hours, computed at {REACHED:.0%} of the peak in bf16: {hours}"

    def warnings(self) -> list[str]:
        """Notes about costly evaluations and a slow judge."""
        notes = []
        if self.evaluation > LITTLE and self.evaluation_share > MUCH:
            notes.append(
                f"evaluation takes {self.evaluation_share:.0%} of the run's FLOPs: lower evaluation.size, "
                "evaluation.steps or prompts.evaluation_limit, raise evaluation.every, or set "
                "evaluation.compare_trained=false"
            )
        if self.judge_cards > self.judge_servers > 0:
            notes.append(
                f"the judge is the slower side: its servers are {self.judge_servers}, and {self.judge_cards} cards "
                f"would keep up with {self.world} processes that train; serve it on more cards, or train on fewer"
            )
        return notes


def cost_of(
    config: PolicyConfig,
    *,
    work: Work,
    policy: PipelinePolicy,
    judge: Parts,
    prompts: Sequence[Prompt],
    evaluated: int,
    world: int,
) -> Cost:
    """Count the FLOPs of a run.

    Args:
        config: the run.
        work: its forwards.
        policy: on the meta device, with the run's adapter.
        judge: parts of the judge; empty for a judge behind HTTP, for which the published one is assumed.
        prompts: training prompts; without them a grid of 2 × 2 with one reference is assumed.
        evaluated: number of prompts of an evaluation; 0 if they are absent, for which the limit is assumed.
        world: number of processes.
    """
    shown = (Character("", "", (Path(),)),)
    prompt = prompts[0] if prompts else Prompt(0, "", grid=Grid(2, 2), characters=shown)
    rewards = [reward for key, reward in sources.rewards_of(config) if not key.startswith("evaluation.")]
    questions = sum(reward.questions(prompt) for reward in rewards if isinstance(reward, JudgedReward))
    questions = questions if config.judge else 0
    here = bool(questions) and isinstance(config.judge, InProcessOptions)
    size, full = (policy.nearest_size(Size(*sides)) for sides in (config.sampling.size, config.evaluation.size))

    # A training image: `forwards_per_image` counts a guided velocity as two forwards, and a measured pass has both.
    forward, decoding = _image_passes(policy, size)
    sampler = work.sampler.model_copy(update={"size": size})
    training = memory.training_pass(policy, sampler=sampler, batch=1, with_base=False).flops
    forwards = work.forwards_per_image
    image = (forwards["sampling"] + forwards["other_policies"]) * forward + forwards["training"] * training
    image = image / work.passes + decoding
    judged = _judged(config, judge, prompt, questions, size)

    # An image of an evaluation, at full and at the training size.
    steps = config.evaluation.steps
    full_forward, full_decoding = _image_passes(policy, full)
    large = steps * full_forward + full_decoding
    small = steps * forward + decoding
    if here:
        large += _judged(config, judge, prompt, questions, full)
        small += judged

    return Cost(
        image=image,
        judged=judged,
        questions=questions,
        judges_here=here,
        judge_servers=_servers(config) if questions else 0,
        samples=work.samples,
        epochs=_epochs(config),
        evaluations=_evaluations(
            config, large, small, evaluated or config.prompts.evaluation_limit, equal=full == size
        ),
        world=world,
    )


def _image_passes(policy: PipelinePolicy, size: Size) -> tuple[float, float]:
    """FLOPs of a velocity, and of decoding an image."""
    velocity = memory.sampling_pass(policy, size=size, batch=1).flops
    return velocity, memory.decoding_pass(policy, size=size, batch=1).flops


def _judged(config: PolicyConfig, judge: Parts, prompt: Prompt, questions: int, size: Size) -> float:
    """FLOPs of some questions about an image of this size, each by itself; packed weights have the same products."""
    if not questions or config.judge is None:
        return 0.0
    panel = Size(size.height // prompt.grid.rows, size.width // prompt.grid.cols)
    configs = judge or sources.JUDGE_PARTS
    cost = memory.judge_cost(configs, dtype="bfloat16", quantize=NONE, questions=1, panel=panel)
    return questions * (1 + config.judge.symmetric) * cost.flops


def _servers(config: PolicyConfig) -> int:
    """Count the judge's servers; 0 if there is none, or their file is absent."""
    if not isinstance(config.judge, HttpOptions):
        return 0
    if is_url(config.judge.checkpoint):
        return 1
    path = Path(config.judge.checkpoint)
    return len(load_endpoints(path).urls) if path.exists() else 0


def _epochs(config: PolicyConfig) -> int:
    """Epochs of the run, which `max_steps` may end earlier."""
    steps = config.optimizer.updates_per_epoch * config.objective.inner_epochs
    return min(config.epochs, math.ceil(config.max_steps / steps)) if config.max_steps else config.epochs


def _evaluations(config: PolicyConfig, large: float, small: float, prompts: int, *, equal: bool) -> tuple[float, ...]:
    """FLOPs of each evaluation: before the first epoch, after the last, and every so many between."""
    options, epochs = config.evaluation, _epochs(config)
    images = prompts * options.samples_per_prompt
    compared = options.compare_sizes and not equal
    average = images * (large + small * compared)

    # The trained adapter is sampled too, once training has begun.
    trained = images * small if compared else images / TRAINED_STRIDE * large
    later = average + trained * options.compare_trained
    between = (epochs - 1) // options.every if options.every else 0
    return (average, *([later] * (between + 1)))
