"""Gradients of the node form, in one process or several, and of the sample form as a trainer without nodes has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from edit_twins import edit, flux_policy, klein_pipeline, kontext_pipeline, qwen_pipeline
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.builders import freeze_idle_layers
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import Draw, collect
from pacorl.grpo.rows import Row, assign_rows
from pacorl.grpo.update import PolicyLoss, update_policy
from pacorl.models.adapters import adapter_off, adapter_state, add_lora
from pacorl.models.policies.klein import KLEIN
from pacorl.models.policies.kontext import KONTEXT
from pacorl.models.policies.qwen_image import QWEN_EDIT
from pacorl.runtime.processes import Runtime
from pacorl.tiny.characters import character_prompts
from pacorl.types import Advantages, Samples, Size

TWINS: dict[str, Callable[[], Any]] = {
    "flux": flux_policy,
    "kontext": lambda: KONTEXT.over(kontext_pipeline(), max_sequence_length=48),
    "qwen_edit": lambda: QWEN_EDIT.over(qwen_pipeline(), true_cfg_scale=2.0),
    "klein": lambda: KLEIN.over(klein_pipeline(), max_sequence_length=48),
}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TREES = {
    "1x[12]": Tree(1, (12,)),
    "2x[6]": Tree(2, (6,)),
    "1x[4,4]": Tree(1, (4, 4)),
}
PATHS = ("grpo_clip", "grpo_guard")
SIZE, STEPS, KL_WEIGHT, CLIP_RANGE, NOISE_LEVEL = Size(32, 32), 4, 0.1, 1e-4, 0.7

Gradients = Mapping[str, Tensor]
"""By objective: the adapter's, in one row."""


class InDouble(TorchFunctionMode):
    """Within it fp64 stays fp64. Diffusers rounds to fp32 inside of its models (the rotary embedding), whatever their
    weights are, and by that roundings the sum of gradients is not the gradient of the sum."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func in {Tensor.float, Tensor.to, Tensor.type_as} and args[0].dtype == torch.float64
        return args[0] if is_cast and result.dtype == torch.float32 else result


class World:
    """A twin with an adapter, in this process or as one of several, and one group of one prompt."""

    def __init__(self, twin: str, dtype: str, folder: Path) -> None:
        self.precision = DTYPES[dtype]
        self.policy, self.runtime = TWINS[twin](), Runtime()
        self.policy.pipeline.to(self.precision)
        source = folder / "source.png"
        self.prompt = edit(source) if self.policy.max_sources else character_prompts("train", 1)[0]
        self.cache = ConditioningCache(self.policy)
        self.cache.prepare([self.prompt], SIZE)
        add_lora(self.policy.transformer, rank=2, alpha=4, targets=self.policy.lora_targets)
        self.policy.transformer.to(self.precision)
        # As in training: what no output depends on is frozen, so that no process waits for its gradient.
        freeze_idle_layers(self.policy, targets=self.policy.lora_targets)
        self.policy.transformer, _ = self.runtime.prepare(
            self.policy.transformer,
            torch.optim.AdamW([p for p in self.policy.transformer.parameters() if p.requires_grad]),
        )
        # Of what the launcher left: it may have put other storage behind the weights.
        self.adapter = adapter_state(self.runtime.unwrap(self.policy.transformer))
        self.parameters = [p for p in self.policy.transformer.parameters() if p.requires_grad]

    @torch.no_grad()
    def set_adapter(self, *, moved: bool) -> None:
        """The one that samples, or one so far from it that ratios lie on either side of the clip range."""
        generator = torch.Generator().manual_seed(0)
        for value in self.adapter.values():
            first, second = torch.randn(2, *value.shape, generator=generator, dtype=torch.float64)
            value.copy_(0.1 * first + (0.01 * second if moved else 0))

    def exactly(self) -> AbstractContextManager[Any]:
        return InDouble() if self.precision == torch.float64 else nullcontext()

    def sampler(self, tree: Tree) -> Sampler:
        return Sampler(
            size=SIZE,
            steps=STEPS,
            sde_steps=tuple(range(1, 1 + len(tree.branches))),
            noise_level=NOISE_LEVEL,
            tree=tree,
            keeps_means=True,
        )

    def samples(self, tree: Tree) -> Samples:
        """This process's part of the group, in batches of half a group: two processes have one each."""
        rows, batch = [Row(self.prompt, number) for number in range(tree.group_size)], tree.group_size // 2
        (units,) = assign_rows(
            rows, tree=tree, batch=batch, updates=1, world=self.runtime.world, rank=self.runtime.rank
        )
        draw = Draw(self.policy, self.sampler(tree), self.cache, seed=1, epoch=0, batch=batch)
        parts = [collect(draw, unit) for unit in units]
        return Samples([r for part in parts for r in part.rollouts], [n for part in parts for n in part.nodes])


def advantage_of(row: int) -> float:
    """Of either sign, and none like another."""
    return math.sin(2.0 * row + 1)


def node_gradients(world: World, tree: Tree) -> Gradients:
    """pacorl's own, of a policy that has moved since it sampled."""
    world.set_adapter(moved=False)
    values = torch.tensor([advantage_of(row) for row in range(tree.group_size)], dtype=torch.float64)
    advantages = Advantages(values, torch.ones(tree.group_size, dtype=torch.bool), {})
    gradients = {}
    with world.exactly():
        samples = world.samples(tree)
        world.set_adapter(moved=True)
        for name in PATHS:
            options = OBJECTIVES[name].options(kl_weight=KL_WEIGHT, clip_range=CLIP_RANGE)  # type: ignore[call-arg]
            loss = PolicyLoss(world.policy, world.sampler(tree), world.cache, options)
            update_policy(loss, samples, advantages, runtime=world.runtime, draw=(1, 0, 0))
            gradients[name] = row_of(p.grad for p in world.parameters)
            for parameter in world.parameters:
                parameter.grad = None
    return gradients


def sample_gradients(world: World, tree: Tree) -> Gradients:
    """Of the same samples, each by itself: a forward for every step of its path, and formulas of this file."""
    world.set_adapter(moved=False)
    with world.exactly():
        path = [
            (batch.latents_VNC[node][None], batch.next_latents_ENC[child][None], batch.step, advantage_of(row))
            for batch in world.samples(tree).nodes
            for row, node, child in zip(batch.row_B, batch.node_B, batch.child_B, strict=True)
        ]
        with torch.no_grad():
            old = [mean_and_std(world, x, step)[0] for x, _, step, _ in path]
        world.set_adapter(moved=True)
        sums = {name: torch.zeros(sum(p.numel() for p in world.parameters), dtype=world.precision) for name in PATHS}
        for (x, after, step, advantage), old_mean in zip(path, old, strict=True):
            with torch.no_grad(), adapter_off(world.policy.transformer):
                base_mean, _ = mean_and_std(world, x, step)
            mean, std = mean_and_std(world, x, step)
            log_ratio = ((after - old_mean) ** 2 - (after - mean) ** 2).mean() / (2 * std**2)
            centre = ((mean - old_mean) ** 2).mean() / (2 * std**2)
            sigmas = world.policy.sigmas(STEPS, SIZE)
            dt = float(sigmas[step] - sigmas[step + 1])
            kl = ((mean - base_mean) ** 2).mean() / (2 * std**2)
            for name, ratio, scale in (
                ("grpo_clip", log_ratio.exp(), 1.0),
                ("grpo_guard", ((log_ratio + centre) * std).exp(), 1 / dt),
            ):
                bounded = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
                loss = -scale * torch.minimum(ratio * advantage, bounded * advantage) + KL_WEIGHT * kl
                sums[name] += row_of(torch.autograd.grad(loss / len(path), world.parameters, retain_graph=True))
    return sums


def mean_and_std(world: World, x: Tensor, step: int) -> tuple[Tensor, float]:
    """Flow-GRPO's SDE, arXiv 2505.05470 Eq. 9, of one sample."""
    sigmas = world.policy.sigmas(STEPS, SIZE).double()
    sigma, dt = float(sigmas[step]), float(sigmas[step + 1] - sigmas[step])
    velocity = world.policy.velocity(x, sigmas[step].float()[None], world.cache.batch([world.prompt], SIZE), SIZE)
    diffusion = NOISE_LEVEL * math.sqrt(sigma / (1 - sigma))
    drift = velocity + diffusion**2 / (2 * sigma) * (x + (1 - sigma) * velocity)
    return x + drift * dt, diffusion * math.sqrt(-dt)


def row_of(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def save_node_gradients(folder: Path, dtype: str) -> None:
    """Save the gradients of every twin and tree, all in these processes: to start them costs most."""
    for twin in TWINS:
        world = World(twin, dtype, folder)
        for name, tree in TREES.items():
            gradients = node_gradients(world, tree)
            if world.runtime.is_main:
                torch.save(gradients, folder / f"{twin}-{dtype}-{name}.pt")
