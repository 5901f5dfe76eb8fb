"""Stable Diffusion 3: its sizes and its published architecture."""

from typing import Any

import pytest
import torch
from tests.twins import tiny_sd3

from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.sd3 import SD3
from pacorl.plan.generators import model_on_meta
from pacorl.tiny.world import vocabulary
from pacorl.types import Size


@pytest.fixture(scope="module")
def pipeline() -> Any:
    torch.manual_seed(0)
    return tiny_sd3(vocabulary())


def over(pipeline: Any, **options: Any) -> PipelinePolicy:
    return SD3.over(pipeline, max_sequence_length=48, **options)


def test_a_size_beyond_the_learned_positions_is_refused(pipeline: Any) -> None:
    with pytest.raises(ValueError, match=r"size 64x1032 is beyond .* at most 1024x1024"):
        over(pipeline).check_size(Size(64, 1032))


def test_the_published_architecture_has_the_published_number_of_parameters() -> None:
    """Of Stable Diffusion 3.5 Medium, and without what it has new of Stable Diffusion 3 Medium (2.03 billion)."""
    new = {"dual_attention_layers", "qk_norm", "pos_embed_max_size"}
    config = SD3.parts["transformer"]
    older = {name: value for name, value in config.items() if name not in new} | {"pos_embed_max_size": 192}
    assert parameters(config) == 2_243_171_520
    assert parameters(older) == 2_028_328_000
    assert [parameters(SD3.parts[name]) for name in SD3.policy.encoders] == [123_650_304, 694_659_840, 4_762_310_656]
    assert parameters(SD3.parts["vae"]) == 83_819_683


def parameters(config: Any) -> int:
    return sum(parameter.numel() for parameter in model_on_meta(config, dtype=torch.float32).parameters())
