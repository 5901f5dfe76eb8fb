"""`research.gpu_day` at the published width of FLUX.1-dev at 512 px, on a pretended card, in a process of its own.

One block of each kind is there, for speed: the others are alike.
"""

from __future__ import annotations

from functools import partial

import pytest
from pretended import pretended
from research.gpu_day import forms, judging
from research.gpu_day.runner import arguments
from traced import handed_on

from pacorl.models.policies.flux import FLUX
from pacorl.models.twins import META


def main() -> None:
    options = arguments(["--steps", "2", "--repeats", "1", "--batches", "1", "--depth", "2+4"])
    with pytest.MonkeyPatch.context() as patch, pretended() as card:
        patch.setattr(forms, "SIDES", (512,))
        for module in (forms, judging):
            patch.setattr(module, "device_of", lambda options: META)
        for depth in ("num_layers", "num_single_layers"):
            patch.setitem(FLUX.parts["transformer"], depth, 1)  # type: ignore[arg-type]
        patch.setattr(judging, "torch_context", partial(handed_on, card, judging.torch_context))
        full = [record for record in forms.measure_full(options) if "full" in record]
        int8 = list(forms.measure_form("int8", options))
        judged = list(judging.measure_judge(options))
    assert [record["full"] for record in full] == ["sample", "decode", "train", "train without checkpointing"]
    assert all(record["flops"] > 1e12 for record in full)
    assert all(record["planned"] > 2**30 for record in full[:3])
    assert [(record["blocks"], record["phase"]) for record in int8] == [
        (blocks, phase) for blocks in (1, 2) for phase in ("sample", "train", "train")
    ]
    assert [record["judging"] for record in judged if "judging" in record] == ["judge", "sampling", "both"]
    assert card.counts["judge"].flops > 1e13  # beside the sampling, on a thread of its own


if __name__ == "__main__":
    main()
