"""Where the adapted transformer lies, and which of its layers learn."""

import torch
from edit_twins import qwen_pipeline
from tiny_runs import tiny_run

from pacorl.grpo import builders
from pacorl.models.adapters import add_lora
from pacorl.models.policies.qwen_image import QWEN_EDIT


def test_fsdp2_takes_weights_from_main_memory(small: list[str]) -> None:
    """A card that need not have room for the whole transformer gets nothing of it before it is sharded."""
    config, card = tiny_run(small), torch.device("meta")
    policy = builders.build_adapted_policy(config, sizes=[], device=torch.device("cpu"))
    builders.place_transformer(config, policy, device=card, sharded=True)
    assert {parameter.device.type for parameter in policy.transformer.parameters()} == {"cpu"}


def test_layers_without_effect_on_the_image_do_not_learn() -> None:
    policy = QWEN_EDIT.over(qwen_pipeline())
    add_lora(policy.transformer, rank=2, alpha=4, targets=["txt_mlp.net.2"])
    builders.freeze_idle_layers(policy)
    learning = {name.split(".lora_")[0] for name, value in policy.transformer.named_parameters() if value.requires_grad}
    assert learning == {"transformer_blocks.0.txt_mlp.net.2"}
