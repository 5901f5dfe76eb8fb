"""The start-up check: every target matches, and what is trained changes the image."""

from pathlib import Path

import pytest
import torch
from edit_twins import edit, kontext_pipeline, qwen_pipeline, source_image
from policy_contract import layers_without_effect
from tiny_runs import tiny_run

from pacorl.grpo import builders
from pacorl.grpo.builders import freeze_idle_layers
from pacorl.models.adapters import add_lora
from pacorl.models.policies.kontext import KONTEXT
from pacorl.models.policies.pipeline import PipelinePolicy
from pacorl.models.policies.qwen_image import LORA_TARGETS, QWEN_EDIT
from pacorl.types import Size


def checked(policy: PipelinePolicy, folder: Path, targets: tuple[str, ...]) -> set[str]:
    prompt = edit(source_image(folder / "source.png", height=64, width=64))
    size = policy.size_of(prompt, Size(64, 64))
    add_lora(policy.transformer, rank=2, alpha=4, targets=targets)
    freeze_idle_layers(policy, targets=targets)
    conditioning = policy.collate(policy.encode([prompt], size))
    return layers_without_effect(policy, conditioning, size)


def test_qwen_s_last_block_cannot_matter_to_the_image(tmp_path: Path) -> None:
    policy = QWEN_EDIT.over(qwen_pipeline())
    assert checked(policy, tmp_path, LORA_TARGETS) == set()  # of what is left to learn
    trained = [name for name, p in policy.transformer.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * (2 * 12 - 4)
    assert not any(name.startswith("transformer_blocks.1.txt_mlp") for name in trained)
    assert all(p.grad is None for p in policy.transformer.parameters())


def test_every_module_of_kontext_matters(tmp_path: Path) -> None:
    policy = KONTEXT.over(kontext_pipeline(), max_sequence_length=48)
    assert checked(policy, tmp_path, policy.lora_targets) == set()


def test_the_released_feed_forward_names_match_nothing_of_qwen(tmp_path: Path) -> None:
    policy = QWEN_EDIT.over(qwen_pipeline())
    with pytest.raises(ValueError, match=r"'ff\.net\.2' matches no linear layer of QwenImageTransformer2DModel"):
        checked(policy, tmp_path, ("attn.to_q", "ff.net.2"))


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
