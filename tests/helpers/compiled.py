"""A small FLUX whose blocks are compiled, and its loop in one of several processes: what each of them logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from drawn_adapters import draw_adapter
from edit_twins import drawn
from rollouts import collect
from tests.twins import tiny_flux, tiny_flux_transformer
from tests.twins.parts import vocabulary

from pacorl.core.objectives.grpo_clip import GrpoClip
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import Draw
from pacorl.grpo.rows import Row
from pacorl.grpo.update import PolicyLoss, update_policy
from pacorl.models.adapters import add_lora, full_tensor
from pacorl.models.policies.flux import FLUX, FluxPolicy
from pacorl.runtime.compiled import compile_blocks
from pacorl.runtime.processes import Runtime
from pacorl.tiny.world import set_prompts
from pacorl.types import Advantages, Size

SIZE = Size(32, 32)
PROMPTS = set_prompts("train", 1)


def small_policy(dtype: torch.dtype = torch.float32) -> FluxPolicy:
    """One block of each kind, with an adapter that does something on three layers."""
    torch.manual_seed(0)
    pipeline = tiny_flux(vocabulary())
    pipeline.transformer = tiny_flux_transformer(width=64, heads=2, double_blocks=1, single_blocks=1)
    policy: Any = FLUX.over(drawn(pipeline).to(dtype), max_sequence_length=48)
    add_lora(policy.transformer, rank=4, alpha=8, targets=["attn.to_q", "ff.net.2"])
    draw_adapter(policy.transformer, std=0.05)
    policy.transformer.train()
    return policy  # type: ignore[no-any-return]


def sample_and_train(out: Path) -> None:
    """Sample one image per process and take its gradients; save every rank's metrics and compiled frames."""
    runtime, policy = Runtime(), small_policy()
    cache = ConditioningCache(policy)
    cache.prepare(PROMPTS, SIZE)
    # Traced ahead of time and run as it is: to write kernels would take minutes.
    compile_blocks(policy.transformer, backend="aot_eager")
    learning = [parameter for parameter in policy.transformer.parameters() if parameter.requires_grad]
    policy.transformer, _ = runtime.prepare(policy.transformer, torch.optim.AdamW(learning))
    sampler = Sampler(size=SIZE, steps=2, sde_steps=(0,), tree=Tree(seeds=2, branches=(1,)))
    draw = Draw(policy, sampler, cache, seed=1, epoch=0, batch=1, as_trained=True)
    samples = collect(draw, [Row(PROMPTS[0], runtime.rank)])
    advantages = Advantages(torch.tensor([1.0, -1.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool), {})
    loss = PolicyLoss(draw, GrpoClip(clip_range=1e-4))
    metrics = update_policy(loss, samples, advantages, runtime=runtime)
    parameters = [parameter for parameter in policy.transformer.parameters() if parameter.requires_grad]
    gradients = {str(number): full_tensor(p.grad) for number, p in enumerate(parameters) if p.grad is not None}
    moved = all(bool(gradient.any()) for gradient in gradients.values())
    frames = dict(torch._dynamo.utils.counters["frames"])
    ranks = runtime.gather({"metrics": metrics, "gradients": len(gradients) if moved else 0, "frames": frames})
    if runtime.is_main:
        torch.save(ranks, out)
