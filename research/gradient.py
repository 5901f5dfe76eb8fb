"""How well an epoch's gradient points where that of many epochs points, with credit by set and by panel.

    python -m research.gradient quickstart sampling.size='[128,128]' --grid 2x2
    python -m research.gradient quickstart sampling.size='[192,192]' --grid 3x3

The adapter of a config's first policy is not moved: each epoch draws other prompts and noise. Its gradient is compared
with the mean gradient of all other epochs by their cosine. Both credits see the same samples and scores. The mean of a
credit with a bias points elsewhere, so each is compared with the other's mean too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from pacorl.config.base import load
from pacorl.core.grid import parse_layout
from pacorl.grpo.epoch import run_epoch
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.io.quiet import quiet_loading
from pacorl.records.prompts import save_prompts
from pacorl.tiny.world import set_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--grid", default="2x2")
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    quiet_loading()

    gradients = {}
    for credit in ("set", "panel"):
        with TemporaryDirectory() as folder:
            prompts = Path(folder) / "prompts.jsonl"
            save_prompts(set_prompts("train", 288, grid=parse_layout(options.grid)), prompts)
            settings = [f"prompts.train={prompts}", "prompts.evaluation=tiny:dev", f"advantages.credit={credit}"]
            settings += [f"out={folder}/run", f"epochs={options.epochs}", "trackers=[]"]
            settings += ["optimizer.updates_per_epoch=1", *options.overrides]
            gradients[credit] = gradients_of(load(PolicyConfig, options.config, settings))
    for credit, own in gradients.items():
        for target, others in gradients.items():
            cosines = cosines_with_rest(own, others)
            half = 1.96 * stdev(cosines) / len(cosines) ** 0.5
            print(f"an epoch by {credit}, the others' mean by {target}: cosine {fmean(cosines):.3f} ± {half:.3f}")


def gradients_of(config: PolicyConfig) -> Tensor:
    """Compute the gradient of each epoch at the config's first policy: (epochs, weights)."""
    gradients: list[Tensor] = []
    trainer = PolicyTrainer(config)
    try:
        lora = trainer.lora

        def keep_gradient() -> float:
            parts = [parameter.grad.flatten() for parameter in lora.parameters if parameter.grad is not None]
            gradients.append(torch.cat(parts).clone())
            trainer.policy.transformer.zero_grad()
            return float(gradients[-1].norm())

        lora.take_step = keep_gradient  # type: ignore[method-assign]
        for _ in range(config.epochs):
            run_epoch(trainer)
    finally:
        trainer.close()
    return torch.stack(gradients)


def cosines_with_rest(own: Tensor, others: Tensor) -> list[float]:
    """Compare each epoch's gradient with the mean of the other epochs'."""
    total = others.sum(0)
    return [float(cosine_similarity(row, total - other, dim=0)) for row, other in zip(own, others, strict=True)]


if __name__ == "__main__":
    main()
