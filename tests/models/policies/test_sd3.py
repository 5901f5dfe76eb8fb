"""Stable Diffusion 3: its published encoders."""

import torch

from pacorl.models.int8 import parameter_count
from pacorl.models.policies.sd3 import SD3
from pacorl.plan.generators import model_on_meta


def test_the_published_encoders_have_the_published_number_of_parameters() -> None:
    counts = [123_650_304, 694_659_840, 4_762_310_656, 83_819_683]
    for name, count in zip([*SD3.policy.encoders, "vae"], counts, strict=True):
        assert parameter_count(model_on_meta(SD3.parts[name], dtype=torch.float32)) == count, name
