"""Hours of a run on a card: the FLOPs and streamed bytes of its phases, at half of the card's peak, times what a run of
its form took of that on an H200."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pacorl.core.devices import NONE
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan import passes
from pacorl.plan.judges import Scorer
from pacorl.plan.passes import Generator
from pacorl.plan.work import Work
from pacorl.types import Size

PRODUCTS_SHARE = 0.5
"""Share of a card's peak that products are assumed to reach."""
BUS_SHARE = 0.8
"""Share of the bus's rate that copies of weights are assumed to reach."""
DISK_RATE = 1e9
"""Bytes per second of a checkpoint that is written."""
MEASURED = {"bfloat16": (1.06, 1.10), "int8": (1.10, 1.76), "streamed": (1.10, 1.59)}
"""Form of the generator's weights → its time over the computed time, at best and as measured."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card by the name that torch reports."""

    name: str
    gigabytes: int
    """10^9 bytes."""
    tflops: float
    """Peak of dense bf16 products that are summed in fp32, in TFLOP/s."""
    bus_rate: float
    """Peak of 16 PCIe lanes in one direction, in 10^9 bytes/s."""


CARDS = (
    Card("NVIDIA GeForce RTX 3060", 12, 25.5, 31.5),
    Card("NVIDIA GeForce RTX 4080", 16, 97.5, 31.5),
    Card("NVIDIA GeForce RTX 4090", 24, 165.2, 31.5),
    Card("NVIDIA L40S", 48, 362.0, 31.5),
    Card("NVIDIA A100-SXM4-80GB", 80, 312.0, 31.5),
    Card("NVIDIA H100 80GB HBM3", 80, 989.4, 63),
    Card("NVIDIA H200", 141, 989.4, 63),
)
"""From NVIDIA's data sheets of A100, H100, H200 and L40S, and its whitepaper of the AD102. The RTX 3060's follows from
the whitepaper of the GA102: 512 FLOP a cycle on each of 28 multiprocessors at 1.78 GHz."""


@dataclass(frozen=True, slots=True)
class Load:
    """Work of a phase."""

    flops: float = 0.0
    sent: float = 0.0
    """Bytes of streamed weights, from main memory."""

    def __add__(self, other: Load) -> Load:
        return Load(self.flops + other.flops, self.sent + other.sent)

    def __mul__(self, count: float) -> Load:
        return Load(self.flops * count, self.sent * count)

    def seconds(self, card: Card) -> float:
        """Return the time on a card. Products and copies overlap: the slower counts."""
        products = self.flops / (PRODUCTS_SHARE * card.tflops * 1e12)
        return max(products, self.sent / (BUS_SHARE * card.bus_rate * 1e9))


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of a run on all its processes."""

    image: Mapping[str, Load]
    """Phase → a training image's share, judging included if it is done on the cards of the run."""
    judged: float
    """FLOPs of the questions about a training image, shared prefixes once."""
    judge_elsewhere: bool
    samples: int
    """Training images of an epoch."""
    epochs: int
    evaluation: Load
    """Of one evaluation."""
    evaluations: int
    saved: float
    """Bytes of all checkpoints that are written."""
    form: str
    """Key of `MEASURED`."""
    world: int
    """Processes of the run."""

    @property
    def image_flops(self) -> float:
        """FLOPs of a training image."""
        return sum(load.flops for load in self.image.values())

    @property
    def judge_cards(self) -> int:
        """Cards that judge as fast as the processes train; 0 if the processes judge."""
        return math.ceil(self.world * self.judged / self.image_flops) if self.judge_elsewhere else 0

    def hours(self, card: Card) -> tuple[float, float]:
        """Return the hours of the run with such a card for each process: at best, and as measured."""
        epoch = sum((load * self.samples).seconds(card) for load in self.image.values())
        computed = (self.epochs * epoch + self.evaluations * self.evaluation.seconds(card)) / self.world
        low, high = ((rate * computed + self.saved / DISK_RATE) / 3600 for rate in MEASURED[self.form])
        return low, high


def cost_of(
    config: PolicyConfig,
    *,
    work: Work,
    generator: Generator,
    judge: Scorer | None,
    held_out_judge: Scorer | None,
    evaluated: int,
    world: int,
) -> Cost:
    """Count the work of a run.

    Args:
        config: the run.
        work: its forwards.
        generator: as measured, for batches of sampling and of evaluation.
        judge: of the run.
        held_out_judge: the evaluation's own.
        evaluated: prompts of an evaluation.
        world: number of processes.
    """
    policy = generator.inputs.policy
    size, full = (policy.nearest_size(Size(*sides)) for sides in (config.sampling.size, config.evaluation.size))
    batch, nodes = config.sampling.batch, work.node_batch or config.sampling.batch

    # `forwards_per_image` counts a guided velocity as two forwards, and a measured pass has both.
    sent = work.passes * generator.streamed
    forward = Load(generator.sample_flops[0], sent) * (1 / batch)
    # Weights are sent for the forwards of a trained step and for its backward.
    step = Load(generator.train_flops, sent * (3 if config.model.gradient_checkpointing else 2)) * (1 / nodes)
    counts = {phase: count / work.passes for phase, count in work.forwards_per_image.items()}
    image = {
        "sampling": forward * counts["sampling"],
        "training": step * counts["training"] + forward * counts["other_policies"],
        "decoding": Load(passes.decoding_pass(generator.inputs, size=size).flops),
    }
    evaluation = Load(generator.sample_flops[1], sent) * (config.evaluation.steps / config.evaluation.batch)
    evaluation += Load(passes.decoding_pass(generator.inputs, size=full).flops)
    # Judges in other processes cost the run's cards nothing.
    elsewhere = bool(judge and config.judge and config.judge.remote)
    if judge and not elsewhere:
        image["judging"] = Load(judge.image_flops, judge.forwards * judge.streamed)
    for each in (None if elsewhere else judge, held_out_judge):
        evaluation += Load(each.evaluated_flops if each else 0)

    between = (config.epochs - 1) // config.evaluation.every if config.evaluation.every else 0
    return Cost(
        image=image,
        judged=judge.image_flops if judge else 0.0,
        judge_elsewhere=elsewhere,
        samples=work.samples,
        epochs=config.epochs,
        evaluation=evaluation * (evaluated * config.evaluation.samples_per_prompt),
        evaluations=between + 2,
        saved=4 * generator.adapter * math.ceil(config.epochs / config.save_every),
        form=form_of(config.model),
        world=world,
    )


def form_of(options: PolicyOptions) -> str:
    """Return the key of a generator's form in `MEASURED`."""
    if options.stream:
        return "streamed"
    return "bfloat16" if options.quantize == NONE else "int8"
