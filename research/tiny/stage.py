"""A stage of a training: AdamW with warmup and cosine, an average of the weights, and a state to go on from.

Legend: B batch, N tokens, C channels.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from pacorl.io.documents import append_jsonl, read_object, write_json
from pacorl.io.files import write_atomic

STATE = "state.pt"
"""Weights, average and optimizer, from which a stopped training goes on."""


class Stage:
    """One training: schedule, optimizer, moving average of the weights, and log."""

    def __init__(self, modules: Sequence[nn.Module], *, lr: float, steps: int, log: Path, ema: float) -> None:
        def warm_cosine(step: int) -> float:
            cosine = 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
            # The rate ends at 1 % instead of 0, so that the last steps still count.
            return min((step + 1) / max(1, steps // 50), cosine + 0.01)

        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_cosine)
        self.average = [p.detach().clone() for p in self.parameters]
        self.ema = ema
        self.step = 0
        self.steps = steps
        self.log = log
        self.started = time.time()
        self.recent: list[float] = []

    def update(self, loss: Tensor, **metrics: float) -> None:
        """Make an optimizer step; log every hundredth one, with the mean loss since the last."""
        # A step.
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        self.recent.append(loss.item())
        # The first steps are far from any good weights: the average must forget them.
        decay = min(self.ema, self.step / (self.step + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)
        # A line of the log.
        if self.step % 100 == 0 or self.step == self.steps:
            line = {"step": self.step, "loss": sum(self.recent) / len(self.recent), **metrics}
            line["seconds"] = round(time.time() - self.started, 1)
            self.recent.clear()
            append_jsonl(self.log, line)
            print(line, flush=True)

    def save_average(self, model: Any, out: Path) -> None:
        """Save `model`, which contains the modules, with averaged weights; training goes on from the last weights."""
        last = [p.detach().clone() for p in self.parameters]
        self.use_average()
        model.save_pretrained(out)
        torch._foreach_copy_([p.detach() for p in self.parameters], last)

    def save(self, path: Path, *, first: int = 0, rng: Random | None = None) -> None:
        """Write all that a resumed stage needs; `first`: steps before the stage; `rng` draws its data."""
        state = {
            "first": first,
            "step": self.step,
            "parameters": [p.detach() for p in self.parameters],
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": rng and rng.getstate(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomic(path, buffer.getvalue())

    def resume(self, path: Path, *, first: int = 0, rng: Random | None = None) -> None:
        """Go on from a file of `save`: one of an earlier stage is ignored, and one of a later stage ends this one."""
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True)
        if state["first"] < first:
            return
        torch._foreach_copy_([p.detach() for p in self.parameters], state["parameters"])
        torch._foreach_copy_(self.average, state["average"])
        if state["first"] > first:
            # The later stage, whose start is the average of this one, reads all of it again.
            self.step = self.steps
            return
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        if rng:
            version, numbers, gauss = state["rng"]
            rng.setstate((version, tuple(numbers), gauss))

    def use_average(self) -> None:
        """Replace the last weights by the averaged ones."""
        torch._foreach_copy_([p.detach() for p in self.parameters], self.average)


def publish(model: Any, out: Path) -> None:
    """Save a model or pipeline without the path of its origin."""
    model.save_pretrained(out)
    for file in out.rglob("*.json"):
        config = read_object(file)
        if isinstance(config, dict) and config.pop("_name_or_path", None):
            write_json(file, config)


def seeded(step: int) -> Random:
    """Seed torch and a generator of teachers by the step, so that a resumed training draws what it would have drawn."""
    torch.manual_seed(step)
    return Random(step)


def flow_matching_loss(
    velocity: Callable[[Tensor, Tensor], Tensor], clean_BNC: Tensor, *, shift: float, weight: Tensor | None = None
) -> Tensor:
    """Compute the mean squared error of `velocity` (noisy latents, times) at times that favour noise.

    Args:
        weight: of each token (N,).
    """
    batch = len(clean_BNC)
    # Half logit-normal, half uniform, then shifted towards noise, where an image's content is decided.
    t = torch.where(torch.rand(batch) < 0.5, torch.rand(batch), torch.sigmoid(torch.randn(batch)))
    t = shift * t / (1 + (shift - 1) * t)
    noise = torch.randn_like(clean_BNC)
    error_BN = (velocity(torch.lerp(clean_BNC, noise, t[:, None, None]), t) - (noise - clean_BNC)).square().mean(-1)
    return (error_BN if weight is None else error_BN * weight).mean()
