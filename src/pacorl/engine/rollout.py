"""The only denoising loop: training samples with their stochastic steps, and plain pictures without noise.

Randomness comes from (seed, epoch, global row, step) alone, so that one process or eight paint the same pictures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pacorl.core.sde import KERNELS, Transition, log_prob, ode
from pacorl.types import Conditioning, Prompt, Rollout, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policy import Policy


@dataclass(frozen=True, slots=True)
class Sampler:
    """How samples are drawn."""

    size: Size
    steps: int
    kernel: str = "flow_sde"
    noise_level: float = 0.7
    noise_steps: tuple[int, ...] = ()
    """Indices of the stochastic steps; none for the plain ODE."""
    shared_noise: bool = False
    """One initial noise per group."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to be drawn: which prompt, which global row of its epoch."""

    prompt: Prompt
    number: int


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from what names a draw; the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def epoch_rows(prompts: Sequence[Prompt], *, epoch: int, count: int, group_size: int, seed: int) -> list[Row]:
    """The rows of an epoch: `count` prompts, each `group_size` times in a row.

    Prompts follow a shuffled order that is used up before it is shuffled anew.
    """
    chosen = []
    for position in range(epoch * count, (epoch + 1) * count):
        turn, place = divmod(position, len(prompts))
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed_of(seed, "order", turn)))
        chosen.append(prompts[int(order[place])])
    return [Row(chosen[number // group_size], number) for number in range(count * group_size)]


def assign_groups(rows: Sequence[Row], *, batch: int, updates: int, world: int, rank: int) -> list[list[list[Row]]]:
    """This rank's micro-batches for each update of the epoch: [update][micro-batch][row].

    Batches are cut from the global rows and dealt in turn, so what is in a batch does not depend on the number of
    processes. Raises ValueError where they do not divide evenly, naming sizes that would.
    """
    if len(rows) % (batch * updates * world):
        fitting = [size for size in range(1, len(rows) + 1) if len(rows) % (size * updates * world) == 0]
        raise ValueError(
            f"{len(rows)} samples an epoch do not divide into {updates} updates × {world} processes × "
            f"batches of {batch}; "
            + (f"batches of {', '.join(map(str, fitting[:8]))} would" if fitting else "change the number of samples")
        )
    batches = [list(rows[start : start + batch]) for start in range(0, len(rows), batch)]
    return [batches[update::updates][rank::world] for update in range(updates)]


class ConditioningCache:
    """Each (prompt, size) encoded once per run, kept on the CPU.

    Known by text and sources, not by id: training and evaluation prompts are numbered apart.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[tuple[Any, ...], Conditioning] = {}

    def batch(self, prompts: Sequence[Prompt], size: Size) -> Conditioning:
        self.prepare(prompts, size)
        return self._policy.collate([self._known[_key(prompt, size)] for prompt in prompts])

    def prepare(self, prompts: Sequence[Prompt], size: Size) -> None:
        """Encodes what is not known yet."""
        wanted = {_key(prompt, size): prompt for prompt in prompts}
        unknown = {key: prompt for key, prompt in wanted.items() if key not in self._known}
        if unknown:
            self._known |= dict(zip(unknown, self._policy.encode(list(unknown.values()), size), strict=True))


def _key(prompt: Prompt, size: Size) -> tuple[Any, ...]:
    return prompt.text, prompt.sources, size


@torch.no_grad()
def collect(
    policy: Policy, rows: Sequence[Row], *, sampler: Sampler, cache: ConditioningCache, seed: int, epoch: int
) -> Rollout:
    """Draws one micro-batch of training samples and keeps its stochastic steps."""
    prompts = [row.prompt for row in rows]
    conditioning = cache.batch(prompts, sampler.size)
    sigmas = policy.sigmas(sampler.steps, sampler.size)
    starts = [seed_of(seed, epoch, "start", row.prompt.id if sampler.shared_noise else row.number) for row in rows]
    before, after, chances = [], [], []

    def stochastic(x_BNC: Tensor, velocity_BNC: Tensor, step: int) -> Tensor:
        transition = transition_at(sampler, sigmas, step, x_BNC, velocity_BNC)
        noise = policy.noise([seed_of(seed, epoch, "step", step, row.number) for row in rows], sampler.size)
        drawn = transition.mean_BNC + transition.std * noise
        before.append(x_BNC)
        after.append(drawn)
        chances.append(log_prob(drawn, transition))
        return drawn

    final = denoise(policy, starts, conditioning=conditioning, sigmas=sigmas, sampler=sampler, stochastic=stochastic)
    return Rollout(
        prompts=prompts,
        row_B=[row.number for row in rows],
        size=sampler.size,
        sigmas_T=sigmas,
        steps_S=list(sampler.noise_steps),
        before_BSNC=torch.stack(before, 1).cpu(),
        after_BSNC=torch.stack(after, 1).cpu(),
        log_prob_BS=torch.stack(chances, 1).cpu(),
        final_BNC=final.cpu(),
        images=policy.decode(final, sampler.size),
    )


@torch.no_grad()
def sample_images(
    policy: Policy,
    prompts: Sequence[Prompt],
    *,
    sampler: Sampler,
    cache: ConditioningCache,
    seeds: Sequence[int],
    batch: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Image]:
    """Paints one picture per (prompt, seed) without noise; `progress` hears of each batch's size."""
    sigmas = policy.sigmas(sampler.steps, sampler.size)
    images: list[Image] = []
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        conditioning = cache.batch(prompts[part], sampler.size)
        final = denoise(policy, seeds[part], conditioning=conditioning, sigmas=sigmas, sampler=sampler)
        images += policy.decode(final, sampler.size)
        progress(len(final))
    return images


def transition_at(sampler: Sampler, sigmas: Tensor, step: int, x_BNC: Tensor, velocity_BNC: Tensor) -> Transition:
    """The Gaussian of stochastic step `step`: one home for sampling and for training."""
    return KERNELS[sampler.kernel](
        x_BNC,
        velocity_BNC,
        sigma=float(sigmas[step]),
        sigma_next=float(sigmas[step + 1]),
        noise_level=sampler.noise_level,
        sigma_max=float(sigmas[1]),
    )


def denoise(
    policy: Policy,
    starts: Sequence[int],
    *,
    conditioning: Conditioning,
    sigmas: Tensor,
    sampler: Sampler,
    stochastic: Callable[[Tensor, Tensor, int], Tensor] | None = None,
) -> Tensor:
    """From noise (one seed per row) to endpoints (B, N, C).

    `stochastic` takes the steps of `sampler.noise_steps`; all others are Euler's. Rows that start from one noise (and
    so have one prompt) are computed once until noise parts them.
    """
    parting = sampler.noise_steps[0] if stochastic and sampler.noise_steps else 0
    distinct = list(dict.fromkeys(starts)) if parting else list(starts)
    first = [starts.index(start) for start in distinct]
    full = conditioning
    if len(distinct) < len(starts):
        conditioning = Conditioning({name: tensor[first] for name, tensor in full.tensors.items()})
    x_BNC = policy.noise(distinct, sampler.size)
    for step in range(sampler.steps):
        if step == parting and len(x_BNC) < len(starts):
            x_BNC, conditioning = x_BNC[[distinct.index(start) for start in starts]], full
        sigma_B = sigmas[step].to(x_BNC.device).expand(len(x_BNC))
        velocity_BNC = policy.velocity(x_BNC, sigma_B, conditioning, sampler.size)
        if stochastic and step in sampler.noise_steps:
            x_BNC = stochastic(x_BNC, velocity_BNC, step)
        else:
            x_BNC = ode(x_BNC, velocity_BNC, sigma=float(sigmas[step]), sigma_next=float(sigmas[step + 1]))
    return x_BNC
