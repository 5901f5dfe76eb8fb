"""Hours of a run on a card: FLOPs at half of the card's peak, times what a run of its form took of that on an H200."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pacorl.core.devices import NONE
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import divide
from pacorl.plan.passes import Generator

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
class Forwards:
    """Forwards of the transformer in an epoch, of all processes."""

    sampler: Sampler
    """Sampler of the first epoch."""
    samples: int
    node_batch: int
    """The largest number of nodes in one trained forward; of samples for an objective that trains on these."""
    latents: float
    """Latents that the engine keeps: each node and its children, its mean if needed, and each endpoint."""
    per_image: Mapping[str, float]
    """`sampling`, `training` (with a backward each) and `other_policies` (the base for the KL, and the sampling policy
    for an objective that compares with it)."""


def forwards_of(config: PolicyConfig) -> Forwards:
    """Count the forwards of a config's first epoch.

    A node whose samples several processes share is counted once, and each of them computes it.
    """
    spec = OBJECTIVES[config.objective.name]
    division = divide(config, world=config.processes)
    samples = division.prompts * config.group_size
    sampler = config.sampling.sampler(0, group_size=config.group_size, seed=config.seed, spec=spec)
    tree = sampler.tree
    levels = range(len(tree.branches))
    nodes = [1 / tree.leaves(level) for level in levels]
    """Of an image at each stochastic step."""

    # Sampling: nodes pass the steps after the previous stochastic step up to their own, and samples pass the suffix.
    starts = [-1, *sampler.stochastic_steps]
    sampled: float = len(sampler.suffix.grid(starts[-1] + 1, sampler.steps)) - 1
    for count, (before, step) in zip(nodes, pairwise(starts), strict=False):
        sampled += count * (step - before)

    # Training: each node once, or each sample at each trained step.
    is_path = spec.needs == "path"
    trained = sum(nodes) if is_path else float(len(sampler.sde_steps))

    # Other policies: the base, and the sampling policy. Without a lag the sampling policy is the trained policy until
    # the epoch's first optimizer step.
    other_policies = trained if config.objective.kl_weight > 0 else 0.0
    if spec.needs == "endpoint":
        other_policies += trained if spec.lag else trained * (1 - 1 / config.optimizer.updates_per_epoch)

    node_batches = [tree.nodes_of_batch(division.batch, level, least=config.nodes_of_step) for level in levels]
    per_node = 2 if sampler.keeps_means else 1
    latents = 1 + sum(per_node * parents + children for parents, children in pairwise([*nodes, 1]))
    return Forwards(
        sampler,
        samples,
        node_batch=max(node_batches) if is_path and node_batches else config.sampling.batch,
        latents=samples * latents,
        per_image={"sampling": sampled, "training": trained, "other_policies": other_policies},
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of a run on all its processes."""

    flops: float
    """Judges in other processes cost the run's cards nothing."""
    saved: float
    """Bytes of all checkpoints that are written."""
    form: str
    """Key of `MEASURED`."""
    processes: int

    def hours(self, card: Card) -> tuple[float, float]:
        """Return the hours of the run with such a card for each process: at best, and as measured."""
        computed = self.flops / (PRODUCTS_SHARE * card.tflops * 1e12 * self.processes)
        low, high = ((rate * computed + self.saved / DISK_RATE) / 3600 for rate in MEASURED[self.form])
        return low, high


def cost_of(
    config: PolicyConfig, *, forwards: Forwards, generator: Generator, judging: Sequence[float], evaluated: int
) -> Cost:
    """Count the work of a run.

    Args:
        forwards: of an epoch.
        generator: as measured, for batches of sampling and of evaluation.
        judging: FLOPs of this process's judge for a training image, and for one of an evaluation.
        evaluated: prompts of an evaluation.
    """
    # A training image. A measured pass has both forwards of a guided velocity.
    figures, counts = generator.figures, forwards.per_image
    forward = figures.sample_flops / config.sampling.batch
    image = forward * (counts["sampling"] + counts["other_policies"])
    image += figures.train_flops / forwards.node_batch * counts["training"]
    image += generator.decodings[0].flops + judging[0]

    # An image of an evaluation, of which there is one before, one after, and some between.
    shown = figures.evaluate_flops * config.evaluation.steps / config.evaluation.batch
    shown += generator.decodings[1].flops + judging[1]
    between = (config.epochs - 1) // config.evaluation.every if config.evaluation.every else 0
    evaluations = (between + 2) * evaluated * config.evaluation.samples_per_prompt

    quantized = "int8" if config.model.quantize != NONE else "bfloat16"
    return Cost(
        config.epochs * forwards.samples * image + evaluations * shown,
        saved=4 * figures.adapter * math.ceil(config.epochs / config.save_every),
        form="streamed" if config.model.stream else quantized,
        processes=config.processes,
    )
