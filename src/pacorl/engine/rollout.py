"""The only denoising loop: training samples with their stochastic steps, and plain images without noise.

Randomness comes from (seed, epoch, global row, step) alone, so that one process or eight sample the same images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from pacorl.core.sampling import Sampler
from pacorl.core.schedule import seed_of
from pacorl.core.sde import SDE_TYPES, Transition, log_prob, ode
from pacorl.lora.adapters import FusedLora
from pacorl.types import Conditioning, Prompt, Rollout, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.policies.policy import Policy


Item = TypeVar("Item")


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


def assign_groups(rows: Sequence[Item], *, batch: int, updates: int, world: int, rank: int) -> list[list[list[Item]]]:
    """This rank's micro-batches for each update of the epoch: [update][micro-batch][row].

    Batches are cut from the global rows and spread over ranks in turn, so what is in a batch does not depend on the
    number of processes.

    Raises:
        ValueError: if they do not divide evenly; it names sizes that would.
    """
    if len(rows) % (batch * updates * world):
        raise ValueError(
            f"{len(rows)} samples an epoch do not divide into {updates} updates × {world} processes × "
            f"batches of {batch}; {_sizes_that_divide(len(rows), batch=batch, updates=updates, world=world)}"
        )
    batches = [list(rows[start : start + batch]) for start in range(0, len(rows), batch)]
    return [batches[update::updates][rank::world] for update in range(updates)]


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


@torch.no_grad()
def collect(
    policy: Policy,
    rows: Sequence[Row],
    *,
    sampler: Sampler,
    cache: ConditioningCache,
    seed: int,
    epoch: int,
    shared_prefixes: dict[int, Tensor] | None = None,
    fused: FusedLora | None = None,
) -> Rollout:
    """Draw one micro-batch of training samples and keep its stochastic steps.

    Args:
        rows: the samples, all of one size.
        epoch: from 0; with `seed` and a row's number it gives every draw.
        shared_prefixes: the latents at which groups branch, kept for the other batches of the epoch.
        fused: the adapter in the weights at the steps without noise, and only there: what is trained must be replayed.
    """
    prompts = [row.prompt for row in rows]
    size = policy.size_of(prompts[0], sampler.size)
    assert all(policy.size_of(prompt, sampler.size) == size for prompt in prompts), "a batch has one size"
    sigmas = sigmas_of(policy, sampler, prompts[0])
    seeds = [seed_of(seed, epoch, "start", row.prompt.id if sampler.shared_noise else row.number) for row in rows]
    trajectory: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def stochastic(x_BNC: Tensor, velocity_BNC: Tensor, step: int) -> Tensor:
        transition = transition_at(sampler, sigmas, step, x_BNC, velocity_BNC)
        noise = policy.noise([seed_of(seed, epoch, "step", step, row.number) for row in rows], size)
        drawn = transition.mean_BNC + transition.std * noise
        trajectory.append((x_BNC, drawn, transition.mean_BNC, log_prob(drawn, transition)))
        return drawn

    final = denoise(
        policy,
        seeds,
        size=size,
        conditioning=cache.batch(prompts, size),
        sigmas=sigmas,
        stochastic=stochastic,
        sde_steps=sampler.sde_steps if sampler.stochastic else (),
        shared_prefixes=shared_prefixes if sampler.shared_noise else None,
        fused=fused,
    )
    latents, next_latents, means, log_probs = zip(*trajectory, strict=True) if trajectory else ((), (), (), ())
    return Rollout(
        prompts=prompts,
        row_B=[row.number for row in rows],
        size=size,
        sigmas_T=sigmas,
        steps_S=list(sampler.sde_steps),
        latents_BSNC=_stacked(latents, final),
        next_latents_BSNC=_stacked(next_latents, final),
        log_prob_BS=torch.stack(log_probs, 1).cpu() if log_probs else torch.empty(len(rows), 0),
        final_BNC=final.cpu(),
        images=policy.decode(final, size),
        mean_BSNC=_stacked(means, final) if sampler.keeps_means else None,
    )


def _stacked(latents: Sequence[Tensor], final_BNC: Tensor) -> Tensor:
    """(B, S, N, C) on the CPU, with S = 0 if there were no stochastic steps."""
    return torch.stack(list(latents), 1).cpu() if latents else final_BNC[:, None][:, :0].cpu()


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


def denoise(
    policy: Policy,
    seeds: Sequence[int],
    *,
    size: Size,
    conditioning: Conditioning,
    sigmas: Tensor,
    stochastic: Callable[[Tensor, Tensor, int], Tensor] | None = None,
    sde_steps: Sequence[int] = (),
    shared_prefixes: dict[int, Tensor] | None = None,
    fused: FusedLora | None = None,
) -> Tensor:
    """From noise (one seed per row) to endpoints (B, N, C).

    `stochastic` takes the steps of `sde_steps`; all others are Euler's. Rows of one seed (and so of one prompt) are
    computed once until the first stochastic step, from which they branch.
    """

    def euler(x_BNC: Tensor, conditioning: Conditioning, steps: Iterable[int]) -> Tensor:
        with fused.swapped_in() if fused else nullcontext():
            for step in steps:
                velocity_BNC = velocity(x_BNC, conditioning, step)
                x_BNC = ode(x_BNC, velocity_BNC, sigma=float(sigmas[step]), sigma_next=float(sigmas[step + 1]))
        return x_BNC

    def velocity(x_BNC: Tensor, conditioning: Conditioning, step: int) -> Tensor:
        return policy.velocity(x_BNC, sigmas[step].to(x_BNC.device).expand(len(x_BNC)), conditioning, size)

    last, branch_step = len(sigmas) - 1, sde_steps[0] if sde_steps else 0
    prefixes = {} if shared_prefixes is None else shared_prefixes
    new_seeds = list(dict.fromkeys(seed for seed in seeds if seed not in prefixes))
    if new_seeds:
        first_rows = [seeds.index(seed) for seed in new_seeds]
        x_BNC = euler(policy.noise(new_seeds, size), _rows(conditioning, first_rows), range(branch_step))
        prefixes |= dict(zip(new_seeds, x_BNC, strict=True))
    x_BNC = torch.stack([prefixes[seed] for seed in seeds])
    for step, following in pairwise([*sde_steps, last]):
        assert stochastic is not None
        x_BNC = stochastic(x_BNC, velocity(x_BNC, conditioning, step), step)
        x_BNC = euler(x_BNC, conditioning, range(step + 1, following))
    return x_BNC if sde_steps else euler(x_BNC, conditioning, range(last))


def _rows(conditioning: Conditioning, rows: Sequence[int]) -> Conditioning:
    if len(rows) == len(conditioning):
        return conditioning
    return Conditioning({name: tensor[list(rows)] for name, tensor in conditioning.tensors.items()})
