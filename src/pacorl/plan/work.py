"""Forwards of the transformer per epoch, counted by assigning its samples to processes as the engine does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import Division, Row, assign_rows, divide
from pacorl.types import Prompt


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes and forwards of an epoch."""

    sampler: Sampler
    """Sampler of the first epoch."""
    samples: int
    nodes: tuple[int, ...]
    """Distinct latents at each stochastic step, over all processes, and last the samples."""
    node_batch: int
    """The largest number of nodes in one trained forward; 0 for an objective that trains on samples."""
    passes: int
    """Forwards per velocity: 2 with classifier-free guidance."""
    forwards_per_image: dict[str, float]
    """`sampling`, `training` (with a backward each) and `other_policies` (the base for the KL, and the sampling policy
    for an objective that compares with it)."""

    @property
    def latents(self) -> int:
        """Latents that the engine keeps: each node and its children, its mean if needed, and each endpoint."""
        per_node = 2 if self.sampler.keeps_means else 1
        latents = self.samples
        for parents, children in pairwise(self.nodes):
            latents += per_node * parents + children
        return latents


def work_of(config: PolicyConfig, *, world: int) -> Work:
    """Count the work of a config's first epoch on `world` processes."""
    # The first epoch's sampler, whose tree decides how many latents are distinct.
    spec = OBJECTIVES[config.objective.name]
    division = divide(config, world=world)
    samples = division.prompts * config.group_size
    sampler = config.sampling.sampler(
        0,
        group_size=config.group_size,
        seed=config.seed,
        spec=spec,
    )
    # Without noise each sample passes all steps independently.
    tree = sampler.tree if sampler.stochastic else Tree(config.group_size)
    nodes = [0] * (len(tree.branches) + 1)
    node_batch = 0
    for unit in _units(config, division, sampler.tree, world=world):
        for level in range(len(nodes)):
            distinct = len({tree.node_of(number, level) for number in unit})
            nodes[level] += distinct
            if level < len(tree.branches):
                most = tree.nodes_of_batch(division.batch, level, least=config.nodes_of_step)
                node_batch = max(node_batch, min(distinct, most))

    # Sampling: nodes pass the steps after the previous stochastic step up to their own, and samples pass the suffix.
    starts = [-1, *sampler.stochastic_steps]
    sampled = nodes[-1] * (len(sampler.suffix.grid(starts[-1] + 1, sampler.steps)) - 1)
    for count, (before, step) in zip(nodes, pairwise(starts), strict=False):
        sampled += count * (step - before)

    # Training: each node once, or each sample at each trained step.
    is_path = spec.needs == "path"
    trained = sum(nodes[:-1]) if is_path else samples * len(sampler.sde_steps)

    # Other policies: the base, and the sampling policy. Without a lag the sampling policy is the trained policy until
    # the epoch's first optimizer step.
    other_policies = trained if config.objective.kl_weight > 0 else 0.0
    if spec.needs == "endpoint":
        other_policies += trained if spec.lag else trained * (1 - 1 / config.optimizer.updates_per_epoch)

    # Only a negative text takes a second forward per velocity.
    passes = 1 if config.model.negative_text is None else 2
    return Work(
        sampler,
        samples,
        tuple(nodes),
        node_batch=node_batch if is_path else 0,
        passes=passes,
        forwards_per_image={
            "sampling": passes * sampled / samples,
            "training": passes * trained / samples,
            "other_policies": passes * other_policies / samples,
        },
    )


def _units(config: PolicyConfig, division: Division, tree: Tree, *, world: int) -> Iterator[list[int]]:
    """List the global rows that one process draws together, over all updates and processes."""
    rows = []
    for number in range(division.prompts * config.group_size):
        rows.append(Row(Prompt(0, ""), number))

    updates = config.optimizer.updates_per_epoch
    for rank in range(world):
        assigned = assign_rows(
            rows,
            tree=tree,
            batch=division.batch,
            updates=updates,
            world=world,
            rank=rank,
            kind=lambda prompt: "any",  # the most that may share a forward
        )
        for update in assigned:
            for unit in update:
                yield [row.number for row in unit]
