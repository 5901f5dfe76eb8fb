"""fp8 products at the steps of the ODE: the seconds that they save, and what they do to advantages.

    python -m research.fp8 flux_t2is_1gpu --groups 2      # on an H100 or later: row-wise `_scaled_mm`
    python -m research.fp8 tiny --groups 2                # anywhere: the same rounding, computed in the weights' type

Stochastic steps and the trained step keep their products, so that the ratio stays 1; only the judged image changes.
Each sample is finished twice from the latent after its last stochastic step, with all products and with fp8 ones, and
scored by the run's rewards. It enters `src` only if it saves a tenth of an epoch and the advantages of both correlate
by 0.99 or more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pacorl.config.base import load
from pacorl.core.advantages import advantages
from pacorl.core.batches import in_batches
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Trunk
from pacorl.grpo.rows import epoch_rows
from pacorl.grpo.scoring import Scorer, reward_table
from pacorl.grpo.trainer import PolicyTrainer
from research.gpu_day.measuring import synchronize

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--groups", type=int, default=2, help="prompts")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        config = load(PolicyConfig, options.config, [*options.overrides, "trackers=[]", f"out={folder}/run"])
        compare(PolicyTrainer(config), groups=options.groups)


@torch.no_grad()
def compare(trainer: PolicyTrainer, *, groups: int) -> None:
    """Finish the samples of some prompts in both forms, and print seconds and the correlation of their advantages."""
    config = trainer.config
    rows = epoch_rows(trainer.train_prompts, epoch=0, count=groups, group_size=config.group_size, seed=config.seed)
    trunk = Trunk(trainer.draw_of(0), rows)
    latents = trunk.grow()[1]
    values = []
    with fp8_products(trainer.lora.transformer) as switch, trainer.turns.scoring():
        for form in (False, True):
            switch(form)
            for _ in range(2):  # the first compiles, and chooses kernels
                started = time.perf_counter()
                batches = in_batches(rows, trainer.division.batch)
                rollouts = [trunk.finish(b, torch.stack([latents[row.number] for row in b]))() for b in batches]
                synchronize()
                seconds = time.perf_counter() - started
            with closing(Scorer(trainer.rewards, overlap=False)) as scorer:
                for rollout in rollouts:
                    scorer.submit(rollout)
                table = reward_table(scorer.results(), rows, names=tuple(trainer.rewards))
            weights = [reward.weight for reward in config.rewards]
            values.append(advantages(table, config.advantages, weights=weights).value_B)
            print(f"{'fp8' if form else 'exact'}: {seconds:.2f} s to finish and decode {len(rows)} samples")
    print(f"correlation of advantages: {torch.corrcoef(torch.stack(values))[0, 1]:.4f}")
    trainer.close()


@contextmanager
def fp8_products(transformer: nn.Module) -> Iterator[Callable[[bool], None]]:
    """Give the frozen layers of the blocks a form in fp8; the yielded function switches it on and off."""
    layers = []
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and "blocks." in name and ".lora_" not in name:
            layers.append(module)

    def switch(on: bool) -> None:
        for layer in layers:
            if on:
                weight, scale = rounded(layer.weight.data)
                layer.forward = fp8_forward(layer, weight, scale)
            else:
                layer.__dict__.pop("forward", None)

    try:
        yield switch
    finally:
        switch(False)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to fp8 by a scale of its own: (…, D) in fp8, and (…, 1) in fp32."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12).float() / LARGEST
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def fp8_forward(layer: Any, weight: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """Make the product of a layer in fp8; without a card in the layer's type, from equally rounded values."""

    def forward(x: Tensor) -> Tensor:
        x8, x_scale = rounded(x.flatten(0, -2))
        if x.is_cuda:
            y = torch._scaled_mm(x8, weight.t(), scale_a=x_scale, scale_b=scale.t(), bias=layer.bias, out_dtype=x.dtype)
        else:
            own = ((weight.float() * scale).to(x.dtype), layer.bias)
            y = F.linear((x8.float() * x_scale).to(x.dtype), *own)
        return y.view(*x.shape[:-1], -1)

    return forward


if __name__ == "__main__":
    main()
