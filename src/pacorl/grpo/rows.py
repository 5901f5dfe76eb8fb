"""Rows of an epoch: their assignment to updates, processes and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch

from pacorl.core.batches import in_batches
from pacorl.core.sampler import Tree
from pacorl.core.schedule import seed_of
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.models.policies.policy import Policy


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
    rows: Sequence[Row], *, tree: Tree, batch: int, updates: int, world: int, rank: int, sharded: bool = False
) -> list[list[Sequence[Row]]]:
    """Assign this rank's rows to the updates of the epoch, in units that share no node: [update][unit][row].

    Rows are cut into whole subtrees and batches, dealt first to updates and then to ranks, so that the rows of an
    update do not depend on the number of processes. If whole subtrees do not divide, batches are dealt instead, and a
    node with samples on several processes is computed once on each.

    Args:
        rows: rows of the epoch.
        tree: tree of each group.
        batch: samples per forward.
        updates: number of updates.
        world: number of processes.
        rank: this process.
        sharded: whether a forward is a collective. Then all ranks need equally many forwards, so a unit smaller than a
            subtree is a single batch.

    Raises:
        ValueError: if the rows do not divide evenly; the message lists sizes that would.
    """
    # 1. Pieces of whole subtrees if they divide, else batches.
    if len(rows) % (batch * updates * world):
        raise ValueError(
            f"{len(rows)} samples an epoch do not divide into {updates} updates (optimizer.updates_per_epoch) × "
            f"{world} processes × batches of {batch} (sampling.batch); "
            f"{_sizes_that_divide(len(rows), batch=batch, updates=updates, world=world)}"
        )
    # A unit of whole subtrees and whole batches.
    leaves = tree.leaves(0)
    subtree = math.lcm(batch, leaves)
    pieces = in_batches(rows, batch if len(rows) % (subtree * updates) else subtree)

    # 2. Deal them to updates, then to ranks.
    shares = []
    for update in range(updates):
        share = pieces[update::updates]
        if len(share) % world:
            share = list(chain(*(in_batches(piece, batch) for piece in share)))
        if sharded and len(share[0]) % subtree and leaves % batch:
            raise ValueError(
                f"batches of {batch} cut through subtrees of {leaves} samples, and with a sharded transformer "
                "every process must make as many forwards; set sampling.batch to a divisor of it"
            )
        shares.append(share[rank::world] if sharded else _joined(share[rank::world], tree))
    return shares


def check_division(config: PolicyConfig, *, world: int, sharded: bool = False) -> None:
    """Check that an epoch divides over the processes, and that the settings suit a sharded transformer.

    Raises:
        ValueError: if samples, updates, processes and batches do not divide; the message lists sizes that would.
    """
    if sharded and config.in_turns:
        raise ValueError(
            f"memory {config.memory} and FSDP2: a transformer that is sharded takes no turns; leave memory out and set "
            "model.quantize and judge.quantize, or launch with ddp.yaml"
        )
    if sharded and config.model.stream:
        raise ValueError(
            "model.stream and FSDP2: what is streamed is not there to be sharded; leave stream out, or launch with "
            "ddp.yaml"
        )
    # Rows of one dummy prompt: only their number matters here.
    rows = []
    for number in range(config.prompts_per_epoch * config.group_size):
        rows.append(Row(Prompt(0, ""), number))
    assign_rows(
        rows,
        tree=config.sampling.tree.resolve(config.group_size, steps=config.sampling.stochastic_steps),
        batch=config.sampling.batch,
        updates=config.optimizer.updates_per_epoch,
        world=world,
        rank=0,
        sharded=sharded,
    )


def check_image_counts(config: PolicyConfig, train: Sequence[Prompt], evaluation: Sequence[Prompt]) -> None:
    """Check that no batch of a sharded run mixes prompts that take forwards of their own.

    Raises:
        ValueError: if one would; images of different shapes are found only when they are encoded.
    """
    per = config.generator.policy.forward_per
    if per == "batch":
        return
    crossing = {
        "sampling.batch": (train, config.sampling.batch, config.group_size % config.sampling.batch > 0),
        "evaluation.batch": (evaluation, config.evaluation.batch, config.evaluation.batch > 1),
    }
    for key, (prompts, batch, crosses) in crossing.items():
        # Prompts with equally many images share a forward.
        counts = {len(prompt.sources) + len(prompt.references) for prompt in prompts}
        if crosses and per == "prompt" and len(prompts) > 1:
            raise ValueError(
                f"FSDP2 and model.kind {config.model.kind}, whose prompts take forwards of their own, which {key} "
                f"{batch} would mix: its ranks must make equally many forwards; set it to 1"
            )
        if crosses and len(counts) > 1:
            raise ValueError(
                f"FSDP2 and prompts with {min(counts)} to {max(counts)} images, which {key} {batch} would mix: its "
                "ranks must make equally many forwards; set it to 1"
            )


def _joined(pieces: Sequence[Sequence[Row]], tree: Tree) -> list[Sequence[Row]]:
    """Join adjacent pieces below one node into units."""
    units: list[Sequence[Row]] = []
    for piece in pieces:
        if units and tree.node_of(units[-1][-1].number, 0) == tree.node_of(piece[0].number, 0):
            units[-1] = [*units[-1], *piece]
        else:
            units.append(piece)
    return units


def _sizes_that_divide(rows: int, *, batch: int, updates: int, world: int) -> str:
    """Describe sizes near the requested sizes, each of which alone would make the rows divide."""
    # One change at a time: another batch, another number of processes, or more samples.
    sizes = []
    for size in range(1, rows + 1):
        if rows % (size * updates * world) == 0:
            sizes.append(size)

    worlds = []
    for count in range(1, 2 * world):
        if rows % (batch * updates * count) == 0:
            worlds.append(count)

    unit = batch * updates * world
    near = sorted({max(1, rows // unit) * unit, (rows // unit + 1) * unit})
    ways = []
    if sizes:
        ways.append(f"batches of {', '.join(map(str, sizes[:8]))}")
    if worlds:
        ways.append(f"{', '.join(map(str, worlds))} processes")
    ways.append(f"{' or '.join(map(str, near))} samples an epoch")
    return "; or ".join(ways) + " would"


def one_size_batches(policy: Policy, prompts: Sequence[Prompt], *, size: Size, batch: int) -> list[Sequence[int]]:
    """Cut the positions in `prompts` into batches of one size each, sizes in order of first appearance."""
    by_size: dict[Size, list[int]] = {}
    for position, prompt in enumerate(prompts):
        by_size.setdefault(policy.size_of(prompt, size), []).append(position)
    batches: list[Sequence[int]] = []
    for group in by_size.values():
        batches += in_batches(group, batch)
    return batches


def check_mixed_sizes(policy: Policy, prompts: Sequence[Prompt], *, size: Size, group_size: int, batch: int) -> None:
    """Raise ValueError, with batch sizes that fit, if batches cross groups whose sizes differ."""
    sizes = {policy.size_of(prompt, size) for prompt in prompts}
    if len(sizes) > 1 and group_size % batch:
        fitting = [count for count in range(1, group_size + 1) if group_size % count == 0]
        raise ValueError(
            f"the prompts are sampled at {len(sizes)} sizes (e.g. {', '.join(map(str, sorted(sizes, key=str)[:3]))}), "
            f"and batches of {batch} cross from one group of {group_size} to the next; set sampling.batch to one of "
            f"{', '.join(map(str, fitting))}"
        )
