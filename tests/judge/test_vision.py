"""Windows of one length attend together, and each sees what it would see alone."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from pacorl.judge.local import TINY_JUDGE
from pacorl.judge.vision import batch_windows


def tower() -> Any:
    """The tiny judge's, of patches of 8 pixels."""
    return AutoModelForImageTextToText.from_pretrained(TINY_JUDGE, dtype=torch.float32).eval().model.visual


@pytest.mark.parametrize(
    "grids",
    [
        [[1, 8, 8]],
        [[1, 8, 8]] * 4,
        [[1, 12, 20], [1, 8, 8], [1, 12, 20]],  # cut windows at the edges, and images of two sizes
        [[1, 18, 18]] * 2,
    ],
)
def test_the_features_are_those_of_a_call_per_window(monkeypatch: pytest.MonkeyPatch, grids: list[list[int]]) -> None:
    visual, grid_thw = tower(), torch.tensor(grids)
    config = visual.config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    torch.manual_seed(0)
    pixels = torch.randn(int(grid_thw.prod(1).sum()), width)
    calls: list[int] = []
    attend = F.scaled_dot_product_attention

    def counted(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(len(tensors[0]))
        return attend(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    with torch.inference_mode():
        expected = visual(pixels, grid_thw=grid_thw).pooler_output
        alone = len(calls)
        batch_windows(visual)
        calls.clear()
        features = visual(pixels, grid_thw=grid_thw).pooler_output
        again = visual(pixels.flip(0), grid_thw=grid_thw.flip(0)).pooler_output
    assert torch.equal(features, expected)
    assert again.shape == expected.shape
    assert sum(calls[: len(calls) // 2]) == alone
    # Whole images have as many lengths as there are sizes; windows up to four of each size.
    assert len(calls) // 2 <= len(visual.blocks) * 4 * len({tuple(grid) for grid in grids})
    assert len(calls) // 2 <= alone
