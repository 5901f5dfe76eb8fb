"""The start-up check: every target matches, and what is trained changes the image."""

import pytest
import torch
from edit_twins import qwen_pipeline
from tiny_runs import tiny_run

from pacorl.grpo import builders
from pacorl.grpo.builders import freeze_idle_layers
from pacorl.models.adapters import add_lora
from pacorl.models.policies.qwen_image import QWEN_EDIT


def test_a_target_of_idle_layers_is_refused_before_weights_are_anywhere() -> None:
    policy, targets = QWEN_EDIT.over(qwen_pipeline()), ("attn.to_q", "transformer_blocks.1.txt_mlp.net.2")
    add_lora(policy.transformer, rank=2, alpha=4, targets=targets)
    with pytest.raises(ValueError, match=r"'transformer_blocks\.1\.txt_mlp\.net\.2' changes nothing that Qwen"):
        freeze_idle_layers(policy, targets=targets)


def test_fsdp2_takes_weights_from_main_memory(small: list[str]) -> None:
    """A card that need not have room for the whole transformer gets nothing of it before it is sharded."""
    config, card = tiny_run(small), torch.device("meta")
    policy = builders.build_adapted_policy(config, sizes=[], device=torch.device("cpu"))
    builders.place_transformer(config, policy, device=card, sharded=True)
    assert {parameter.device.type for parameter in policy.transformer.parameters()} == {"cpu"}
