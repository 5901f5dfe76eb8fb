"""Stable Diffusion 3: its sizes and its published encoders."""

import pytest
import torch
from tests.twins import tiny_sd3

from pacorl.models.int8 import parameter_count
from pacorl.models.policies.sd3 import SD3
from pacorl.plan.generators import model_on_meta
from pacorl.tiny.world import vocabulary
from pacorl.types import Size


def test_a_size_beyond_the_learned_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"size 64x1032 .* at most 1024x1024"):
        SD3.over(tiny_sd3(vocabulary()), max_sequence_length=48).check_size(Size(64, 1032))


def test_the_published_encoders_have_the_published_number_of_parameters() -> None:
    counts = [123_650_304, 694_659_840, 4_762_310_656, 83_819_683]
    for name, count in zip([*SD3.policy.encoders, "vae"], counts, strict=True):
        assert parameter_count(model_on_meta(SD3.parts[name], dtype=torch.float32)) == count, name
