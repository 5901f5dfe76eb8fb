"""Hours of a run on a card: FLOPs at half of the card's peak, times a ratio measured for such runs on an H200."""

from itertools import pairwise
from typing import NamedTuple

from pacorl.config.options import Memory
from pacorl.core.objectives import OBJECTIVES
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import divide

PRODUCTS_SHARE = 0.5
"""Share of a card's peak that products are assumed to reach."""
MEASURED = {"normal": (1.06, 1.10), "low": (1.10, 1.76), "lowest": (1.10, 1.59)}
"""`memory` → a run's time over the computed time, at best and as measured."""
SCORED_PIXELS = 250
"""Pixels of an image for a token that a judge reads, if it is asked about each pair of four panels."""


class Card(NamedTuple):
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
"""Cards, from NVIDIA's data sheets of A100, H100, H200 and L40S, and its whitepaper of the AD102. The RTX 3060's FLOP/s
follow from the whitepaper of the GA102: 512 FLOP a cycle on each of 28 multiprocessors at 1.78 GHz."""


class Forwards(NamedTuple):
    """Forwards of the transformer in an epoch, of all processes."""

    samples: int
    node_batch: int
    """Most nodes in one trained forward, or most samples if the objective trains on samples."""
    sampling: float
    """Forwards per image in sampling."""
    training: float
    """Forwards per image in training, with a backward each."""
    other_policies: float
    """Forwards per image of the base for the KL, and of the sampling policy if the objective compares with it."""


def forwards_of(config: PolicyConfig) -> Forwards:
    """Count the forwards of a config's first epoch.

    A node whose samples several processes share is counted once, and each of them computes it.
    """
    spec = OBJECTIVES[config.objective.name]
    division = divide(config, world=config.processes)
    sampler = config.sampling.sampler(0, group_size=config.group_size, seed=config.seed, spec=spec)
    tree = sampler.tree
    levels = range(len(tree.branches))
    nodes = [1 / tree.leaves(level) for level in levels]
    """Nodes per image at each stochastic step."""

    # Sampling: nodes pass the steps after the previous stochastic step up to their own, and samples pass the suffix.
    starts = [-1, *sampler.stochastic_steps]
    sampled: float = len(sampler.suffix.grid(starts[-1] + 1, sampler.steps)) - 1
    for count, (before, step) in zip(nodes, pairwise(starts), strict=False):
        sampled += count * (step - before)

    # Training: each node once, or each sample at each trained step.
    trained, node_batch = float(len(sampler.sde_steps)), config.sampling.batch
    if spec.needs == "path":
        trained = sum(nodes)
        node_batch = max(tree.nodes_of_batch(division.batch, level, least=config.nodes_of_step) for level in levels)

    # Other policies: the base, and the sampling policy. Without a lag the sampling policy is the trained policy until
    # the epoch's first optimizer step.
    other_policies = 0.0
    if config.objective.kl_weight > 0:
        other_policies += trained
    if spec.needs == "endpoint":
        other_policies += trained if spec.lag else trained * (1 - 1 / config.optimizer.updates_per_epoch)

    return Forwards(division.prompts * config.group_size, node_batch, sampled, trained, other_policies)


def hours_of(
    flops: float, *, memory: Memory = "normal", processes: int = 1, scoring: float = 0
) -> dict[str, tuple[float, float]]:
    """Compute the hours of a run with a card for each process: card → at best, and at most.

    Args:
        flops: of the generator on all processes, evaluations included. Checkpoints are written meanwhile.
        scoring: FLOPs of the models of the run's own processes that score the images, at most.
    """
    low, high = MEASURED[memory]
    hours = {}
    for card in CARDS:
        per_hour = PRODUCTS_SHARE * card.tflops * 1e12 * processes * 3600
        hours[card.name] = (low * flops / per_hour, high * (flops + scoring) / per_hour)
    return hours
