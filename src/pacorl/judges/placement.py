"""Where a judge of this process lives: its device and dtype."""

from __future__ import annotations

from typing import Any


def placement(checkpoint: str, dtype: str = "auto") -> dict[str, Any]:
    """Where a judge in this process runs: `dtype` and `device` of `LocalJudge.from_pretrained`.

    "auto" is bfloat16 on a GPU and float32 elsewhere, and float32 for the tiny judge everywhere.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    best = "bfloat16" if on_gpu and checkpoint != "tiny" else "float32"
    return {"dtype": best if dtype == "auto" else dtype, "device": "cuda" if on_gpu else "cpu"}
