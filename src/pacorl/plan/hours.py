"""Hours of a run on a card: FLOPs at half of the card's peak, times what a run of its form took of that on an H200."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pacorl.core.devices import NONE
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies.policy import PolicyOptions
from pacorl.plan.judges import Scorer
from pacorl.plan.passes import Generator
from pacorl.plan.work import Work

PRODUCTS_SHARE = 0.5
"""Share of a card's peak that products are assumed to reach."""
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


CARDS = (
    Card("NVIDIA GeForce RTX 3060", 12, 25.5),
    Card("NVIDIA GeForce RTX 4080", 16, 97.5),
    Card("NVIDIA GeForce RTX 4090", 24, 165.2),
    Card("NVIDIA L40S", 48, 362.0),
    Card("NVIDIA A100-SXM4-80GB", 80, 312.0),
    Card("NVIDIA H100 80GB HBM3", 80, 989.4),
    Card("NVIDIA H200", 141, 989.4),
)
"""From NVIDIA's data sheets of A100, H100, H200 and L40S, and its whitepaper of the AD102. The RTX 3060's follows from
the whitepaper of the GA102: 512 FLOP a cycle on each of 28 multiprocessors at 1.78 GHz."""


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs of a run on all its processes."""

    image: Mapping[str, float]
    """Phase → FLOPs of a training image, judging included if it is done on the cards of the run."""
    judged: float
    """FLOPs of the questions about a training image, shared prefixes once."""
    judge_elsewhere: bool
    samples: int
    """Training images of an epoch."""
    epochs: int
    evaluation: float
    """FLOPs of an evaluation."""
    evaluations: int
    saved: float
    """Bytes of all checkpoints that are written."""
    form: str
    """Key of `MEASURED`."""
    world: int
    """Processes of the run."""

    @property
    def judge_cards(self) -> int:
        """Cards that judge as fast as the processes train; 0 if the processes judge."""
        return math.ceil(self.world * self.judged / sum(self.image.values())) if self.judge_elsewhere else 0

    def hours(self, card: Card) -> tuple[float, float]:
        """Return the hours of the run with such a card for each process: at best, and as measured."""
        flops = self.epochs * self.samples * sum(self.image.values()) + self.evaluations * self.evaluation
        computed = flops / (PRODUCTS_SHARE * card.tflops * 1e12 * self.world)
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
    # `forwards_per_image` counts a guided velocity as two forwards, and a measured pass has both.
    forward = generator.sample_flops[0] / config.sampling.batch
    step = generator.train_flops / (work.node_batch or config.sampling.batch)
    counts = {phase: count / work.passes for phase, count in work.forwards_per_image.items()}
    image = {
        "sampling": forward * counts["sampling"],
        "training": step * counts["training"] + forward * counts["other_policies"],
        "decoding": generator.decodings[0].flops,
    }
    evaluation = generator.sample_flops[1] * config.evaluation.steps / config.evaluation.batch
    evaluation += generator.decodings[1].flops
    # Judges in other processes cost the run's cards nothing.
    elsewhere = bool(judge and config.judge and config.judge.remote)
    if judge and not elsewhere:
        image["judging"] = judge.image_flops
        evaluation += judge.evaluated_flops
    if held_out_judge:
        evaluation += held_out_judge.evaluated_flops

    between = (config.epochs - 1) // config.evaluation.every if config.evaluation.every else 0
    return Cost(
        image=image,
        judged=judge.image_flops if judge else 0.0,
        judge_elsewhere=elsewhere,
        samples=work.samples,
        epochs=config.epochs,
        evaluation=evaluation * evaluated * config.evaluation.samples_per_prompt,
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
