"""Rows of an epoch: their assignment to updates, processes and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

from pacorl.core.batches import grouped, in_batches
from pacorl.core.sampler import Tree
from pacorl.core.schedule import seed_of
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.models.policies.pipeline import PipelinePolicy


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to draw."""

    prompt: Prompt
    number: int
    """Global row in its epoch."""


def epoch_rows(prompts: Sequence[Prompt], *, epoch: int, count: int, group_size: int, seed: int) -> list[Row]:
    """List the rows of an epoch: `count` prompts, each `group_size` times. All prompts are used before reshuffling."""
    drawn = []
    for position in range(epoch * count, (epoch + 1) * count):
        turn, index = divmod(position, len(prompts))
        # A new order per turn through the prompts, whatever the epochs' length.
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed_of(seed, "order", turn)))
        drawn.append(prompts[int(order[index])])
    return [Row(drawn[number // group_size], number) for number in range(count * group_size)]


def assign_rows(
    rows: Sequence[Row],
    *,
    tree: Tree,
    batch: int,
    updates: int,
    world: int,
    rank: int,
    sharded: bool = False,
    whole_groups: bool = False,
    kind: Callable[[Prompt], Hashable],
) -> list[list[Sequence[Row]]]:
    """Assign this rank's rows to the updates of the epoch, in units that share no node: [update][unit][row].

    Rows are cut into whole subtrees and batches, dealt first to updates and then to ranks, so that the rows of an
    update do not depend on the number of processes. If whole subtrees do not divide, batches are dealt instead, and a
    node with samples on several processes is computed once on each.

    Args:
        batch: samples per forward, by `divide`.
        sharded: whether a forward is a collective. Then all ranks need equally many forwards, so a unit smaller than a
            subtree is a single batch, and units are not joined.
        whole_groups: whether all samples of a group go to one process.
        kind: key of prompts whose nodes may share a forward. Units of one kind are joined until their first nodes fill
            a batch.
    """
    # 1. Pieces of whole subtrees if they divide, else batches.
    assert len(rows) % (batch * updates * world) == 0, "`divide` finds a batch that divides"
    # A unit of whole subtrees, or groups, and whole batches.
    leaves = tree.leaves(0) * (tree.seeds if whole_groups else 1)
    subtree = math.lcm(batch, leaves)
    pieces = in_batches(rows, batch if len(rows) % (subtree * updates) else subtree)

    # 2. Deal them to updates, then to ranks.
    shares = []
    for update in range(updates):
        share = pieces[update::updates]
        # Subtrees that do not divide over the ranks are cut into batches.
        if len(share) % world:
            share = list(chain(*(in_batches(piece, batch) for piece in share)))
        assert not (sharded and len(share[0]) % subtree and leaves % batch), "ranks cut through a subtree"
        share_of_rank = share[rank::world]
        shares.append(share_of_rank if sharded else _units(share_of_rank, tree, batch=batch, kind=kind))
    return shares


@dataclass(frozen=True, slots=True)
class Division:
    """Equal shares of an epoch: every update has as many whole batches on every process."""

    prompts: int
    """Groups of an epoch, at least `prompts_per_epoch`."""
    batch: int
    """Samples per forward, at most `sampling.batch`."""
    whole_groups: bool
    """Whether each group is sampled by one process, and scored in one call."""

    def differences(self, config: PolicyConfig) -> str:
        """Describe the differences from the config in a line; empty without any."""
        if (self.prompts, self.batch) == (config.prompts_per_epoch, config.sampling.batch):
            return ""
        return f"so that samples divide, prompts_per_epoch is {self.prompts} and sampling.batch {self.batch}"


def divide(config: PolicyConfig, *, world: int = 1, sharded: bool = False, mixed: bool = False) -> Division:
    """Find the fewest prompts and the largest batches that divide over updates and processes.

    Args:
        sharded: whether a forward is a collective, for which all ranks need equally many forwards.
        mixed: whether some prompts may not share a forward, so that a batch may not cross groups.
    """
    group = config.group_size
    whole_groups = any(reward.compares_samples for reward in config.rewards)
    shares = config.optimizer.updates_per_epoch * world
    prompts = config.prompts_per_epoch
    while (prompts if whole_groups else prompts * group) % shares:
        prompts += 1

    samples = prompts * group // shares
    leaves = config.sampling.tree.resolve(group, steps=config.sampling.stochastic_steps).leaves(0)
    for batch in range(min(config.sampling.batch, samples), 0, -1):
        unit = math.lcm(batch, group) if whole_groups else batch
        divides = samples % unit == 0 and not (mixed and group % batch)
        # Ranks that cut through a subtree would need its nodes on both of them.
        if divides and not (sharded and samples % math.lcm(batch, leaves) and leaves % batch):
            break
    return Division(prompts, batch, whole_groups)


def _units(
    pieces: Sequence[Sequence[Row]], tree: Tree, *, batch: int, kind: Callable[[Prompt], Hashable]
) -> list[Sequence[Row]]:
    """Join adjacent pieces that share a node, and pieces of one kind until their first nodes fill a batch."""
    units: list[Sequence[Row]] = []
    for piece in pieces:
        joined = [*units[-1], *piece] if units else [*piece]
        nodes = {tree.node_of(row.number, 0) for row in joined}
        kinds = {kind(row.prompt) for row in joined}
        shares_node = units and tree.node_of(units[-1][-1].number, 0) == tree.node_of(piece[0].number, 0)
        shares_forward = len(nodes) <= batch and len(kinds) == 1
        if units and (shares_node or shares_forward):
            units[-1] = joined
        else:
            units.append(piece)
    return units


def forward_batches(
    policy: PipelinePolicy, prompts: Sequence[Prompt], *, size: Size, batch: int
) -> list[Sequence[int]]:
    """Cut the positions in `prompts` into batches that share a forward, in the order of their first prompts."""
    alike = grouped((policy.forward_key(prompt, size), position) for position, prompt in enumerate(prompts))
    batches: list[Sequence[int]] = []
    for group in alike.values():
        batches += in_batches(group, batch)
    return batches
