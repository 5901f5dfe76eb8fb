"""`gpu_day` at the published width of FLUX.1-dev at 512 px, on a pretended card, in a process of its own.

One block of each kind is there, for speed: the others are alike.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from pretended import pretended
from traced import handed_on

from pacorl.models.policies.flux import FLUX

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu_day.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("gpu_day", FILE)
    assert spec
    assert spec.loader
    gpu_day = importlib.util.module_from_spec(spec)
    sys.modules["gpu_day"] = gpu_day  # dataclasses look their module up
    spec.loader.exec_module(gpu_day)
    with pytest.MonkeyPatch.context() as patch, pretended() as card:
        patch.setattr(gpu_day, "SIDES", (512,))
        for depth in ("num_layers", "num_single_layers"):
            patch.setitem(FLUX.parts["transformer"], depth, 1)  # type: ignore[arg-type]
        patch.setattr(gpu_day, "torch_context", partial(handed_on, card, gpu_day.torch_context))
        sections = ["policy", "epoch", "judge", "ratio"]
        options = gpu_day.arguments(["--steps", "2", "--repeats", "1", "--sections", *sections])
        day = gpu_day.measured(options, torch.device("meta"))
    assert [(phase.side, phase.phase) for phase in day.phases] == [(512, "sample"), (512, "decode"), (512, "train")]
    assert all(phase.flops > 1e12 and phase.planned_bytes > 2**30 for phase in day.phases)
    assert "| 512 | decode | " in gpu_day.page(day)
    assert card.counts["judge"].flops > 1e13  # beside the sampling, on a thread of its own


if __name__ == "__main__":
    main()
