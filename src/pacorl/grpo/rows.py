"""Which samples are drawn with which: the rows of an epoch, dealt to updates and processes, and batches of one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pacorl.core.sampler import Tree
from pacorl.core.schedule import seed_of
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.models.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to be drawn: which prompt, which global row of its epoch."""

    prompt: Prompt
    number: int


def epoch_rows(prompts: Sequence[Prompt], *, epoch: int, count: int, group_size: int, seed: int) -> list[Row]:
    """The rows of an epoch: `count` prompts, each `group_size` times in a row.

    Prompts follow a shuffled order that is used up before it is shuffled anew.
    """
    drawn = []
    for position in range(epoch * count, (epoch + 1) * count):
        turn, index = divmod(position, len(prompts))
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed_of(seed, "order", turn)))
        drawn.append(prompts[int(order[index])])
    return [Row(drawn[number // group_size], number) for number in range(count * group_size)]


def assign_rows(
    rows: Sequence[Row], *, tree: Tree, batch: int, updates: int, world: int, rank: int, sharded: bool = False
) -> list[list[list[Row]]]:
    """This rank's rows for each update of the epoch, in units that share no node: [update][unit][row].

    Rows are cut into whole subtrees and batches, which are spread over updates and then over ranks in turn, so that
    which rows an update has does not depend on the number of processes. If whole subtrees do not divide, batches are
    spread instead, and a node whose samples lie on several processes is computed once on each.

    Args:
        rows: of the epoch.
        tree: of each group.
        batch: samples per forward.
        updates: of the epoch.
        world: number of processes.
        rank: this one.
        sharded: whether a forward needs every process. All must then make as many, so that a unit that is no whole
            subtree is a single batch.

    Raises:
        ValueError: if they do not divide evenly; it names sizes that would.
    """
    if len(rows) % (batch * updates * world):
        raise ValueError(
            f"{len(rows)} samples an epoch do not divide into {updates} updates × {world} processes × "
            f"batches of {batch}; {_sizes_that_divide(len(rows), batch=batch, updates=updates, world=world)}"
        )
    leaves = tree.leaves(0)
    subtree = math.lcm(batch, leaves)
    pieces = _cut(rows, batch if len(rows) % (subtree * updates) else subtree)
    shares = []
    for update in range(updates):
        share = pieces[update::updates]
        if len(share) % world:
            share = [batch_rows for piece in share for batch_rows in _cut(piece, batch)]
        if sharded and len(share[0]) % subtree and leaves % batch:
            raise ValueError(
                f"batches of {batch} cut through subtrees of {leaves} samples, and with a sharded transformer "
                "every process must make as many forwards; set sampling.batch to a divisor of it"
            )
        shares.append(share[rank::world] if sharded else _joined(share[rank::world], tree))
    return shares


def check_division(config: PolicyConfig, *, world: int, sharded: bool = False) -> None:
    """Refuse sizes that leave a process without its share of an epoch, and what a sharded transformer does not bear.

    Raises:
        ValueError: if samples, updates, processes and batches do not divide; it names sizes that would.
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
    rows = [Row(Prompt(0, ""), number) for number in range(config.prompts_per_epoch * config.group_size)]
    assign_rows(
        rows,
        tree=config.sampling.tree.resolve(config.group_size, steps=config.sampling.stochastic_steps),
        batch=config.sampling.batch,
        updates=config.optimizer.updates_per_epoch,
        world=world,
        rank=0,
        sharded=sharded,
    )


def _joined(pieces: Sequence[list[Row]], tree: Tree) -> list[list[Row]]:
    """Neighbours that descend from one node, as one unit."""
    units: list[list[Row]] = []
    for piece in pieces:
        if units and tree.node_of(units[-1][-1].number, 0) == tree.node_of(piece[0].number, 0):
            units[-1] = [*units[-1], *piece]
        else:
            units.append(piece)
    return units


def _cut(rows: Sequence[Row], size: int) -> list[list[Row]]:
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def _sizes_that_divide(rows: int, *, batch: int, updates: int, world: int) -> str:
    """Sizes near what was asked for, of which each alone would make the rows divide."""
    sizes = [size for size in range(1, rows + 1) if rows % (size * updates * world) == 0]
    worlds = [count for count in range(1, 2 * world) if rows % (batch * updates * count) == 0]
    unit = batch * updates * world
    near = sorted({max(1, rows // unit) * unit, (rows // unit + 1) * unit})
    ways = [f"batches of {', '.join(map(str, sizes[:8]))}"] if sizes else []
    ways += [f"{', '.join(map(str, worlds))} processes"] if worlds else []
    return "; or ".join([*ways, f"{' or '.join(map(str, near))} samples an epoch"]) + " would"


def one_size_batches(policy: Policy, prompts: Sequence[Prompt], *, size: Size, batch: int) -> list[list[int]]:
    """Positions in `prompts`, cut into batches that are sampled at one size each; sizes in the order they come in."""
    by_size: dict[Size, list[int]] = {}
    for position, prompt in enumerate(prompts):
        by_size.setdefault(policy.size_of(prompt, size), []).append(position)
    return [group[start : start + batch] for group in by_size.values() for start in range(0, len(group), batch)]


def check_mixed_sizes(policy: Policy, prompts: Sequence[Prompt], *, size: Size, group_size: int, batch: int) -> None:
    """Refuse training batches that cross from one group to the next if their sizes differ.

    Raises:
        ValueError: naming batch sizes that would not.
    """
    sizes = {policy.size_of(prompt, size) for prompt in prompts}
    if len(sizes) > 1 and group_size % batch:
        fitting = [count for count in range(1, group_size + 1) if group_size % count == 0]
        raise ValueError(
            f"the prompts are sampled at {len(sizes)} sizes (e.g. {', '.join(map(str, sorted(sizes, key=str)[:3]))}), "
            f"and batches of {batch} cross from one group of {group_size} to the next; set sampling.batch to one of "
            f"{', '.join(map(str, fitting))}"
        )
