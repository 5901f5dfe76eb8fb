"""Sampler settings shared by the config, the rollout and the update.

The samples of a prompt are the leaves of a tree. `seeds` initial noises are followed without noise to the first
stochastic step; there each latent, a *node*, gets `branches[0]` children, each child gets `branches[1]` at the second
stochastic step, and so on. Siblings leave from one latent, so that one forward serves them all, in sampling and in
training. `{seeds: 16, branches: [1]}` is Flow-GRPO's own noise for each sample (arXiv 2505.05470), `{seeds: 1,
branches: [16]}` one start for a whole group, as in TempFlow-GRPO (2508.04324) and BranchGRPO (2509.06040).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from pacorl.config.base import Positive, Section
from pacorl.types import Size

Steps = Annotated[int, Field(gt=0, le=1000)]
"""Denoising steps: diffusers' schedulers of these models have 1,000 noise levels."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree of a group. A node of level ℓ is where the ℓ-th stochastic step begins; level K holds the samples.

    A node's number is the global row of the first sample below it, and determines its draws.
    """

    seeds: int
    branches: tuple[int, ...] = ()
    """Children per node, one entry per stochastic step."""

    def leaves(self, level: int) -> int:
        """Samples below one node of a level."""
        return math.prod(self.branches[level:])

    def nodes_of_batch(self, batch: int, level: int, *, least: int = 1) -> int:
        """Batch size in nodes of a level: the number above one batch of samples, or `least` up to the batch."""
        return max(batch // self.leaves(level), min(batch, least))

    def node_of(self, row: int, level: int) -> int:
        """Find the node of a level above the sample of a global row."""
        return row - row % self.leaves(level)


class TreeOptions(Section):
    """The tree of each group. What is left out follows from `group_size`: by itself each sample has its own noise."""

    seeds: Positive | None = None
    """Initial noises per prompt; `group_size` of them unless it or `branches` is given."""
    branches: tuple[Positive, ...] = ()
    """Children per node, one entry per stochastic step of an epoch; by default all of them at the first."""

    def resolve(self, group_size: int, *, steps: int) -> Tree:
        """Create the tree of `group_size` samples with `steps` stochastic steps.

        Raises:
            ValueError: if they do not fit; the message names the key and the fix.
        """
        if self.branches and len(self.branches) != steps:
            raise ValueError(
                f"sampling.tree.branches {list(self.branches)} has {len(self.branches)} entries and an epoch has "
                f"{steps} stochastic steps; give one entry per step"
            )
        # What is left out follows from the group's size.
        seeds = self.seeds or max(1, group_size // math.prod(self.branches))
        branches = self.branches or (max(1, group_size // seeds), *[1] * (steps - 1))
        samples = seeds * math.prod(branches)
        if samples != group_size:
            raise ValueError(
                f"sampling.tree has {seeds} seeds × {' × '.join(map(str, branches))} branches = {samples} "
                f"samples and group_size is {group_size}; make them equal"
            )
        return Tree(seeds, branches)


class Suffix(Section):
    """The deterministic steps after the last stochastic one. They are no part of log p, so that a cheaper way to the
    image changes only which image is judged; evaluation always takes all steps."""

    solver: Literal["euler", "ab2"] = "euler"
    """Solver of a step: Euler, or the second-order method of Adams and Bashforth."""
    steps: Positive | None = None
    """Steps to the image, evenly chosen from the remaining steps; by default all."""

    def grid(self, first: int, last: int) -> list[int]:
        """List the indices of the sigmas that the suffix visits, from `first` to `last` inclusive.

        Raises:
            ValueError: if it has more steps than there are, or fewer than the solver needs.
        """
        left = last - first
        # All steps of the sampler.
        if self.solver == "euler" and self.steps is None:
            return list(range(first, last + 1))
        count = self.steps or left
        # The second-order solver looks back one step.
        least = 2 if self.solver == "ab2" else 1
        if not least <= count <= left:
            raise ValueError(
                f"sampling.suffix of {count} steps by {self.solver}, and {left} deterministic steps follow the last "
                f"stochastic one; it takes {least} to {left}: set sampling.suffix.steps, or raise sampling.steps"
            )
        return [first + round(index * left / count) for index in range(count + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Sampler of one epoch, or of images without noise.

    Example:
        Sampler(size=Size(1024, 1024), steps=20)
    """

    size: Size
    """Size in the config; `PipelinePolicy.size_of` derives a prompt's size."""
    steps: int
    """Denoising steps from noise to image."""
    sde_type: str = "flow_sde"
    """The stochastic step, by its name in `SDE_TYPES`."""
    noise_level: float = 0.7
    """a in σ_t = a·√(t/(1−t))."""
    sde_steps: Sequence[int] = ()
    """Indices of the sampling steps that are trained."""
    suffix: Suffix = field(default_factory=Suffix)
    tree: Tree = Tree(seeds=1)
    """Tree of each group, with one branching per stochastic step."""
    stochastic: bool = True
    """Whether the SDE steps add noise; otherwise sampling is the plain ODE, for objectives of the endpoint."""
    keeps_means: bool = False
    """Whether the means of the stochastic steps are kept."""

    @property
    def stochastic_steps(self) -> Sequence[int]:
        """The steps that add noise."""
        if not self.stochastic:
            return ()
        return self.sde_steps
