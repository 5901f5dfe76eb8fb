"""The only denoising loop: training samples with their stochastic steps, and images by the ODE.

Randomness follows from (seed, epoch, global row, step), so that one process and eight sample the same images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pacorl.core.batches import in_batches
from pacorl.core.devices import to_device
from pacorl.core.grid import Panels
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.core.sde import SDE_TYPES, SOLVERS, Past, Transition, log_prob
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rows import Row, forward_batches
from pacorl.types import Conditioning, NodeBatch, Prompt, Rollout, Samples, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.pipeline import PipelinePolicy


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters shared by all rollouts of an epoch."""

    policy: PipelinePolicy
    sampler: Sampler
    cache: ConditioningCache
    seed: int
    """Seed of the run."""
    epoch: int
    """Epoch from 0."""
    batch: int
    """Samples per forward."""
    nodes: int = 1
    """Least number of nodes that share the forward of a stochastic step, up to `batch`; training replays it."""
    by_panel: bool = False
    """Whether log-probabilities are of panels, for panel credit."""
    as_trained: bool = False
    """Whether SDE steps record a graph and discard it: a compiled bf16 model differs by 0.8 % without gradients."""

    def noise(self, kind: tuple[str | int, ...], rows: Sequence[int], size: Size) -> Tensor:
        """Draw (B, N, C) noise by seed, epoch, `kind` and row."""
        return self.policy.noise([seed_of(self.seed, self.epoch, *kind, row) for row in rows], size)


@torch.no_grad()
def draw_samples(draw: Draw, units: Sequence[Sequence[Row]], into: Samples) -> Iterator[Rollout]:
    """Draw training samples: down the tree first, then each batch of leaves to its images.

    Each distinct latent passes the transformer once, for any number of samples below it. With independent noise (one
    sample per node) a batch of nodes is a batch of samples.

    Args:
        units: rows that share no node (`assign_rows`).
        into: filled with the rollouts, and at the end with the nodes.

    Yields:
        Each batch of samples as soon as it is decoded; on a GPU when the next one is queued, so that the GPU does not
        wait for the host.
    """
    nodes: list[NodeBatch] = []
    queued: deque[Callable[[], Rollout]] = deque()
    # On a GPU one batch stays queued: the GPU computes it while the host handles the one before.
    ahead = 1 if draw.policy.device.type == "cuda" else 0
    for rows in units:
        # The tree above the leaves.
        trunk = Trunk(draw, rows)
        node_batches, latents = trunk.grow()
        nodes += node_batches

        # From the leaves to images, batch by batch.
        for batch in in_batches(rows, draw.batch):
            queued.append(trunk.finish(batch, torch.stack([latents[row.number] for row in batch])))
            while len(queued) > ahead:
                into.rollouts.append(queued.popleft()())
                yield into.rollouts[-1]
    # The batches that were still ahead.
    while queued:
        into.rollouts.append(queued.popleft()())
        yield into.rollouts[-1]

    # At the end, since a copy at each step would wait for the GPU.
    for node_batch in nodes:
        for name in ("latents_VNC", "next_latents_ENC", "node_B", "child_B", "log_prob_B", "mean_VNC"):
            tensor = getattr(node_batch, name)
            if tensor is not None:
                setattr(node_batch, name, tensor.cpu())
        into.nodes.append(node_batch)


class Trunk:
    """The stochastic part of a tree, and the path from its last level to the images."""

    def __init__(self, draw: Draw, rows: Sequence[Row]) -> None:
        """
        Args:
            rows: samples of one size, whose subtrees are complete on this process.
        """
        self.draw = draw
        self.rows = rows
        sampler = draw.sampler
        sizes = {draw.policy.size_of(row.prompt, sampler.size) for row in rows}
        assert len(sizes) == 1, "rows that share nodes have one size"
        self.size = sizes.pop()
        self.sigmas = draw.policy.sigmas(sampler.steps, self.size)
        self.tree = sampler.tree

        # By the samples below a node, since the sample that numbers it may belong to another process.
        self.prompts: dict[int, Prompt] = {}
        for level in range(len(self.tree.branches) + 1):
            for row in rows:
                self.prompts[self.tree.node_of(row.number, level)] = row.prompt

    def grow(self) -> tuple[list[NodeBatch], dict[int, Tensor]]:
        """Sample all node batches, and each sample's latent after its last stochastic step."""
        steps = self.draw.sampler.stochastic_steps

        # 1. Noise, and the ODE to the first stochastic step.
        latents: dict[int, Tensor] = {}
        for nodes in self._node_batches(0):
            latents |= dict(zip(nodes, self.draw.noise(("start",), nodes, self.size), strict=True))
        latents = self._advance(latents, 0, range(steps[0] + 1 if steps else 1))

        # 2. Per level: one stochastic step, and the ODE to the next.
        batches = []
        for level, step in enumerate(steps):
            children: dict[int, Tensor] = {}
            for nodes in self._node_batches(level, of_step=True):
                batch, branched = self._branch(nodes, level, torch.stack([latents[node] for node in nodes]))
                batches.append(batch)
                children |= branched
            following = steps[level + 1] if level + 1 < len(steps) else step + 1
            latents = self._advance(children, level + 1, range(step + 1, following + 1))

        # By first sample: with independent noise all steps of a batch of samples are adjacent.
        return sorted(batches, key=lambda batch: (batch.row_B[0], batch.level)), latents

    def finish(self, rows: Sequence[Row], x_BNC: Tensor) -> Callable[[], Rollout]:
        """Queue latents after the last stochastic step to the end, and their decoding; the result waits for them."""
        draw = self.draw
        steps = draw.sampler.stochastic_steps
        suffix = draw.sampler.suffix
        prompts = [row.prompt for row in rows]
        final = integrate(
            draw.policy,
            x_BNC,
            draw.cache.batch(prompts, self.size),
            size=self.size,
            sigmas=self.sigmas,
            grid=suffix.grid(steps[-1] + 1 if steps else 0, len(self.sigmas) - 1),
            solver=suffix.solver,
        )
        numbers = [row.number for row in rows]
        # Queued before the images, with which it arrives.
        endpoints = final.to("cpu", non_blocking=final.is_cuda)
        images = draw.policy.launch_decode(final, self.size)
        # `images()` waits until the GPU has decoded them.
        return lambda: Rollout(prompts, numbers, self.size, endpoints, images())

    def _node_batches(self, level: int, *, of_step: bool = False) -> list[Sequence[int]]:
        """Cut the distinct nodes of a level into batches; those `of_step` are trained on, with gradients in memory."""
        # In the order of their first samples.
        nodes = list(dict.fromkeys(self.tree.node_of(row.number, level) for row in self.rows))
        batch = self.draw.batch
        return in_batches(nodes, self.tree.nodes_of_batch(batch, level, least=self.draw.nodes) if of_step else batch)

    def _advance(self, latents: dict[int, Tensor], level: int, grid: Sequence[int]) -> dict[int, Tensor]:
        """Integrate the latents of a level, by node, along the steps of `grid` by the ODE."""
        if len(grid) < 2:
            return latents
        draw = self.draw
        advanced: dict[int, Tensor] = {}
        for nodes in self._node_batches(level):
            x_VNC = integrate(
                draw.policy,
                torch.stack([latents[node] for node in nodes]),
                self._conditioning(nodes),
                size=self.size,
                sigmas=self.sigmas,
                grid=grid,
            )
            advanced |= dict(zip(nodes, x_VNC, strict=True))
        return advanced

    def _branch(self, nodes: Sequence[int], level: int, x_VNC: Tensor) -> tuple[NodeBatch, dict[int, Tensor]]:
        r"""Take the stochastic step of some nodes.

        A tree of one group of four samples, two children per node at each of two SDE steps:

            level 0      node 0                      initial noise; one forward, one transition
                        /      \
            level 1  node 0   node 1                 noise of step 0; one forward and transition each
                     /   \    /   \
            level 2  0    1   2    3  = samples      noise of step 1; then the ODE to the images

        Each sample below a node stores the log-probability of the child on its path.

        Returns:
            The batch for training to replay, and the latents of the children by node.
        """
        draw = self.draw
        tree = self.tree
        step = draw.sampler.sde_steps[level]
        device = x_VNC.device

        # 1. The transition of each node: one forward, and a Gaussian by the SDE type.
        with torch.set_grad_enabled(draw.as_trained):
            velocity = velocity_at(draw.policy, x_VNC, self.sigmas[step], self._conditioning(nodes), self.size)
        transition = transition_at(draw.sampler, self.sigmas, step, x_VNC, velocity.detach())

        # 2. The children above this rank's samples, each drawn by independent noise.
        rows = [row.number for row in self.rows if tree.node_of(row.number, level) in nodes]
        children = list(dict.fromkeys(tree.node_of(row, level + 1) for row in rows))
        parent_E = self._positions([tree.node_of(child, level) for child in children], nodes, device)
        noise_ENC = draw.noise(("step", step), children, self.size)
        x_ENC = transition.mean_BNC[parent_E] + transition.std * noise_ENC

        # 3. The log-probability of each sample's step: its child under its node's transition.
        node_B = self._positions([tree.node_of(row, level) for row in rows], nodes, device)
        child_B = self._positions([tree.node_of(row, level + 1) for row in rows], children, device)
        panels = None
        if draw.by_panel:
            grids = [self.prompts[row].grid for row in rows]
            panels = Panels.of(grids, self.size, draw.policy.token_grid(self.size), device=device)
        log_prob_B = log_prob(x_ENC[child_B], Transition(transition.mean_BNC[node_B], transition.std), panels)

        # 4. The record for training, which replays the same forward.
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
    def _positions(selected: Sequence[int], nodes: Sequence[int], device: torch.device) -> Tensor:
        """Find the (len(selected),) int64 positions of the selected nodes among `nodes`."""
        # A dictionary: `index` would search the nodes once per sample.
        position = {node: number for number, node in enumerate(nodes)}
        return to_device(torch.tensor([position[node] for node in selected]), device)

    def _conditioning(self, nodes: Sequence[int]) -> Conditioning:
        return self.draw.cache.batch([self.prompts[node] for node in nodes], self.size)


@torch.no_grad()
def sample_images(
    policy: PipelinePolicy,
    prompts: Sequence[Prompt],
    *,
    sampler: Sampler,
    cache: ConditioningCache,
    seeds: Sequence[int],
    batch: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Image]:
    """Sample one image per (prompt, seed) by the ODE; `progress` is called with each batch's size."""
    # Images by position: batches that share a forward change the order.
    images: dict[int, Image] = {}
    for positions in forward_batches(policy, prompts, size=sampler.size, batch=batch):
        batch_prompts = [prompts[position] for position in positions]
        size = policy.size_of(batch_prompts[0], sampler.size)
        final = denoise(
            policy,
            [seeds[position] for position in positions],
            size=size,
            conditioning=cache.batch(batch_prompts, size),
            sigmas=policy.sigmas(sampler.steps, size),
        )
        images |= dict(zip(positions, policy.decode(final, size), strict=True))
        progress(len(positions))
    return [images[position] for position in range(len(prompts))]


def transition_at(sampler: Sampler, sigmas: Tensor, step: int, x_BNC: Tensor, velocity_BNC: Tensor) -> Transition:
    """Compute the Gaussian of stochastic step `step`, in sampling and training alike, so that both agree."""
    return SDE_TYPES[sampler.sde_type](
        x_BNC,
        velocity_BNC,
        sigma=float(sigmas[step]),
        sigma_next=float(sigmas[step + 1]),
        noise_level=sampler.noise_level,
        sigma_max=float(sigmas[1]),
    )


def velocity_at(policy: PipelinePolicy, x_BNC: Tensor, sigma: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
    """Compute the policy's velocity of a batch at one sigma."""
    return policy.velocity(x_BNC, to_device(sigma, x_BNC.device).expand(len(x_BNC)), conditioning, size)


def integrate(
    policy: PipelinePolicy,
    x_BNC: Tensor,
    conditioning: Conditioning,
    *,
    size: Size,
    sigmas: Tensor,
    grid: Sequence[int],
    solver: str = "euler",
) -> Tensor:
    """Integrate the ODE along the sigmas at the indices `grid`, by one of `SOLVERS`."""
    step = SOLVERS[solver]
    past: Past | None = None
    sigma_T = to_device(sigmas, x_BNC.device)
    # Computed and dropped here: the weights do not change in between.
    conditioning = policy.with_prefix(conditioning, size)
    for here, following in pairwise(grid):
        velocity_BNC = velocity_at(policy, x_BNC, sigma_T[here], conditioning, size)
        length = float(sigmas[following]) - float(sigmas[here])
        x_BNC = step(x_BNC, velocity_BNC, length, past)
        past = Past(velocity_BNC, length)
    return x_BNC


def denoise(
    policy: PipelinePolicy, seeds: Sequence[int], *, size: Size, conditioning: Conditioning, sigmas: Tensor
) -> Tensor:
    """Integrate noise (one seed per row) to endpoints (B, N, C) by Euler's method."""
    noise = policy.noise(seeds, size)
    return integrate(policy, noise, conditioning, size=size, sigmas=sigmas, grid=range(len(sigmas)))
