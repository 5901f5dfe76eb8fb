"""The only denoising loop: training samples with their stochastic steps, and plain images without noise.

Randomness comes from (seed, epoch, global row, step) alone, so that one process or eight sample the same images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pacorl.core.sampling import Sampler, Tree
from pacorl.core.schedule import seed_of
from pacorl.core.sde import SDE_TYPES, Transition, log_prob
from pacorl.core.solvers import SOLVERS, Past
from pacorl.lora.adapters import FusedLora
from pacorl.types import Conditioning, NodeBatch, Prompt, Rollout, Samples, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to be drawn: which prompt, which global row of its epoch."""

    prompt: Prompt
    number: int


def epoch_rows(prompts: Sequence[Prompt], *, epoch: int, count: int, group_size: int, seed: int) -> list[Row]:
    """The rows of an epoch: `count` prompts, each `group_size` times in a row.

    Prompts follow a shuffled order that is used up before it is shuffled anew.
    """
    chosen = []
    for position in range(epoch * count, (epoch + 1) * count):
        turn, index = divmod(position, len(prompts))
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed_of(seed, "order", turn)))
        chosen.append(prompts[int(order[index])])
    return [Row(chosen[number // group_size], number) for number in range(count * group_size)]


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
    subtree = math.lcm(batch, tree.leaves(0))
    pieces = _cut(rows, batch if len(rows) % (subtree * updates) else subtree)
    shares = []
    for update in range(updates):
        share = pieces[update::updates]
        if len(share) % world:
            share = [part for piece in share for part in _cut(piece, batch)]
        if sharded and len(share[0]) % subtree and tree.leaves(0) % batch:
            raise ValueError(
                f"batches of {batch} cut through subtrees of {tree.leaves(0)} samples, and with a sharded transformer "
                "every process must make as many forwards; set sampling.batch to a divisor of it"
            )
        shares.append(share[rank::world] if sharded else _joined(share[rank::world], tree))
    return shares


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
    return "; or ".join([*ways, f"{' or '.join(map(str, near))} samples (prompts_per_epoch × group_size)"]) + " would"


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


def sigmas_of(policy: Policy, sampler: Sampler, prompt: Prompt) -> Tensor:
    """(T+1,) sigmas for a prompt's size, or for the size that they are shifted for."""
    return policy.sigmas(sampler.steps, policy.size_of(prompt, sampler.shift_size or sampler.size))


class ConditioningCache:
    """Each (prompt, sampled size) encoded once per run, kept on the CPU.

    Keyed by text and sources, not by id: training and evaluation prompts are numbered apart.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._encoded: dict[tuple[Any, ...], Conditioning] = {}

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        """One batch on the device, for prompts that are all sampled at `size`."""
        self._encode(prompts, size)
        return self._policy.collate([self._encoded[_key(prompt, size)] for prompt in prompts])

    def prepare(self, prompts: Sequence[Prompt], size: Size) -> None:
        """Encode what is not encoded yet, for a config's `size`."""
        by_size: dict[Size, list[Prompt]] = {}
        for prompt in prompts:
            by_size.setdefault(self._policy.size_of(prompt, size), []).append(prompt)
        for sampled_size, group in by_size.items():
            self._encode(group, sampled_size)

    def _encode(self, prompts: Sequence[Prompt], size: Size) -> None:
        keyed = {_key(prompt, size): prompt for prompt in prompts}
        new = {key: prompt for key, prompt in keyed.items() if key not in self._encoded}
        if new:
            self._encoded |= dict(zip(new, self._policy.encode(list(new.values()), size), strict=True))


def _key(prompt: Prompt, size: Size) -> tuple[Any, ...]:
    return prompt.text, prompt.sources, size


@dataclass(frozen=True, slots=True)
class Draw:
    """What all samples of an epoch are drawn with."""

    policy: Policy
    sampler: Sampler
    cache: ConditioningCache
    seed: int
    """Of the run."""
    epoch: int
    """From 0; with `seed`, a step and a node it gives every draw."""
    batch: int
    """Samples per forward."""
    fused: FusedLora | None = None
    """The adapter in the weights at the steps without noise, and only there: what is trained must be replayed."""

    def noise(self, kind: tuple[str | int, ...], rows: Sequence[int], size: Size) -> Tensor:
        """(B, N, C), one draw per row."""
        return self.policy.noise([seed_of(self.seed, self.epoch, *kind, row) for row in rows], size)


@torch.no_grad()
def collect(draw: Draw, rows: Sequence[Row], on_rollout: Callable[[Rollout], None] = lambda rollout: None) -> Samples:
    """Draw the training samples of rows that share nodes: down the tree level by level, then each batch to its images.

    Each distinct latent passes the transformer once, however many samples descend from it. With own noise (one sample
    per node) a batch of nodes is a batch of samples.

    Args:
        draw: what they are drawn with.
        rows: the samples, all of one size.
        on_rollout: called with each batch of samples as soon as it is decoded.
    """
    trunk = _Trunk(draw, rows)
    nodes, latents = trunk.grow()
    rollouts = []
    for start in range(0, len(rows), draw.batch):
        batch = rows[start : start + draw.batch]
        rollouts.append(trunk.finish(batch, torch.stack([latents[row.number] for row in batch])))
        on_rollout(rollouts[-1])
    return Samples(rollouts, nodes)


class _Trunk:
    """The stochastic part of a tree, and the way from its last level to the images."""

    def __init__(self, draw: Draw, rows: Sequence[Row]) -> None:
        self.draw, self.rows, sampler = draw, rows, draw.sampler
        sizes = {draw.policy.size_of(row.prompt, sampler.size) for row in rows}
        assert len(sizes) == 1, "rows that share nodes have one size"
        self.size = sizes.pop()
        self.sigmas = sigmas_of(draw.policy, sampler, rows[0].prompt)
        self.tree = sampler.tree if sampler.stochastic else Tree(sampler.tree.group_size)
        # The sample that names a node may lie on another process: a node has the prompt of any sample below it.
        levels = range(len(self.tree.branches) + 1)
        self.prompts = {self.tree.node_of(row.number, level): row.prompt for row in rows for level in levels}

    def grow(self) -> tuple[list[NodeBatch], dict[int, Tensor]]:
        """The node batches, and each sample's latent after its last stochastic step."""
        steps = self.draw.sampler.stochastic_steps
        latents, batches = self._start(steps[0] if steps else 0), list[NodeBatch]()
        for level, step in enumerate(steps):
            children: dict[int, Tensor] = {}
            for nodes in self._node_batches(level):
                batch, branched = self._branch(nodes, level, torch.stack([latents[node] for node in nodes]))
                batches.append(batch)
                children |= branched
            following = steps[level + 1] if level + 1 < len(steps) else step + 1
            latents = self._advance(children, level + 1, range(step + 1, following + 1))
        # A batch's first sample gives its turn, so that with own noise all steps of a batch of samples come together.
        return sorted(batches, key=lambda batch: (batch.row_B[0], batch.level)), latents

    def finish(self, rows: Sequence[Row], x_BNC: Tensor) -> Rollout:
        """From the latents of some samples after the last stochastic step to their images."""
        draw, steps, prompts = self.draw, self.draw.sampler.stochastic_steps, [row.prompt for row in rows]
        suffix = draw.sampler.suffix
        final = integrate(
            draw.policy,
            x_BNC,
            draw.cache.batch(prompts, self.size),
            size=self.size,
            sigmas=self.sigmas,
            grid=suffix.grid(steps[-1] + 1 if steps else 0, len(self.sigmas) - 1),
            solver=suffix.solver,
            fused=draw.fused,
        )
        images = draw.policy.decode(final, self.size)
        return Rollout(prompts, [row.number for row in rows], self.size, self.sigmas, final.cpu(), images)

    def _node_batches(self, level: int) -> list[list[int]]:
        """The distinct nodes of a level, in batches that are no larger than what a batch of samples descends from."""
        nodes = list(dict.fromkeys(self.tree.node_of(row.number, level) for row in self.rows))
        count = max(1, self.draw.batch // self.tree.leaves(level))
        return [nodes[start : start + count] for start in range(0, len(nodes), count)]

    def _start(self, following: int) -> dict[int, Tensor]:
        """The latents of level 0 at step `following`, by node."""
        noises = {
            node: x
            for nodes in self._node_batches(0)
            for node, x in zip(nodes, self.draw.noise(("start",), nodes, self.size), strict=True)
        }
        return self._advance(noises, 0, range(following + 1))

    def _advance(self, latents: Mapping[int, Tensor], level: int, grid: Sequence[int]) -> dict[int, Tensor]:
        """Latents of a level, by node, taken along the steps of `grid` without noise."""
        if len(grid) < 2:
            return dict(latents)
        draw, advanced = self.draw, dict[int, Tensor]()
        for nodes in self._node_batches(level):
            x_VNC = integrate(
                draw.policy,
                torch.stack([latents[node] for node in nodes]),
                self._conditioning(nodes),
                size=self.size,
                sigmas=self.sigmas,
                grid=grid,
                fused=draw.fused,
            )
            advanced |= dict(zip(nodes, x_VNC, strict=True))
        return advanced

    def _branch(self, nodes: Sequence[int], level: int, x_VNC: Tensor) -> tuple[NodeBatch, dict[int, Tensor]]:
        """The stochastic step of some nodes, and the latents of their children by node."""
        draw, tree, step = self.draw, self.tree, self.draw.sampler.sde_steps[level]
        velocity = velocity_at(draw.policy, x_VNC, self.sigmas[step], self._conditioning(nodes), self.size)
        transition = transition_at(draw.sampler, self.sigmas, step, x_VNC, velocity)
        rows = [row.number for row in self.rows if tree.node_of(row.number, level) in nodes]
        children = list(dict.fromkeys(tree.node_of(row, level + 1) for row in rows))
        parent_E = torch.tensor([nodes.index(tree.node_of(child, level)) for child in children])
        draws, signs = zip(*(tree.noise_of(child, level) for child in children), strict=True)
        noise = draw.noise(("step", step), draws, self.size)
        noise = noise * noise.new_tensor(signs)[:, None, None]
        x_ENC = transition.mean_BNC[parent_E] + transition.std * noise
        node_B = torch.tensor([nodes.index(tree.node_of(row, level)) for row in rows])
        child_B = torch.tensor([children.index(tree.node_of(row, level + 1)) for row in rows])
        taken = log_prob(x_ENC[child_B], Transition(transition.mean_BNC[node_B], transition.std))
        batch = NodeBatch(
            step=step,
            level=level,
            prompts=[self.prompts[node] for node in nodes],
            size=self.size,
            sigmas_T=self.sigmas,
            latents_VNC=x_VNC.cpu(),
            next_latents_ENC=x_ENC.cpu(),
            row_B=rows,
            node_B=node_B,
            child_B=child_B,
            log_prob_B=taken.cpu(),
            mean_VNC=transition.mean_BNC.cpu() if draw.sampler.keeps_means else None,
        )
        return batch, dict(zip(children, x_ENC, strict=True))

    def _conditioning(self, nodes: Sequence[int]) -> Conditioning:
        return self.draw.cache.batch([self.prompts[node] for node in nodes], self.size)


@torch.no_grad()
def sample_images(
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    sampler: Sampler,
    cache: ConditioningCache,
    seeds: Sequence[int],
    batch: int,
    fused: FusedLora | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Image]:
    """One image per (prompt, seed), without noise; `progress` is called with each batch's size."""
    images: dict[int, Image] = {}
    for part in one_size_batches(policy, prompts, size=sampler.size, batch=batch):
        these = [prompts[position] for position in part]
        size = policy.size_of(these[0], sampler.size)
        final = denoise(
            policy,
            [seeds[position] for position in part],
            size=size,
            conditioning=cache.batch(these, size),
            sigmas=sigmas_of(policy, sampler, these[0]),
            fused=fused,
        )
        images |= dict(zip(part, policy.decode(final, size), strict=True))
        progress(len(part))
    return [images[position] for position in range(len(prompts))]


def transition_at(sampler: Sampler, sigmas: Tensor, step: int, x_BNC: Tensor, velocity_BNC: Tensor) -> Transition:
    """The Gaussian of stochastic step `step`: one function for sampling and for training, so that both agree."""
    return SDE_TYPES[sampler.sde_type].transition(
        x_BNC,
        velocity_BNC,
        sigma=float(sigmas[step]),
        sigma_next=float(sigmas[step + 1]),
        noise_level=sampler.noise_level,
        sigma_max=float(sigmas[1]),
    )


def velocity_at(policy: Policy, x_BNC: Tensor, sigma: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
    """The policy's velocity of a batch that is at one sigma."""
    return policy.velocity(x_BNC, sigma.to(x_BNC.device).expand(len(x_BNC)), conditioning, size)


def integrate(
    policy: Policy,
    x_BNC: Tensor,
    conditioning: Conditioning,
    *,
    size: Size,
    sigmas: Tensor,
    grid: Sequence[int],
    solver: str = "euler",
    fused: FusedLora | None = None,
) -> Tensor:
    """Follow the ODE along the sigmas whose indices `grid` lists, by one of `SOLVERS`."""
    step, past = SOLVERS[solver].step, None
    with fused.swapped_in() if fused else nullcontext():
        for here, following in pairwise(grid):
            velocity_BNC = velocity_at(policy, x_BNC, sigmas[here], conditioning, size)
            length = float(sigmas[following]) - float(sigmas[here])
            x_BNC, past = step(x_BNC, velocity_BNC, length, past), Past(velocity_BNC, length)
    return x_BNC


def denoise(
    policy: Policy,
    seeds: Sequence[int],
    *,
    size: Size,
    conditioning: Conditioning,
    sigmas: Tensor,
    fused: FusedLora | None = None,
) -> Tensor:
    """From noise (one seed per row) to endpoints (B, N, C), by Euler's steps without noise."""
    noise = policy.noise(seeds, size)
    return integrate(policy, noise, conditioning, size=size, sigmas=sigmas, grid=range(len(sigmas)), fused=fused)
