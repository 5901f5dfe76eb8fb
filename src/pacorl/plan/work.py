"""Forwards of the transformer per epoch, counted by assigning its samples to processes as the engine does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import Row, assign_rows, divide
from pacorl.types import Prompt


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes and forwards of an epoch."""

    sampler: Sampler
    """Sampler of the first epoch."""
    samples: int
    latents: int
    """Latents that the engine keeps: each node and its children, its mean if needed, and each endpoint."""
    node_batch: int
    """The largest number of nodes in one trained forward; 0 for an objective that trains on samples."""
    passes: int
    """Forwards per velocity: 2 with classifier-free guidance."""
    forwards_per_image: Mapping[str, float]
    """`sampling`, `training` (with a backward each) and `other_policies` (the base for the KL, and the sampling policy
    for an objective that compares with it)."""


def work_of(config: PolicyConfig, *, world: int) -> Work:
    """Count the work of a config's first epoch on `world` processes."""
    # The first epoch's sampler, whose tree decides how many latents are distinct. Without noise each sample passes all
    # steps independently.
    spec = OBJECTIVES[config.objective.name]
    division = divide(config, world=world)
    samples = division.prompts * config.group_size
    sampler = config.sampling.sampler(0, group_size=config.group_size, seed=config.seed, spec=spec)
    tree = sampler.tree if sampler.stochastic else Tree(config.group_size)

    # Distinct latents at each stochastic step, over all processes, and last the samples.
    nodes = [0] * (len(tree.branches) + 1)
    node_batch = 0
    for unit in _units(config, samples, sampler.tree, batch=division.batch, world=world):
        for level in range(len(nodes)):
            distinct = len({tree.node_of(number, level) for number in unit})
            nodes[level] += distinct
            if level < len(tree.branches):
                most = tree.nodes_of_batch(division.batch, level, least=config.nodes_of_step)
                node_batch = max(node_batch, min(distinct, most))
    per_node = 2 if sampler.keeps_means else 1
    latents = samples + sum(per_node * parents + children for parents, children in pairwise(nodes))

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
    forwards = {"sampling": sampled, "training": trained, "other_policies": other_policies}
    per_image = {phase: passes * count / samples for phase, count in forwards.items()}
    return Work(sampler, samples, latents, node_batch if is_path else 0, passes, per_image)


def _units(config: PolicyConfig, samples: int, tree: Tree, *, batch: int, world: int) -> Iterator[list[int]]:
    """List the global rows that one process draws together, over all updates and processes."""
    rows = [Row(Prompt(0, ""), number) for number in range(samples)]
    for rank in range(world):
        assigned = assign_rows(
            rows,
            tree=tree,
            batch=batch,
            updates=config.optimizer.updates_per_epoch,
            world=world,
            rank=rank,
            whole_groups=config.whole_groups,
            kind=lambda prompt: "any",  # the most that may share a forward
        )
        for update in assigned:
            for unit in update:
                yield [row.number for row in unit]
