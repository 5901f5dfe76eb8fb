"""The only denoising loop: training samples with their stochastic steps, and plain images without noise.

Randomness comes from (seed, epoch, global row, step) alone, so that one process or eight sample the same images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pacorl.core.sampler import Sampler, Tree
from pacorl.core.schedule import seed_of
from pacorl.core.sde import SDE_TYPES, Transition, log_prob
from pacorl.core.solvers import SOLVERS, Past
from pacorl.core.transfer import to_device
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rows import Row, one_size_batches
from pacorl.types import Conditioning, NodeBatch, Prompt, Rollout, Samples, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.policy import Policy


def sigmas_of(policy: Policy, sampler: Sampler, prompt: Prompt) -> Tensor:
    """(T+1,) sigmas for a prompt's size, or for the size that they are shifted for."""
    return policy.sigmas(sampler.steps, policy.size_of(prompt, sampler.shift_size or sampler.size))


def training_sigmas_of(policy: Policy, sampler: Sampler, prompt: Prompt) -> Tensor:
    """(T+1,) sigmas as `sigmas_of`, under the shift of the checkpoint's own training."""
    return policy.training_sigmas(sampler.steps, policy.size_of(prompt, sampler.shift_size or sampler.size))


class OdeForm(Protocol):
    """Another form of the transformer's layers, faster and for ODE steps alone: a fused adapter, or int8 products."""

    def swapped_in(self) -> AbstractContextManager[None]:
        """Compute in this form within the block."""


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
    fused: OdeForm | None = None
    """The transformer's form at the steps without noise, and only there: what is trained must be replayed."""
    as_trained: bool = False
    """Whether SDE steps pass the graph that training passes, with gradients, which are let go. A compiled model in bf16
    differs by 0.8 % without."""

    def noise(self, kind: tuple[str | int, ...], rows: Sequence[int], size: Size) -> Tensor:
        """(B, N, C), one draw per row."""
        return self.policy.noise([seed_of(self.seed, self.epoch, *kind, row) for row in rows], size)


@torch.no_grad()
def draw_samples(draw: Draw, rows: Sequence[Row], into: Samples) -> Iterator[Rollout]:
    """Draw the training samples of rows that share nodes: down the tree, then each batch of leaves to its images.

    Each distinct latent passes the transformer once, however many samples descend from it. With independent noise (one
    sample per node) a batch of nodes is a batch of samples.

    Args:
        draw: parameters of the rollouts.
        rows: the samples, all of one size.
        into: filled with the rollouts, and at the end with the nodes.

    Yields:
        Each batch of samples as soon as it is decoded.
    """
    trunk = Trunk(draw, rows)
    nodes, latents = trunk.grow()

    for start in range(0, len(rows), draw.batch):
        batch = rows[start : start + draw.batch]
        rollout = trunk.finish(batch, torch.stack([latents[row.number] for row in batch]))
        into.rollouts.append(rollout)
        yield rollout

    # At the end, since a copy at each step would wait for the card there.
    into.nodes += [nodes_on_cpu(batch) for batch in nodes]


def collect(draw: Draw, rows: Sequence[Row]) -> Samples:
    """Draw the training samples of rows that share nodes; see `draw_samples`."""
    samples = Samples()
    for _ in draw_samples(draw, rows, samples):
        pass
    return samples


def nodes_on_cpu(nodes: NodeBatch) -> NodeBatch:
    """A batch of nodes as it is kept for training."""
    return replace(
        nodes,
        latents_VNC=nodes.latents_VNC.cpu(),
        next_latents_ENC=nodes.next_latents_ENC.cpu(),
        node_B=nodes.node_B.cpu(),
        child_B=nodes.child_B.cpu(),
        log_prob_B=nodes.log_prob_B.cpu(),
        mean_VNC=None if nodes.mean_VNC is None else nodes.mean_VNC.cpu(),
    )


class Trunk:
    """The stochastic part of a tree, and the way from its last level to the images."""

    def __init__(self, draw: Draw, rows: Sequence[Row]) -> None:
        """
        Args:
            draw: what is drawn with.
            rows: samples of one size that share nodes.
        """
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
        count = self.tree.nodes_of_batch(self.draw.batch, level)
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
        r"""Take the stochastic step of some nodes.

        A tree of one group of four samples, two children per node at each of two SDE steps:

            level 0      node 0                      noise of the start; one forward, one transition
                        /      \
            level 1  node 0   node 1                 noise of step 0; one forward and transition each
                     /   \    /   \
            level 2  0    1   2    3  = samples      noise of step 1; from here on no noise, to the images

        Each sample below a node keeps the log-probability of the child that its path takes.

        Args:
            nodes: of the level.
            level: from 0; its SDE step is `sde_steps[level]`.
            x_VNC: their latents.

        Returns:
            What training needs to replay the step, and the latents of the children by node.
        """
        draw, tree = self.draw, self.tree
        step, device = draw.sampler.sde_steps[level], x_VNC.device

        # 1. The transition of each node: one forward, and a Gaussian by the SDE type.
        with torch.set_grad_enabled(draw.as_trained):
            velocity = velocity_at(draw.policy, x_VNC, self.sigmas[step], self._conditioning(nodes), self.size)
        transition = transition_at(draw.sampler, self.sigmas, step, x_VNC, velocity.detach())

        # 2. The children that this rank's samples descend from, each drawn by a noise of its own, or by a sibling's
        # noise with the other sign.
        rows = [row.number for row in self.rows if tree.node_of(row.number, level) in nodes]
        children = list(dict.fromkeys(tree.node_of(row, level + 1) for row in rows))
        parent_E = self._positions([tree.node_of(child, level) for child in children], nodes, device)
        seeds, signs = zip(*(tree.noise_of(child, level) for child in children), strict=True)
        noise_ENC = draw.noise(("step", step), seeds, self.size)
        sign_E = to_device(torch.tensor(signs), device)
        x_ENC = transition.mean_BNC[parent_E] + transition.std * (noise_ENC * sign_E[:, None, None].to(noise_ENC.dtype))

        # 3. The log-probability of each sample's step: its child under its node's transition.
        node_B = self._positions([tree.node_of(row, level) for row in rows], nodes, device)
        child_B = self._positions([tree.node_of(row, level + 1) for row in rows], children, device)
        log_prob_B = log_prob(x_ENC[child_B], Transition(transition.mean_BNC[node_B], transition.std))

        batch = NodeBatch(
            step=step,
            level=level,
            prompts=[self.prompts[node] for node in nodes],
            size=self.size,
            sigmas_T=self.sigmas,
            latents_VNC=x_VNC,
            next_latents_ENC=x_ENC,
            row_B=rows,
            node_B=node_B,
            child_B=child_B,
            log_prob_B=log_prob_B,
            mean_VNC=transition.mean_BNC if draw.sampler.keeps_means else None,
        )
        return batch, dict(zip(children, x_ENC, strict=True))

    @staticmethod
    def _positions(wanted: Sequence[int], nodes: Sequence[int], device: torch.device) -> Tensor:
        """(len(wanted),) int64 on the device: the position of each wanted node among `nodes`."""
        position = {node: number for number, node in enumerate(nodes)}
        return to_device(torch.tensor([position[node] for node in wanted]), device)

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
    fused: OdeForm | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Image]:
    """One image per (prompt, seed), without noise; `progress` is called with each batch's size."""
    images: dict[int, Image] = {}
    for positions in one_size_batches(policy, prompts, size=sampler.size, batch=batch):
        batch_prompts = [prompts[position] for position in positions]
        size = policy.size_of(batch_prompts[0], sampler.size)
        final = denoise(
            policy,
            [seeds[position] for position in positions],
            size=size,
            conditioning=cache.batch(batch_prompts, size),
            sigmas=sigmas_of(policy, sampler, batch_prompts[0]),
            fused=fused,
        )
        images |= dict(zip(positions, policy.decode(final, size), strict=True))
        progress(len(positions))
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
    return policy.velocity(x_BNC, to_device(sigma, x_BNC.device).expand(len(x_BNC)), conditioning, size)


def integrate(
    policy: Policy,
    x_BNC: Tensor,
    conditioning: Conditioning,
    *,
    size: Size,
    sigmas: Tensor,
    grid: Sequence[int],
    solver: str = "euler",
    fused: OdeForm | None = None,
) -> Tensor:
    """Follow the ODE along the sigmas whose indices `grid` lists, by one of `SOLVERS`."""
    step, past, sigma_T = SOLVERS[solver].step, None, to_device(sigmas, x_BNC.device)
    with fused.swapped_in() if fused else nullcontext():
        for here, following in pairwise(grid):
            velocity_BNC = velocity_at(policy, x_BNC, sigma_T[here], conditioning, size)
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
    fused: OdeForm | None = None,
) -> Tensor:
    """From noise (one seed per row) to endpoints (B, N, C), by Euler's steps without noise."""
    noise = policy.noise(seeds, size)
    return integrate(policy, noise, conditioning, size=size, sigmas=sigmas, grid=range(len(sigmas)), fused=fused)
