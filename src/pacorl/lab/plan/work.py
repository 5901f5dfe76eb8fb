"""How often an epoch runs the transformer, counted by dealing its samples to processes as the engine does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rows import Row, assign_rows
from pacorl.types import Prompt, Size


@dataclass(frozen=True, slots=True)
class Work:
    """The nodes of an epoch, and what follows from them."""

    sampler: Sampler
    """Of the first epoch."""
    samples: int
    nodes: tuple[int, ...]
    """Distinct latents at each stochastic step, over all processes, and last the samples."""
    node_batch: int
    """The largest number of nodes in one forward."""
    suffix_steps: int
    """Forwards of each sample after its last stochastic step."""
    forwards_per_image: dict[str, float]
    """`sampling`, `training` (with a backward each) and `other_policies` (of the base for the KL, and of the policy
    that sampled for an objective that compares with it)."""

    @property
    def latents(self) -> int:
        """How many the engine keeps: of each node and its children, its mean if that is needed, and each end."""
        latents = sum(1 + self.sampler.keeps_means for _ in self.sampler.stochastic_steps[:1])
        return self.samples + sum(latents * parents + children for parents, children in pairwise(self.nodes))


def work_of(config: PolicyConfig, *, world: int) -> Work:
    """Count the work of a config's first epoch on so many processes.

    Raises:
        ValueError: if its samples do not divide among them.
    """
    spec, samples = OBJECTIVES[config.objective.name], config.prompts_per_epoch * config.group_size
    evaluation_size = Size(*config.evaluation.size)
    sampler = config.sampling.sampler(
        0, group_size=config.group_size, seed=config.seed, spec=spec, evaluation_size=evaluation_size
    )
    # An objective of the endpoint samples without noise: each sample passes all steps by itself.
    tree = sampler.tree if sampler.stochastic else Tree(config.group_size)
    levels, steps = range(len(tree.branches) + 1), [-1, *sampler.stochastic_steps]

    units = list(_units(config, sampler.tree, world=world))
    nodes = tuple(sum(len({tree.node_of(number, level) for number in unit}) for unit in units) for level in levels)
    # The nodes of a step pass the steps that follow the one before, and the step itself.
    trunk = sum(count * (step - before) for count, (before, step) in zip(nodes, pairwise(steps), strict=False))
    suffix_steps = len(sampler.suffix.grid(steps[-1] + 1, sampler.steps)) - 1
    trained = sum(nodes[:-1]) if sampler.stochastic else samples * len(sampler.sde_steps)
    trained *= config.objective.inner_epochs
    others = trained if config.objective.kl_weight > 0 else 0.0
    if spec.needs == "endpoint":
        # Without a lag the policy that sampled is the trained one until the epoch's first optimizer step.
        updates = config.objective.inner_epochs * config.optimizer.updates_per_epoch
        others += trained if spec.lag else trained * (1 - 1 / updates)
    passes = 1 if config.model.negative_text is None else 2  # guided by a forward of the negative prompt
    return Work(
        sampler,
        samples,
        nodes,
        node_batch=tree.nodes_of_batch(config.sampling.batch, len(tree.branches) - 1) if tree.branches else 0,
        suffix_steps=suffix_steps,
        forwards_per_image={
            "sampling": passes * (trunk + nodes[-1] * suffix_steps) / samples,
            "training": passes * trained / samples,
            "other_policies": passes * others / samples,
        },
    )


def _units(config: PolicyConfig, tree: Tree, *, world: int) -> Iterator[list[int]]:
    """The global rows that one process draws together, of all updates and processes."""
    rows = [Row(Prompt(0, ""), number) for number in range(config.prompts_per_epoch * config.group_size)]
    updates = config.optimizer.updates_per_epoch
    for rank in range(world):
        dealt = assign_rows(rows, tree=tree, batch=config.sampling.batch, updates=updates, world=world, rank=rank)
        for update in dealt:
            yield from ([row.number for row in unit] for unit in update)
