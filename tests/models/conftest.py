"""Random tiny models: the real classes, weights that no test depends on."""

import pytest
import torch

from pacorl.data.characters import vocabulary
from pacorl.policies.flux import FLUX, FluxPolicy, tiny_flux


@pytest.fixture(scope="session")
def flux() -> FluxPolicy:
    """A tiny FLUX whose output depends on everything (the zero-initialised layers are drawn)."""
    torch.manual_seed(0)
    pipeline = tiny_flux(vocabulary())
    for parameter in pipeline.transformer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return FLUX.over(pipeline, guidance_scale=3.5, max_sequence_length=48)
