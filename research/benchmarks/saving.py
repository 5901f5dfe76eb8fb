"""Seconds of the main thread that a checkpoint takes, at the size of FLUX's adapter.

    python -m research.benchmarks.saving                 # rank 64 on all targets: 8 GB of memory, 3.6 GB of disk
    python -m research.benchmarks.saving --rank 16

Adapter, moving average and AdamW's moments have the published shapes and lie on the device that is here; the model that
they adapt is not built. Each epoch saves, and waits for the file as sampling would. The first save also allocates the
memory that the others reuse. Exits with 1 if a later one takes the main thread more than `LIMIT` seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch
from research.twin import generator_parts
from torch import nn

from pacorl.config.base import load
from pacorl.config.recipes import recipe
from pacorl.grpo import builders
from pacorl.grpo.checkpoint import CheckpointWriter
from pacorl.grpo.lora_training import LoraTraining
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.plan.generators import policy_on_meta
from pacorl.runtime.logbook import Progress
from pacorl.runtime.processes import Runtime

LIMIT = 0.3
"""Seconds of the main thread an epoch."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"out={folder}", f"adapter.rank={options.rank}", "keep_checkpoints=1"]
        config = load(PolicyConfig, recipe("flux_t2is_1gpu"), [*settings, "model.gradient_checkpointing=true"])
        lora = adapter_alone(config)
        progress = Progress(epochs=options.epochs)
        writer = CheckpointWriter(lora, config, progress=progress)
        slowest = 0.0
        for epoch in range(options.epochs):
            lora.step = epoch + 1
            wall, own = time.perf_counter(), time.thread_time()
            writer.save({"epoch": epoch, "score": None})
            wall, own = time.perf_counter() - wall, time.thread_time() - own
            writer.finish()
            slowest = max(slowest, wall) if epoch else 0.0
            print(f"save {epoch + 1}: main thread {wall:.2f} s ({own:.2f} s of CPU), {progress.lap()}", flush=True)
        writer.close()
    return int(slowest > LIMIT)


def adapter_alone(config: PolicyConfig) -> LoraTraining:
    """Build the recipe's adapter after an optimizer step, without the model below it."""
    policy = policy_on_meta(config.generator, config.model, generator_parts(config.generator, tiny=False, depth=None))
    builders.add_adapter(config, policy)
    adapter = nn.Module()
    for name, weight in policy.transformer.named_parameters():
        if weight.requires_grad:
            *path, leaf = name.split(".")
            parent = adapter
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.register_parameter(leaf, nn.Parameter(torch.randn(weight.shape)))
    alone: Any = SimpleNamespace(transformer=adapter, lora_targets=policy.lora_targets)
    lora = LoraTraining(alone, config.optimizer, runtime=Runtime())
    for weight in adapter.parameters():
        weight.grad = torch.full_like(weight, 1e-3)
    lora.take_step()
    return lora


if __name__ == "__main__":
    sys.exit(main())
