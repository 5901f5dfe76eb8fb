"""What the processes of a world do: a run of the tiny recipe that keeps what the tests compare."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

KEPT = "kept"
"""The folder in a run's that holds what is kept of it."""


def train(overrides: Sequence[str], resume: str = "") -> None:
    """The run, and nothing else."""
    from pacorl import config as configs
    from pacorl.app.quickstart import recipe
    from pacorl.train.policy import train_policy

    train_policy(configs.load(configs.PolicyRun, recipe(), list(overrides)), resume=resume)


def train_and_keep(overrides: Sequence[str], resume: str = "") -> None:
    """The run; every rank keeps its samples, the main process the advantages and each update's gradients."""
    from pacorl import config as configs
    from pacorl.app.quickstart import recipe
    from pacorl.engine.runtime import Runtime
    from pacorl.models.adapters import whole_state
    from pacorl.train import policy as loop

    config = configs.load(configs.PolicyRun, recipe(), list(overrides))
    kept = config.out / KEPT
    kept.mkdir(parents=True, exist_ok=True)
    collect, advantages, step = loop.collect, loop.advantages, Runtime.step

    def keep_samples(policy, rows, **rest):  # type: ignore[no-untyped-def]
        rollout = collect(policy, rows, **rest)
        for row, final, log_prob in zip(rollout.row_B, rollout.final_BNC, rollout.log_prob_BS, strict=True):
            torch.save((final, log_prob), kept / f"sample-{rest['epoch']}-{row}.pt")
        return rollout

    def keep_advantages(*args, **rest):  # type: ignore[no-untyped-def]
        found = advantages(*args, **rest)
        if os.environ.get("RANK", "0") == "0":  # every rank computes the same
            torch.save(found.value_B, kept / f"advantages-{len(list(kept.glob('advantages-*')))}.pt")
        return found

    def keep_gradients(runtime, optimizer, parameters, *, max_norm):  # type: ignore[no-untyped-def]
        gradients = whole_state({str(n): p.grad for n, p in enumerate(parameters) if p.grad is not None})
        if runtime.is_main:
            torch.save(gradients, kept / f"gradients-{len(list(kept.glob('gradients-*')))}.pt")
        return step(runtime, optimizer, parameters, max_norm=max_norm)

    loop.collect, loop.advantages, Runtime.step = keep_samples, keep_advantages, keep_gradients  # type: ignore[assignment,method-assign]
    loop.train_policy(config, resume=resume)
