"""The layout of a VAE on an accelerator, and sizes that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.twins import parts as twins

from pacorl.models.policies.flux import FluxPolicy
from pacorl.models.policies.pipeline import use_channels_last
from pacorl.types import Size


@pytest.mark.parametrize("name", ["flux_vae", "qwen_image_vae"])
def test_weights_of_2d_convolutions_become_channels_last(name: str) -> None:
    """The VAE of Qwen-Image has 3D convolutions too, which torch refuses this layout."""
    vae: Any = twins.tiny_vae() if name == "flux_vae" else twins.model_of(twins.TINY[name])
    use_channels_last(vae)

    weights = [weight for weight in vae.parameters() if weight.dim() == 4]
    assert weights
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def test_an_image_that_could_not_be_read_again_is_refused(flux: FluxPolicy) -> None:
    flux.check_size(Size(8000, 8000))
    with pytest.raises(ValueError, match=r"size 8000x8008 must have from 64 to 64,000,000 pixels"):
        flux.check_size(Size(8000, 8008))
